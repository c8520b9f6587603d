"""HTML page of a run: tables, plots and pictures in a single file."""
