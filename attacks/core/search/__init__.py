"""Search for inputs: gradient matching, priors of images, descent and restarts."""
