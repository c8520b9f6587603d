"""Audit of the transcript of a training: its format, noise, canaries and claim."""
