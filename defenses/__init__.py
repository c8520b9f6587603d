"""Private training methods (defenses), one file each; their shared machinery is in `leakbench.defenses.core`."""

if __name__ == "defenses":
    # Imported under both names, each class would exist twice, and `isinstance` would fail.
    raise ImportError("defenses must be imported as leakbench.defenses")

from leakbench.method_package import offer_methods

offer_methods(__name__)
