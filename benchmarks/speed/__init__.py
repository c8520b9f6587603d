"""Speed and memory of private training steps against plain SGD and other tools: `python -m leakbench.benchmarks.speed`.

`harness.py` compares ways of doing the same work, `memory.py` measures a way in its own process, `part.py` has what
parts share, `report.py` and `plot.py` write the results. Parts: whole DP-SGD steps (`step.py`), of every network
(`architectures.py`) and every defense (`methods.py`), their noise (`noise.py`), norms of masked gradients
(`masked.py`), public subspaces (`projection.py`), inversions of a gradient (`rgap.py`, `inversion.py`), shadow models
(`shadows.py`), scores of an informed adversary (`informed.py`). These are no tests: a missed target is only shown, and
a ratio that no processor here can lower is a fact, shown with its bound.
"""
