"""Executors: backends that compute the units of a dependency graph."""
