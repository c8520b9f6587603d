"""Boards in the formats of other tools: files from one tidy table, which their own readers accept."""
