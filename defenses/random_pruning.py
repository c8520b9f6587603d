"""Random pruning: DP-SGD on a random subset of each layer's weights, drawn once before training.

The data-free baseline in "Pre-Pruning and Gradient-Dropping Improve Differentially Private Image Classification"
(DP-SSGD). A smaller network has shorter gradients and less noise; the choice of weights costs no privacy.
Guarantee: each step is a Gaussian mechanism, as in DP-SGD: the mask is a function of public randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .core import BoundKind, Context, Defense, Sparse, bounded, drop_in_each, refuse_fraction


@dataclass(frozen=True, kw_only=True)
class RandomPruning:
    """Keeps a uniformly random subset of each weight."""

    prune_rate: float

    def __post_init__(self) -> None:
        refuse_fraction("prune_rate", self.prune_rate)

    def keeps(self, context: Context) -> Tensor:
        """Drops a fraction of each weight, drawn from the public generator."""
        scores = torch.rand(context.dim, generator=context.coins("pruned")).to(context.device)
        return drop_in_each(context.layout, self.prune_rate, scores)


def random_pruning(
    *,
    clip_norm: float = 1.0,
    prune_rate: float = 0.5,
    pruned: Literal["zero", "initial"] = "zero",
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD on a random subset of each weight.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        prune_rate: fraction of each weight's entries that is pruned.
        pruned: "zero" sets pruned weights to zero, "initial" leaves them at their initialisation.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = Sparse(
        bound=bounded(clip_norm, bound, regulariser), pruning=RandomPruning(prune_rate=prune_rate), pruned=pruned
    )
    return Defense(method, noise_multiplier, "random_pruning")
