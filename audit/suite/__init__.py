"""Suite files: their types, all their mistakes at once, and what they ask for."""
