"""PDP-SGD: DP-SGD whose noisy update is projected on a subspace of public gradients.

Zhou, Wu & Banerjee, "Bypassing the Ambient Dimension: Private SGD with Gradient Subspace Identification", ICLR 2021,
Algorithm 1. The noise outside of the subspace, nearly all of it, is removed after the release: post-processing. The
clip norm is still spent on the whole gradient, which is where PCDP differs.

Deviation: the basis is one per parameter tensor, as in PCDP, which it is compared with; `scope="global"` is the
paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from .core import Bases, Block, Context, Defense, Everything, Project, PublicSubspace, Scope, StepPlan, clip


@dataclass(frozen=True, kw_only=True)
class Pdp:
    """Releases the whole clipped gradient and projects what comes out; remembers the directions."""

    clip_norm: float
    subspace: PublicSubspace

    def __post_init__(self) -> None:
        clip(self.clip_norm)  # refuses what is not a norm

    def start(self, context: Context) -> Bases:
        """No directions yet."""
        return None

    def plan(self, state: Bases, context: Context) -> tuple[Bases, StepPlan]:
        """One clipped block of everything, projected after the noise."""
        bases, subspace, remarks = self.subspace.at(state, context)
        block = Block(codec=Everything(context.dim), bound=clip(self.clip_norm))
        return bases, StepPlan(block, post=Project(subspace), remarks=remarks)

    def observe(self, state: Any, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Bases:
        """The directions, for as long as they are used."""
        return state


def pdp(
    *,
    clip_norm: float = 1.0,
    rank: int = 100,
    scope: Scope = "tensor",
    interval: int = 1,
    auxiliary: Literal["random", "independent"] = "random",
    auxiliary_size: int | None = None,
    shortage: Literal["refuse", "lower_rank"] = "refuse",
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD, its noisy update projected on a subspace of public gradients.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        rank: k, most directions of a basis.
        scope: "tensor" for a basis per parameter tensor, "global" for one over all parameters.
        interval: steps that a basis is used for.
        auxiliary: "random" draws a refresh's public examples from the whole pool, "independent" from a part of it that
            no other refresh reads.
        auxiliary_size: public examples of a refresh; as many as `rank` if None.
        shortage: "refuse" a public pool that is too small, or "lower_rank" to what it allows, saying so.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    subspace = PublicSubspace(
        rank=rank,
        scope=scope,
        interval=interval,
        auxiliary=auxiliary,
        auxiliary_size=auxiliary_size,
        shortage=shortage,
    )
    return Defense(Pdp(clip_norm=clip_norm, subspace=subspace), noise_multiplier=noise_multiplier)
