"""Per-layer clipping: each layer's part of a gradient has its own clip norm.

McMahan, Ramage, Talwar & Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, who compare it
with flat clipping. A layer with long gradients no longer shortens all others.
Deviation: none, but a known error is avoided: if each of L layers is clipped to C, an example moves the sum by sqrt(L)
C, and noise of sigma C has a multiplier of sigma / sqrt(L) only. Here `clip_norm` is for all layers together, C^2 =
sum_l C_l^2, and noise of sigma C on every coordinate has multiplier sigma.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier: layer l, of share (C_l / C)^2, has noise of
sigma / sqrt(share) C_l = sigma C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from .core import Block, BoundKind, Context, Coordinates, Defense, Stateless, StepPlan, bounded, refuse_unknown


@dataclass(frozen=True, kw_only=True)
class PerLayer(Stateless):
    """Releases a block per layer; the squared clip norms of the layers sum to C^2."""

    clip_norm: float
    weights: Literal["equal", "by_size"]
    bound: BoundKind
    regulariser: float | None

    def __post_init__(self) -> None:
        refuse_unknown("weights", self.weights, ("equal", "by_size"))

    def plan(self, context: Context) -> StepPlan:
        """Plans a single block of coordinates per layer, weight and bias together."""
        spans = context.layout.layers
        sizes = [float(stop - start) if self.weights == "by_size" else 1.0 for start, stop in spans]
        shares = [size / math.fsum(sizes) for size in sizes]
        blocks = [
            Block(
                codec=Coordinates(torch.arange(start, stop, device=context.device), dim=context.dim),
                bound=bounded(self.clip_norm * math.sqrt(share), self.bound, self.regulariser),
                share=share,
            )
            for (start, stop), share in zip(spans, shares, strict=True)
        ]
        return StepPlan(*blocks)


def per_layer(
    *,
    clip_norm: float = 1.0,
    weights: Literal["equal", "by_size"] = "equal",
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD with a clip norm per layer.

    Args:
        clip_norm: C, largest norm of an example's gradient after clipping, over all layers, L2, in gradient units.
        weights: "equal" clips each of L layers to C / sqrt(L), "by_size" a layer of d_l numbers to C sqrt(d_l / d).
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    bounded(clip_norm, bound, regulariser)  # refused here, not in the first step
    return Defense(
        PerLayer(clip_norm=clip_norm, weights=weights, bound=bound, regulariser=regulariser), noise_multiplier
    )
