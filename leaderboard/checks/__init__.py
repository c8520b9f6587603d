"""Checks of folders of records, before their numbers join a board: faults by file and field; no code runs."""
