"""Subjects of attacks, with their private data inside: a trained model, a shared update."""
