"""Linear algebra of long rows: products, lengths and bases without the drift of long sums."""
