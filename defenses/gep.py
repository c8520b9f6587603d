"""GEP: coefficients along public directions, and what is left over of each gradient, each with a clip norm of its own.

Yu, Zhang, Chen & Liu, "Do Not Let Privacy Overbill Utility: Gradient Embedding Perturbation for Private Learning",
ICLR 2021, Algorithm 1. Gradients lie close to the span of public ones, so that most of them is a few numbers, on which
little noise falls, and the rest is short. The vector of parameters is cut into groups of neighbours, of one length up
to rounding, and each has its part of the directions.
Deviation: the noise of both parts follows from one multiplier and a share, because both see one batch: their released
code adds up the cost of two sampled Gaussians, which understates it (nominal epsilon 8 is 8.8). Noise of the rest
along the directions is projected off unless `project_noise=False`.

With `final_sparsity` gradients, the private and the public ones, are masked first, as random freeze does to DP-SGD
("Differentially Private SGD with Sparse Gradients", arXiv:2112.00845v1): directions live in the kept coordinates, clip
norms are spent on them, and dropped ones get no noise and are not sent. A coordinate stays in its group whatever the
mask. Directions found under one mask are not orthonormal under the next, so that a new mask ends their interval.
Guarantee: one Gaussian a step at the defense's multiplier, for both parts together.
Caveat: the paper's epsilons are those of Poisson sampling, and its code deals a shuffled data set out, of which far
less is proved: noise multiplier 1.54 over 40 epochs of 50 steps is 2.75 with the one, and 25.3 with the other (delta
1e-5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .core import (
    Block,
    Bound,
    BoundKind,
    Complement,
    Context,
    Coordinates,
    Defense,
    Masked,
    RandomMasks,
    Remembered,
    Rows,
    StepPlan,
    SubspaceMemory,
    bounded,
    dealt,
    group_directions,
    refuse_count,
    refuse_norm,
)


@dataclass(frozen=True, kw_only=True)
class Gep:
    """A block of coefficients and a block of what is left over; state: the mask's number and the bases, one a group."""

    bound: Bound
    bound_rest: Bound
    rank: int
    groups: int
    interval: int
    auxiliary_size: int | None
    passes: int
    share: float
    biased: bool
    project_noise: bool
    masks: RandomMasks
    _memory: SubspaceMemory = field(default_factory=SubspaceMemory, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("rank", "groups", "interval", "auxiliary_size"):
            refuse_count(name, getattr(self, name))
        refuse_count("passes", self.passes, 0)
        if not 0 < self.share < 1:
            raise ValueError(f"share must be in (0, 1), got {self.share}")

    def start(self, context: Context) -> dict[str, Any] | None:
        """No directions yet."""
        return None

    def plan(self, state: dict[str, Any] | None, context: Context) -> tuple[dict[str, Any], StepPlan]:
        """Both parts; the coefficients alone where the estimate may be biased."""
        # Where nothing is dropped, nothing is masked, and directions outlive the mask.
        kept = self.masks.at(context) if self.masks.dropped(context) else None
        mask = None if kept is None else self.masks.number(context)
        spans = self._spans(context.dim, kept)
        if state is None or state["mask"] != mask or context.step % self.interval == 0:
            state = {"mask": mask, "bases": self._directions(spans, kept, context)}
        subspace = self._memory.subspace(state["bases"], spans, context.dim if kept is None else kept.size)
        rest = Complement(subspace, self.project_noise)
        along, beside = (one if kept is None else Masked(kept, one) for one in (subspace, rest))
        if self.biased:
            return state, StepPlan(Block(codec=along, bound=self.bound))
        return state, StepPlan(
            Block(codec=along, bound=self.bound, share=self.share),
            Block(codec=beside, bound=self.bound_rest, share=1 - self.share),
        )

    def observe(
        self, state: dict[str, Any] | None, context: Context, noisy: tuple[Tensor, ...], update: Tensor
    ) -> dict[str, Any] | None:
        """The directions, for as long as they are used."""
        return state

    def _spans(self, dim: int, kept: Coordinates | None) -> tuple[tuple[int, int], ...]:
        """Groups of neighbouring coordinates, of one length up to rounding; what of each is kept, in its numbers."""
        edges = [round(dim * i / self.groups) for i in range(self.groups + 1)]
        if kept is not None:
            edges = torch.searchsorted(kept.kept, kept.kept.new_tensor(edges)).tolist()
        return tuple((a, b) for a, b in pairwise(edges) if b > a)

    def _directions(
        self, spans: tuple[tuple[int, int], ...], kept: Coordinates | None, context: Context
    ) -> tuple[Remembered, ...]:
        """Leading directions of public gradients in each group: `rank` in all, by the roots of their lengths."""
        batch = context.public_batch(self.auxiliary_size or self.rank)

        @cache
        def rows() -> Tensor:
            every = batch.columns(0, context.dim)
            if not every.sum().isfinite():  # where training has diverged a gradient has no direction; others still do
                every = torch.where(every.isfinite().all(dim=1, keepdim=True), every, 0.0)
            return every if kept is None else kept.encode(every)

        ranks = dealt(self.rank, [math.sqrt(b - a) for a, b in spans])
        found = []
        for number, ((a, b), own) in enumerate(zip(spans, ranks, strict=True)):
            rank = min(max(1, own), b - a)
            coins = context.coins(f"gep {context.step} {number}")
            found.append(
                group_directions(
                    batch if kept is None else Rows(rows()),
                    context.layout,
                    (a, b),
                    rows,
                    rank,
                    generator=coins,
                    passes=self.passes,
                )
            )
        return tuple(found)


def gep(
    *,
    clip_norm: float = 5.0,
    clip_norm_rest: float = 2.0,
    rank: int = 100,
    groups: int = 3,
    interval: int = 1,
    auxiliary_size: int | None = None,
    passes: int = 1,
    share: float = 0.5,
    biased: bool = False,
    project_noise: bool = True,
    final_sparsity: float = 0.0,
    cooling_epochs: int | None = None,
    refreshes: int = 1,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD with gradients embedded in a public subspace.

    Args:
        clip_norm: C0, largest norm of an example's coefficients, L2, in gradient units.
        clip_norm_rest: C1, largest norm of what is left over, L2, in gradient units.
        rank: directions of all groups together, of which each gets at least one; the paper takes 1000.
        groups: parts that the vector of parameters is cut into.
        interval: steps that directions are used for.
        auxiliary_size: public examples of a refresh; as many as `rank` if None. The paper takes 2000.
        passes: power iterations by which the directions are found.
        share: fraction of a step's 1 / sigma^2 spent on the coefficients.
        biased: whether what is left over is not released at all.
        project_noise: whether its noise along the directions is removed.
        final_sparsity: fraction of coordinates dropped at the end of the cooling; 0 for no masks.
        cooling_epochs: epochs in which the sparsity grows linearly from 0; all of the run if None, 0 for none.
        refreshes: new masks per epoch.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: of the latter two, in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: of the step as one Gaussian; None until it is calibrated.
    """
    refuse_norm("clip_norm_rest", clip_norm_rest)
    method = Gep(
        bound=bounded(clip_norm, bound, regulariser),
        bound_rest=bounded(clip_norm_rest, bound, regulariser),
        rank=rank,
        groups=groups,
        interval=interval,
        auxiliary_size=auxiliary_size,
        passes=passes,
        share=share,
        biased=biased,
        project_noise=project_noise,
        masks=RandomMasks(final_sparsity=final_sparsity, refreshes=refreshes, cooling_epochs=cooling_epochs),
    )
    return Defense(method, noise_multiplier)
