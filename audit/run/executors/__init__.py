"""Executors: backends that compute the units of work of a dependency graph."""
