"""Real images with fixed splits, the architectures of the papers, and the suites that put them together."""
