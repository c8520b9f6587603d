"""Training methods that defend their data, one file each; the shared machinery is in `defenses.core`."""
