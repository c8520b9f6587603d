"""Core of data sets: splits, how pools are dealt, decoding of images, paths and downloads."""
