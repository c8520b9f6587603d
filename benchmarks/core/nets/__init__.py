"""Shared machinery of architectures: blocks, shapes, initial weights."""
