"""PCDP-SGD: gradients are projected on a public subspace before they are bounded, and noise is added inside it.

Projected Clipping DP-SGD, section 4: every `interval` steps, the leading directions V of per-example gradients on
public data at the current parameters; each private gradient contributes clip(V^T g), of `rank` numbers a tensor; the
noise is drawn in that space; the update is V times the noisy sum. The clip norm is spent on the part that is kept, and
there are far fewer coordinates to drown.

Deviation: the basis is one per parameter tensor, which alone reproduces the paper's communication figures;
`scope="global"` takes one over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from .core import Bases, Block, Context, Defense, PublicSubspace, Scope, StepPlan, clip


@dataclass(frozen=True, kw_only=True)
class Pcdp:
    """Releases the clipped coefficients of each gradient along public directions; remembers the directions."""

    clip_norm: float
    subspace: PublicSubspace

    def __post_init__(self) -> None:
        clip(self.clip_norm)  # refuses what is not a norm

    def start(self, context: Context) -> Bases:
        """No directions yet."""
        return None

    def plan(self, state: Bases, context: Context) -> tuple[Bases, StepPlan]:
        """One clipped block of coefficients."""
        bases, subspace, remarks = self.subspace.at(state, context)
        return bases, StepPlan(Block(codec=subspace, bound=clip(self.clip_norm)), remarks=remarks)

    def observe(self, state: Any, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Bases:
        """The directions, for as long as they are used."""
        return state


def pcdp(
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
    """DP-SGD inside a subspace of public gradients, projected before clipping.

    Args:
        clip_norm: C, largest norm of an example's coefficients, L2, in gradient units.
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
    return Defense(Pcdp(clip_norm=clip_norm, subspace=subspace), noise_multiplier=noise_multiplier)
