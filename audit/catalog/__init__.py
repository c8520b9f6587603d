"""Finds methods by name and reads their settings."""
