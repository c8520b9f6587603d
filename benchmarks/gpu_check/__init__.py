"""Check of everything that a GPU changes, numbers first, then speed: `python -m leakbench.benchmarks.gpu_check`.

`contributions.py` measures the longest contribution of one example, by way of clipping and precision.
"""
