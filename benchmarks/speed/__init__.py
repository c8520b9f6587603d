"""Speed and memory of private training steps against plain SGD and other tools: `python -m leakbench.benchmarks.speed`.

`harness.py` compares ways of doing the same work, `memory.py` measures a way in its own process, `report.py` and
`plot.py` write the results. Subjects: whole DP-SGD steps (`step.py`), their noise (`noise.py`), norms of masked
gradients (`masked.py`), public subspaces (`projection.py`), the inversion of a gradient (`rgap.py`), scores of an
informed adversary (`informed.py`). These are no tests: a missed target is only shown.
"""
