"""Step plans, which are fixed before a batch is drawn: blocks, codecs, bounds, queries, and the context of methods."""
