"""What data sets share: splits, how they are dealt, files and downloads."""
