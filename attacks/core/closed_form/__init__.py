"""Closed forms: what the equations of a layer determine, without a search."""
