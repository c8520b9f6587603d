"""Data sets of real images with fixed splits, the papers' architectures, and suites that combine them."""

if __name__ == "benchmarks":
    # Two classes of the same name would make `isinstance` fail if both were imported.
    raise ImportError("benchmarks must be imported as leakbench.benchmarks")
