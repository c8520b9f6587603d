"""Examples of a user's own, by the format they are stored in: NumPy archives, Parquet, folders of images.

Every reader checks what a file says of its size before it reads that much, loads no pickle, refuses in one
sentence.
"""
