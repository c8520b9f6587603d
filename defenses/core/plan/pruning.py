"""Pruning before training and dropping within it: which coordinates a method moves, and the family of such methods.

Weights of convolutions and linear layers may be dropped, other parameters (biases, scales of norms) never, and of no
weight all: a layer without a path through it would end training. What is dropped is neither bounded nor released, and
what is pruned stays where it is, whatever an optimizer's momentum says.

Guarantee:
    A mask is a function of the layout, of public coins, of the parameters (themselves a function of releases) or of a
    release of its own, so that a step is one Gaussian, like that of any mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .bound import Bound
from .codec import Coordinates
from .counts import floor_of
from .defense import Block, Context, StepPlan
from .layout import Layout
from .refusals import refuse_fraction, refuse_unknown


@runtime_checkable
class Criterion(Protocol):
    """What a pruning keeps."""

    def keeps(self, context: Context) -> Bool[Tensor, " dim"]:
        """The coordinates to train, decided before the first step."""
        ...


def drop_in_each(
    layout: Layout, fraction: float, scores: Float[Tensor, " dim"], among: Bool[Tensor, " dim"] | None = None
) -> Bool[Tensor, " dim"]:
    """Keeps all but a fraction of each weight, those of the lowest scores being dropped.

    Args:
        layout: which coordinates are a weight.
        fraction: of the entries of each weight, rounded down; at least one of each is kept.
        scores: of all coordinates; of equal ones the first are dropped.
        among: coordinates that there are; None for all. The others are dropped, and count for no fraction.
    """
    kept = torch.ones_like(scores, dtype=torch.bool) if among is None else among.clone()
    for start, stop in layout.weights:
        own, marks = kept[start:stop], scores[start:stop]
        there = int(own.sum()) if among is not None else stop - start
        count = min(floor_of(fraction, there), there - 1)
        if count > 0:
            if there == stop - start:
                own[:] = ~_lowest(marks, count)
            elif bool(torch.isfinite(marks.sum())):  # what is not there is above all the others: nothing is gathered
                own &= ~_lowest(torch.where(own, marks, torch.inf), count)
            else:
                places = own.nonzero().flatten()  # once, and not at every look through a mask
                own[places] = ~_lowest(marks[places], count)
    return kept


def _lowest(scores: Float[Tensor, " n"], count: int) -> Bool[Tensor, " n"]:
    """The `count` lowest scores, of equal ones the first; by selection, at a tenth of the time of sorting."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    edge = _nth(scores, count)
    lowest = scores <= edge
    if int(lowest.sum()) == count:  # no other score is equal to the edge, nor is it NaN, which equals nothing
        return lowest
    below = scores < edge
    # NaN is above everything, as for a sort, and equal to itself.
    at_edge = (scores == edge) | (scores.isnan() & edge.isnan())
    if edge.isnan():
        below = ~scores.isnan()
    return below | (at_edge & (at_edge.cumsum(0) <= count - below.sum()))


def _nth(scores: Float[Tensor, " n"], count: int) -> Float[Tensor, ""]:
    """The score of this rank from below, NaN being above everything."""
    if scores.device.type != "cpu" or scores.requires_grad:
        return scores.kthvalue(count).values
    # NumPy selects with vector instructions, in a tenth of the time.
    return torch.from_numpy(np.partition(scores.numpy(), count - 1)[count - 1 : count])[0]


def drop_overall(layout: Layout, fraction: float, scores: Float[Tensor, " dim"]) -> Bool[Tensor, " dim"]:
    """Keeps all but a fraction of all weights together, and of each at least the entry of its highest score.

    Args:
        layout: which coordinates are a weight.
        fraction: of the entries of all weights together, rounded down.
        scores: of all coordinates; of equal ones the first are dropped.
    """
    kept = torch.ones_like(scores, dtype=torch.bool)
    weights = torch.cat(
        [torch.arange(start, stop, device=scores.device) for start, stop in layout.weights] or [kept[:0].long()]
    )
    kept[weights[_lowest(scores[weights], floor_of(fraction, len(weights)))]] = False
    for start, stop in layout.weights:
        kept[start + int(scores[start:stop].argmax())] = True
    return kept


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """Trains the coordinates that a pruning keeps, and of these in each step all but a fraction.

    State: what the pruning keeps, int64 [n]; empty where nothing is pruned.

    Attributes:
        bound: of one example's masked gradient.
        pruning: decides before the first step; None for none.
        pruned: whether pruned weights are put to zero, which makes a smaller network, or stay as they were initialised.
        dropping: which entries of each weight a step leaves out: any, or those of the smallest parameters; None for
            none.
        drop_rate: fraction of what there is of each weight that a step leaves out.
        hold_dropped: whether what a step leaves out stays where it is, or momentum may move it on.
    """

    bound: Bound
    pruning: Criterion | None = None
    pruned: Literal["zero", "initial"] = "zero"
    dropping: Literal["random", "magnitude"] | None = None
    drop_rate: float = 0.0
    hold_dropped: bool = True

    def __post_init__(self) -> None:
        refuse_fraction("drop_rate", self.drop_rate)
        refuse_unknown("pruned", self.pruned, ("zero", "initial"))
        refuse_unknown("dropping", self.dropping, (None, "random", "magnitude"))

    def start(self, context: Context) -> Tensor:
        """Prunes."""
        if self.pruning is None:
            return torch.zeros(0, dtype=torch.int64, device=context.device)
        return self.pruning.keeps(context).nonzero().flatten()

    def plan(self, state: Tensor, context: Context) -> tuple[Tensor, StepPlan]:
        """One bounded block of the coordinates that are trained in this step."""
        there = torch.ones(context.dim, dtype=torch.bool, device=context.device)
        if self.pruning is not None:
            there = torch.zeros_like(there).index_fill(0, state.to(there.device), True)
        kept, start_at = there, None
        if self.dropping is not None:
            kept = drop_in_each(context.layout, self.drop_rate, self._scores(context), among=there)
        if context.step == 0 and self.pruning is not None and self.pruned == "zero" and context.parameters is not None:
            start_at = torch.where(there, context.parameters, 0.0)
        held = kept if self.hold_dropped else there
        coordinates = Coordinates(kept.nonzero().flatten(), dim=context.dim)
        moves = coordinates if held is kept else Coordinates(held.nonzero().flatten(), dim=context.dim)
        block = Block(codec=coordinates, bound=self.bound)
        return state, StepPlan(block, moves=None if bool(held.all()) else moves, start_at=start_at)

    def observe(self, state: Tensor, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Tensor:
        """What is pruned stays pruned."""
        return state

    def _scores(self, context: Context) -> Float[Tensor, " dim"]:
        if self.dropping == "magnitude" and context.parameters is not None:
            return context.parameters.abs()
        return torch.rand(context.dim, generator=context.coins(f"dropped {context.step}")).to(context.device)
