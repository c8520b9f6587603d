"""The training loop and what it needs beside gradients: samplers, views, checkpoints, transcripts."""
