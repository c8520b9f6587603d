"""What a run costs and what hides it: ledger, accountants, the secret noise and its keys."""
