"""Planted bugs, and one battery of declared tests that is held against any trainer without knowing what it is."""
