"""Audit of scores in a table, without the model."""
