"""Attacks on trained models and on shared updates: one method a file, named as the file."""
