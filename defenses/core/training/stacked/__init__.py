"""Many models of one architecture trained at once, with a leading model axis."""
