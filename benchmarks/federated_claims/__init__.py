"""Verdicts on claims T1 to T10 about federated training: `python -m leakbench.benchmarks.federated_claims RESULTS...`.

Records of federated suites are compared seed by seed (`comparisons.py`, `cells.py`); the claims are in `claims.py`.
Claims that are about arithmetic, messages or noise alone are measured directly, without records (`direct.py`).
`document.py` makes JSON and Markdown, with the figures that a paper reports beside ours.
"""
