"""Readers of a user's examples by format: NumPy archives, Parquet, folders of images.

Every reader checks the size that a file declares before reading that much, loads no pickle, and refuses in a single
sentence.
"""
