"""Records, manifests and folders of results, as files."""
