"""Pruning before training and dropping during it: masks of weights, and the methods that use them.

A weight is a parameter tensor such as that of a convolution or a linear layer (`Layout.weights`). Only entries of
weights may be dropped, not biases or norm scales, and never all entries of a weight, because a layer without a path
through it would end training. Dropped coordinates are neither bounded nor released, and pruned ones stay fixed even
under momentum.

Guarantee:
    A mask is a function of the layout, of public randomness, of the parameters (themselves a function of releases) or
    of a one-off release, so that a step is a single Gaussian, as with any mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..bound import Bound
from ..codec import Coordinates, marked
from ..defense import Block, Context, StepPlan
from ..layout import Layout
from ..refusals import refuse_fraction, refuse_unknown
from .counts import floor_of


@runtime_checkable
class Criterion(Protocol):
    """Pruning criterion."""

    def keeps(self, context: Context) -> Bool[Tensor, " dim"]:
        """Returns the mask of the coordinates to train, chosen before the first step."""
        ...


def drop_in_each(
    layout: Layout, fraction: float, scores: Float[Tensor, " dim"], among: Bool[Tensor, " dim"] | None = None
) -> Bool[Tensor, " dim"]:
    """Drops a fraction of each weight, the entries with the lowest scores.

    Args:
        layout: layout that identifies the weights.
        fraction: fraction of each weight's entries, rounded down; at least one entry of each is kept.
        scores: score of every coordinate; among equal scores the first are dropped.
        among: mask of candidates; None for all. Other coordinates are dropped too, and the fraction is of candidates.
    """
    kept = torch.ones_like(scores, dtype=torch.bool) if among is None else among.clone()
    for start, stop in layout.weights:
        own, marks = kept[start:stop], scores[start:stop]
        # Gathers by index, which does not branch on each entry as boolean indexing does.
        places = None if among is None else marked(own)
        total = stop - start if places is None else len(places)
        count = min(floor_of(fraction, total), total - 1)
        if count > 0 and places is None:
            own[:] = _but_lowest(marks, count)
        elif count > 0 and places is not None:
            own.scatter_(0, places, _but_lowest(marks.index_select(0, places), count))
    return kept


def _but_lowest(scores: Float[Tensor, " n"], count: int) -> Bool[Tensor, " n"]:
    """Returns the mask of all but the `count` lowest scores, by selection, in a tenth of the time of a sort.

    Among equal scores the first are dropped.
    """
    if count == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    if scores.device.type != "cpu" or scores.requires_grad:
        edge = scores.kthvalue(count).values
    else:
        # NumPy selects and compares with vector instructions, in a fraction of the time.
        values = scores.numpy()
        nth = np.partition(values, count - 1)[count - 1 : count]
        lowest = values <= nth
        if np.count_nonzero(lowest) == count:  # no ties at the edge, and it is not NaN, which equals nothing
            return torch.from_numpy(~lowest)
        edge = torch.from_numpy(nth)[0]
    # NaN sorts above everything and equal to itself, as in a sort.
    unordered = scores.isnan()
    below = torch.where(edge.isnan(), ~unordered, scores < edge)
    at_edge = (scores == edge) | (unordered & edge.isnan())
    return ~(below | (at_edge & (at_edge.cumsum(0) <= count - below.sum())))


def drop_overall(layout: Layout, fraction: float, scores: Float[Tensor, " dim"]) -> Bool[Tensor, " dim"]:
    """Drops a fraction of the entries of all weights together, but never the entry with the highest score of a weight.

    Args:
        layout: layout that identifies the weights.
        fraction: fraction of the entries of all weights together, rounded down.
        scores: score of every coordinate; among equal scores the first are dropped.
    """
    kept = torch.ones_like(scores, dtype=torch.bool)
    weights = torch.cat(
        [torch.arange(start, stop, device=scores.device) for start, stop in layout.weights] or [kept[:0].long()]
    )
    kept[weights] = _but_lowest(scores[weights], floor_of(fraction, len(weights)))
    for start, stop in layout.weights:
        kept[start + int(scores[start:stop].argmax())] = True
    return kept


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """Trains the coordinates that pruning keeps and, in each step, drops a fraction of them.

    State: the kept coordinates, int64 [n]; empty without pruning.

    Attributes:
        bound: bound of an example's masked gradient.
        pruning: criterion applied before the first step; None for no pruning.
        pruned: whether pruned weights are set to zero, for a smaller network, or stay at their initialisation.
        dropping: choice of the entries of each weight that a step drops: at random, or those of smallest magnitude;
            None drops nothing.
        drop_rate: fraction of each weight's remaining entries that a step drops.
        hold_dropped: whether dropped coordinates stay fixed in the step; otherwise momentum may move them.
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
        """Prunes the network, and returns the kept coordinates."""
        if self.pruning is None:
            return torch.zeros(0, dtype=torch.int64, device=context.device)
        return Coordinates.of(self.pruning.keeps(context)).kept

    def plan(self, state: Tensor, context: Context) -> tuple[Tensor, StepPlan]:
        """Plans a bounded block of the coordinates that are trained in this step."""
        kept = moves = self._left(state, context) if self.dropping is None else self._not_dropped(state, context)
        if self.dropping is not None and not self.hold_dropped:
            moves = self._left(state, context)
        start_at = None
        if context.step == 0 and self.pruning is not None and self.pruned == "zero" and context.parameters is not None:
            start_at = self._left(state, context).project(context.parameters.unsqueeze(0))[0]
        block = Block(codec=kept, bound=self.bound)
        return state, StepPlan(block, moves=None if moves.size == context.dim else moves, start_at=start_at)

    def observe(self, state: Tensor, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Tensor:
        """Returns the kept coordinates unchanged."""
        return state

    def _left(self, state: Tensor, context: Context) -> Coordinates:
        """Coordinates that the pruning keeps; all of them without pruning."""
        numbers = torch.arange(context.dim) if self.pruning is None else state
        return Coordinates(numbers.to(context.device), dim=context.dim)

    def _not_dropped(self, state: Tensor, context: Context) -> Coordinates:
        """Coordinates that the pruning keeps and this step does not drop."""
        among = None
        if self.pruning is not None:
            among = torch.zeros(context.dim, dtype=torch.bool, device=context.device)
            among.index_fill_(0, state.to(context.device), True)
        return Coordinates.of(drop_in_each(context.layout, self.drop_rate, self._scores(context), among=among))

    def _scores(self, context: Context) -> Float[Tensor, " dim"]:
        if self.dropping == "magnitude" and context.parameters is not None:
            return context.parameters.abs()
        return torch.rand(context.dim, generator=context.coins(f"dropped {context.step}")).to(context.device)
