"""Privacy accounting and noise: ledger, accountants, calibration, the secret noise and its keys."""
