"""Rows, aggregates and controls of the board, computed from records alone."""
