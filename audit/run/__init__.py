"""Runs cells: what waits for what, where it is computed, what is kept and written."""
