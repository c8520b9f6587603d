"""SGD: the undefended baseline. Nothing is bounded and no noise is added, so nothing is proved.

The positive control of every benchmark: attacks that cannot break this break nothing.
Guarantee: none.
"""

from .core import Defense, Whole, unbounded


def sgd() -> Defense:
    """Plain stochastic gradient descent; epsilon is infinite."""
    return Defense(Whole(bound=unbounded()), noise_multiplier=0.0, name="sgd")
