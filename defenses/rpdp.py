"""RPDP-SGD: PCDP-SGD with a random subspace in place of the public one.

The ablation of the PCDP-SGD paper that takes its public data away: directions are orthonormalised Gaussian vectors,
drawn anew every `interval` steps. A random subspace of rank k keeps k / d of a gradient's squared norm on average, so
the expected step is shorter by that factor.

Deviation: whether the paper clips before or after it projects cannot be told; here it is after, as in PCDP, unless
`clip_first`. The step is not rescaled unless `rescale`, which multiplies a tensor's part by d / k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .core import Bases, Block, Context, Defense, Everything, Project, RandomSubspace, Scope, StepPlan, clip


@dataclass(frozen=True, kw_only=True)
class Rpdp:
    """Releases the clipped coefficients of each gradient along random directions; remembers the directions."""

    clip_norm: float
    subspace: RandomSubspace
    clip_first: bool = False
    rescale: bool = False

    def __post_init__(self) -> None:
        clip(self.clip_norm)  # refuses what is not a norm

    def start(self, context: Context) -> Bases:
        """No directions yet."""
        return None

    def plan(self, state: Bases, context: Context) -> tuple[Bases, StepPlan]:
        """One clipped block, of coefficients or of everything."""
        bases, subspace = self.subspace.at(state, context)
        bound = clip(self.clip_norm)
        if self.clip_first:
            block = Block(codec=Everything(context.dim), bound=bound)
            return bases, StepPlan(block, post=Project(subspace, self.rescale))
        block = Block(codec=subspace, bound=bound)
        return bases, StepPlan(block, post=Project(subspace, rescale=True)) if self.rescale else StepPlan(block)

    def observe(self, state: Any, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Bases:
        """The directions, for as long as they are used."""
        return state


def rpdp(
    *,
    clip_norm: float = 1.0,
    rank: int = 800,
    scope: Scope = "tensor",
    interval: int = 1,
    clip_first: bool = False,
    rescale: bool = False,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD inside a random subspace, projected before clipping.

    Args:
        clip_norm: C, largest norm of what an example contributes, L2, in gradient units.
        rank: k, directions of a basis.
        scope: "tensor" for a basis per parameter tensor, "global" for one over all parameters.
        interval: steps that a basis is used for; drawing one costs far more than a step.
        clip_first: whether the whole gradient is clipped and the noisy update projected, as in PDP.
        rescale: whether the update of a tensor is multiplied by its size / k, which makes its expectation that of the
            clipped gradient.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    subspace = RandomSubspace(rank=rank, scope=scope, interval=interval)
    method = Rpdp(clip_norm=clip_norm, subspace=subspace, clip_first=clip_first, rescale=rescale)
    return Defense(method, noise_multiplier=noise_multiplier)
