"""Core of architectures: residual blocks, scattering, weight standardisation, low-rank adaptation, checks of shapes."""
