"""Rows, aggregates and controls, from records alone."""
