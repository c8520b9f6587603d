"""Submissions of strangers: the file about one, its digest and seeds, signature, stamp of a verifier, and tier."""
