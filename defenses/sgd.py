"""SGD: the undefended baseline, without bound and without noise, hence without guarantee.

The positive control of every benchmark: an attack that fails here is not evidence for any defense.
Guarantee: none.
"""

from .core import Defense, Whole, unbounded


def sgd() -> Defense:
    """Plain stochastic gradient descent; epsilon is infinite."""
    return Defense(Whole(bound=unbounded()), noise_multiplier=0.0, name="sgd")
