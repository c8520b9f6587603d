"""Randomness: keys of generators, draws by record, and the secret Gaussian noise."""
