"""Files of trained checkpoints: an index of their digests, and a folder each; written by `leakbench zoo build`."""
