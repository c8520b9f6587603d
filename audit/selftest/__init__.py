"""Planted bugs, and a battery of declared tests that is run against any trainer as a black box."""
