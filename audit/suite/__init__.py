"""Suite files (TOML): schema, validation that reports all mistakes at once, and the resulting suite."""
