"""Audit of a model that was trained elsewhere: its file, its data, the attacks on it, and the verdict.

No training step was executed here, so no privacy guarantee is proved: a claim is its owner's statement, which
measurements can refute but never confirm.
"""
