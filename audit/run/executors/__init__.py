"""Executors: places where the pieces of a graph of work are computed."""
