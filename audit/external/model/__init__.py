"""Audit of a model that was trained elsewhere: its file, the attacks on it, and the verdict."""
