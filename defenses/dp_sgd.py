"""DP-SGD: clip each example's gradient, sum, add Gaussian noise.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
Deviation: divides by the expected batch, a public constant, not by the batch that was drawn.
"""

from dataclasses import dataclass

from .core import Block, Context, Defense, Everything, Stateless, StepPlan, clip


@dataclass(frozen=True, kw_only=True)
class DpSgd(Stateless):
    """Releases the noisy sum of clipped gradients."""

    clip_norm: float

    def __post_init__(self) -> None:
        clip(self.clip_norm)  # refuses what is not a norm

    def plan(self, context: Context) -> StepPlan:
        """One clipped block in all coordinates."""
        return StepPlan(Block(codec=Everything(context.dim), bound=clip(self.clip_norm)))


def dp_sgd(*, clip_norm: float = 1.0, noise_multiplier: float | None = None) -> Defense:
    """Differentially private SGD.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    return Defense(DpSgd(clip_norm=clip_norm), noise_multiplier=noise_multiplier)
