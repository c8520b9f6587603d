"""Submissions as runs: the suite behind a declaration, a draft, and the computation of drawn cells by a verifier."""
