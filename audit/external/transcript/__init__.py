"""Audit of a training transcript: its format, noise, canaries and claim."""
