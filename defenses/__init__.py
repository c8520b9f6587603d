"""Training methods that defend their data, one file each; the shared machinery is in `leakbench.defenses.core`."""

if __name__ == "defenses":
    # Two classes of one name would make `isinstance` fail where both are imported.
    raise ImportError("defenses must be imported as leakbench.defenses")

from leakbench.method_package import offer_methods

offer_methods(__name__)
