"""The owner's examples: reading, identification by content, and comparison between groups."""
