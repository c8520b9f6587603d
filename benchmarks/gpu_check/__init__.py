"""Check of a CUDA device, numbers first, then times and memory: `python -m leakbench.benchmarks.gpu_check`.

Each part runs in a process of its own with a budget (`processes.py`) and prints its rows as it goes (`rows.py`), so
that what was measured is kept if a part dies or exceeds its budget. A wrong number fails the check; a slow one does
not. Parts (`parts.py`): the tests that need a GPU (`gpu_tests.py`), sums against the float64 reference (`sums.py`), the
longest contribution of one example (`contributions.py`), private steps against plain SGD and Opacus
(`private_steps.py`), noise (`device_noise.py`), gradient inversion (`restarts.py`), and runs of suites
(`suite_runs.py`). `document.py` makes JSON and Markdown. The same code runs on a CPU with small sizes.
"""
