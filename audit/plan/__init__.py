"""Plans of a run: a suite expanded into cells with typed requests, and what a request names, built."""
