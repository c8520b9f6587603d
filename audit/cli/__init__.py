"""The command `leakbench`; one module a group of subcommands."""

from .app import main

__all__ = ["main"]
