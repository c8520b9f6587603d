"""Noisy SGD: noise without clipping, an ablation of DP-SGD. A sum can move by any amount: nothing is proved.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023. The noise
has the standard deviation noise_multiplier * nominal_norm on the sum, so that curves line up with DP-SGD at
that clip norm.
"""

from dataclasses import dataclass

from .core import Block, Context, Defense, Everything, Stateless, StepPlan, unbounded


@dataclass(frozen=True, kw_only=True)
class NoisySgd(Stateless):
    """Releases the unbounded sum of gradients plus noise."""

    nominal_norm: float

    def __post_init__(self) -> None:
        unbounded(unit=self.nominal_norm)  # refuses what is not a norm

    def plan(self, context: Context) -> StepPlan:
        """One block, unbounded, with noise in units of the nominal norm."""
        return StepPlan(Block(codec=Everything(context.dim), bound=unbounded(unit=self.nominal_norm)))


def noisy_sgd(*, nominal_norm: float = 1.0, noise_multiplier: float | None = None) -> Defense:
    """SGD with Gaussian noise on the unclipped sum; epsilon is infinite.

    Args:
        nominal_norm: the clip norm of the DP-SGD that it is compared with, L2, in gradient units.
        noise_multiplier: noise standard deviation / nominal norm; None until it is set.
    """
    return Defense(NoisySgd(nominal_norm=nominal_norm), noise_multiplier=noise_multiplier)
