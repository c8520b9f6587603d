"""SGD: the undefended baseline, without bound and without noise, hence without guarantee.

The positive control of every benchmark: if an attack fails against SGD, its failure against a defense proves nothing.
Guarantee: none.
"""

from .core import Defense, Whole, unbounded


def sgd() -> Defense:
    """Plain stochastic gradient descent; epsilon is infinite."""
    return Defense(Whole(bound=unbounded()), noise_multiplier=0.0, name="sgd")
