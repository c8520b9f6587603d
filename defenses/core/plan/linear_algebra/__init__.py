"""Linear algebra of long rows: products, norms and bases without the rounding drift of long sums."""
