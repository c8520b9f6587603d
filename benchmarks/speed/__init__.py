"""Speed and memory of private training steps against plain SGD and other tools: `python -m leakbench.benchmarks.speed`.

`harness.py` compares ways of doing one thing, `memory.py` measures a way in a process of its own, `report.py` and
`plot.py` write down what came out. What is compared: `step.py` whole DP-SGD steps, `noise.py` their noise, `masked.py`
the norms of masked gradients, `projection.py` public subspaces, `rgap.py` the inversion of a gradient,
`informed.py` the scores of an informed adversary. Nothing here is
a test: a target that is missed is shown, and that is all.
"""
