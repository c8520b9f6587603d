"""Privacy accounting: events, ledger, accountants, batch samplers, and trade-off curves."""
