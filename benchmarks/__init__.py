"""Real images with fixed splits, the architectures of the papers, and the suites that put them together."""

if __name__ == "benchmarks":
    # Two classes of one name would make `isinstance` fail where both are imported.
    raise ImportError("benchmarks must be imported as leakbench.benchmarks")
