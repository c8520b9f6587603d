"""What is fixed before a batch is drawn: blocks, spaces, bounds, queries, and the context that methods read."""
