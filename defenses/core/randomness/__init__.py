"""Randomness: keyed generators, per-record draws, and the secret Gaussian noise."""
