"""The training loop with its settings, calibration, checkpoints and transcripts."""
