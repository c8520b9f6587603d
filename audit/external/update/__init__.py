"""Audit of a shared update: its convention, the attacks on it, and the verdict."""
