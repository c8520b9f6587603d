"""Stacked training: many models of the same architecture trained at once, with a leading model axis."""
