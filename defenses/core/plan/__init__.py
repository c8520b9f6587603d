"""Step plans, fixed before a batch is drawn: blocks, codecs, bounds, queries, and the methods' context."""
