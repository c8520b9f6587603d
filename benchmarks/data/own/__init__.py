"""Users' own data, by kind and path: `folder:PATH`. Each file here is a kind; adding a file needs no other edit."""
