"""Command `leakbench`; a module per group of subcommands."""

from .app import main

__all__ = ["main"]
