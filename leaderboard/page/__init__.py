"""The page of a run: tables, plots and pictures in one file."""
