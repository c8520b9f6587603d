"""Checks that a model may be trained under per-example bounds, on synthetic examples, before data are touched."""
