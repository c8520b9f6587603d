"""Data of one's own, by kind and path: `folder:PATH`. A file here is a kind; nothing else needs an edit."""
