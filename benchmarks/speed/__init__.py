"""Speed and memory of private training steps against plain SGD and other tools: `python -m leakbench.benchmarks.speed`.

A "way" is an implementation of some work. `harness.py` times the ways of doing the same work against one another,
`memory.py` measures each in its own process, `part.py` has the code that all benchmarks share, and `report.py` and
`plot.py` write the results. Benchmarks: DP-SGD steps (`step.py`), on every network (`architectures.py`) and by every
defense (`methods.py`), their noise (`noise.py`), norms of masked gradients (`masked.py`), public subspaces
(`projection.py`), gradient inversion (`rgap.py`, `inversion.py`), shadow models (`shadows.py`), scores of an informed
adversary (`informed.py`), transformers plain and with adapters (`transformers.py`); `kernels.py` has a command of its
own. Benchmarks are no tests: a missed target is only reported, and a ratio bound by arithmetic is reported with its
bound and has no target.
"""
