"""Clipped SGD: per-example clipping without noise, an ablation of DP-SGD. Nothing is proved.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023, use it to
tell the effect of clipping from that of noise. Each example is clipped by itself; clipping the mean of a
batch is another thing.
"""

from dataclasses import dataclass

from .core import Block, Context, Defense, Everything, Stateless, StepPlan, clip


@dataclass(frozen=True, kw_only=True)
class ClippedSgd(Stateless):
    """Releases the sum of clipped gradients, without noise."""

    clip_norm: float

    def __post_init__(self) -> None:
        clip(self.clip_norm)  # refuses what is not a norm

    def plan(self, context: Context) -> StepPlan:
        """One clipped block."""
        return StepPlan(Block(codec=Everything(context.dim), bound=clip(self.clip_norm)))


def clipped_sgd(*, clip_norm: float = 1.0) -> Defense:
    """SGD on clipped per-example gradients; epsilon is infinite.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
    """
    return Defense(ClippedSgd(clip_norm=clip_norm), noise_multiplier=0.0)
