"""Attacks on trained models and on shared updates: a method per file, named as the file."""

if __name__ == "attacks":
    # Two copies of a class would make `isinstance` fail where both are imported.
    raise ImportError("attacks must be imported as leakbench.attacks")

from leakbench.method_package import offer_methods

offer_methods(__name__)
