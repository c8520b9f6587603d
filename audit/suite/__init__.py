"""Suite files (TOML): schema, validation that reports all mistakes at once, and the suite that results."""
