"""SGD: the undefended baseline. Nothing is bounded and no noise is added, so nothing is proved.

The positive control of every benchmark: attacks that cannot break this break nothing.
"""

from dataclasses import dataclass

from .core import Block, Context, Defense, Everything, Stateless, StepPlan, unbounded


@dataclass(frozen=True)
class Sgd(Stateless):
    """Releases the plain sum of gradients."""

    def plan(self, context: Context) -> StepPlan:
        """One block, unbounded."""
        return StepPlan(Block(codec=Everything(context.dim), bound=unbounded()))


def sgd() -> Defense:
    """Plain stochastic gradient descent; epsilon is infinite."""
    return Defense(Sgd(), noise_multiplier=0.0)
