"""Core of architectures: residual blocks, scattering, weight standardisation, checks of shapes."""
