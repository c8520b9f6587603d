"""Plan of a run: a suite expanded into cells with typed requests, and builders of the requested objects."""
