"""Attacks on trained models and on shared updates: one method a file, named as the file."""

if __name__ == "attacks":
    # Two classes of one name would make `isinstance` fail where both are imported.
    raise ImportError("attacks must be imported as leakbench.attacks")

from leakbench.method_package import offer_methods

offer_methods(__name__)
