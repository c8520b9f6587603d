"""Reach of a plan: the coordinates or directions in which its updates can move the parameters, and their union.

A message needs no more numbers than its round's plans can move. Masks are sets of coordinates, subspaces are sets of
coefficients; a map after the noise that is neither a mask, a projection nor a factor may move everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...plan.codec import Codec, Coordinates, Everything, Subspace
from ...plan.defense import StepPlan
from ...plan.post import Identity, Keep, Project, Rescale

Reach = Everything | Coordinates | Subspace
"""Codec of the vectors that updates can be."""


def reach(plan: StepPlan) -> Reach:
    """Returns the codec of a plan's updates, in plain SGD without weight decay."""
    codecs = [block.codec for block in plan.blocks if block.updates]
    everything = Everything(codecs[0].dim)
    if plan.start_at is not None:  # the parameters jump to another point first
        return everything
    match plan.post:
        case Project():
            movable: Reach = plan.post.subspace
        case Keep():
            movable = plan.post.coordinates
        case Identity() | Rescale():
            movable = union([_of_codec(codec) for codec in codecs])
        case _:
            movable = everything
    if plan.moves is None or isinstance(movable, Subspace):
        return movable
    if isinstance(movable, Everything):
        return plan.moves
    return Coordinates(movable.kept[torch.isin(movable.kept, plan.moves.kept)], dim=movable.dim)


def _of_codec(codec: Codec) -> Reach:
    # Exact types for `Everything`; composed codecs are not taken apart, so that they count as everything.
    if isinstance(codec, Coordinates | Subspace):
        return codec
    return Everything(codec.dim)


def union(reaches: Sequence[Reach]) -> Reach:
    """Returns a codec that covers all of these: the union of coordinates, a common subspace, or everything."""
    first = reaches[0]
    if isinstance(first, Subspace) and all(same(first, later) for later in reaches[1:]):
        return first
    kept = [codec.kept for codec in reaches if isinstance(codec, Coordinates)]
    if len(kept) < len(reaches):
        return Everything(first.dim)
    if all(indices is kept[0] for indices in kept):
        return first
    return Coordinates(torch.cat(kept).unique(), dim=first.dim)


def reach_of(plans: Sequence[StepPlan]) -> Reach:
    """Returns the codec of the sum of several steps' updates."""
    return union([reach(plan) for plan in plans])


def same(first: Codec, other: Codec) -> bool:
    """Returns whether two codecs have the same coordinates, or the same directions.

    Codecs that are no `Reach` are compared by identity alone, so that a copy counts as another.
    """
    if first is other:
        return True
    if isinstance(first, Subspace) and isinstance(other, Subspace):
        alike = (first.dim, first.spans, first.ranks) == (other.dim, other.spans, other.ranks)
        return alike and all(torch.equal(a, b) for a, b in zip(first.bases, other.bases, strict=True))
    if isinstance(first, Coordinates) and isinstance(other, Coordinates):
        return first.dim == other.dim and torch.equal(first.kept, other.kept)
    return isinstance(first, Everything) and isinstance(other, Everything) and first.dim == other.dim
