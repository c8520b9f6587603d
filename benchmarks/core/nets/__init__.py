"""Core of the architectures: residual blocks, scattering, weight standardisation, low-rank adaptation, shape checks."""
