"""Core of the data sets: splits, dealing of pools, decoding of images, paths and downloads."""
