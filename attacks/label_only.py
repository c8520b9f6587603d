"""Label-only membership: a member's label is robust to changes of the image, and far from the decision boundary.

Choquette-Choo, Tramèr, Carlini & Papernot, "Label-Only Membership Inference Attacks", ICML 2021 (arXiv:2007.14321): the
label alone shows whether it is right, for how many views of the image, and the distance to the nearest image with
another label. That distance is found by queries for labels alone (Chen, Jordan & Wainwright, "HopSkipJumpAttack", S&P
2020, Algorithm 2, in L2): a point on the boundary, the boundary's normal there from labels of random points around, a
step along it, and back to the boundary on the line to the image.

Deviation: the search starts from the nearest candidate with another predicted label, so that only candidates are
needed. A misclassified candidate has distance 0, as in the paper, and is not queried again.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .core import Access, LabelAccess, MembershipScores, NotApplicable, attack, granted, viewed

HALVINGS = 12
"""Steps of a binary search on a line: to 1/4096 of its length."""

FEWEST = 16
"""Random points around a boundary point in the first round; later, times the square root of the round."""


@attack(access=Access.LABEL_ONLY)
def label_only(
    target: LabelAccess,
    generator: torch.Generator,
    *,
    by: str = "views",
    views: int = 18,
    queries: int = 1000,
    batch_size: int = 1024,
) -> MembershipScores:
    """Scores each candidate by the robustness of its predicted label under the final model.

    Args:
        target: the final model, answering with labels.
        generator: source of the random points.
        by: "views", the share of views of the image that are classified correctly; or "boundary", the smallest distance
            found to an image with another label.
        views: views of each candidate, the image itself among them, as of `lira`.
        queries: largest number of queries about each candidate to find its distance.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        The share of views, or the L2 distance in model-input units; float64.

    Raises:
        NotApplicable: views are requested of inputs that are no images, or the model predicts the same label for all
            candidates.
        ValueError: a setting out of range.
    """
    if by not in ("views", "boundary"):
        raise ValueError(f"by must be views or boundary, got {by!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if by == "boundary" and (needed := HALVINGS + 1 + _round_cost(1)) > queries:
        raise ValueError(f"queries must be at least {needed}, for one round of the search, got {queries}")
    candidates = granted(target.candidates)
    if by == "views":
        at_once = max(1, batch_size // max(1, views))  # `viewed` refuses invalid numbers of views
        answered = torch.cat(
            [_of_views(target, batch, views, batch_size) for batch in candidates.inputs.split(at_once)]
        )
        scores = (answered == candidates.labels[:, None]).double().mean(1)
    else:
        asker = _Asker(target, candidates.labels, batch_size)
        scores = _distances(asker, candidates.inputs, generator, queries)
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False, dependence="per_model")


def _of_views(target: LabelAccess, inputs: Tensor, views: int, batch_size: int) -> Tensor:
    """Returns predicted labels of each view of each input [n, views]."""
    transformed = viewed(inputs, views)
    answered = torch.cat([target.labels_of(batch) for batch in transformed.flatten(0, 1).split(batch_size)])
    return answered.unflatten(0, transformed.shape[:2])


@dataclass(frozen=True)
class _Asker:
    """Label queries of a model.

    Attributes:
        target: the model.
        labels: labels of all candidates.
        batch_size: inputs per query.
    """

    target: LabelAccess
    labels: Tensor
    batch_size: int

    def answers(self, points: Tensor) -> Tensor:
        """Returns predicted labels of points [n, *shape]."""
        return torch.cat([self.target.labels_of(batch) for batch in points.split(self.batch_size)])

    def beyond(self, points: Tensor, labels: Tensor) -> Bool[Tensor, " n"]:
        """Returns whether the predicted labels of points differ from `labels`."""
        return self.answers(points) != labels


def _distances(asker: _Asker, inputs: Tensor, generator: torch.Generator, queries: int) -> Float[Tensor, " n"]:
    answered = asker.answers(inputs)
    if (answered == answered[0]).all():
        raise NotApplicable("the model answers all candidates alike, so that no other answer is known to search for")
    right = answered == asker.labels
    distance = torch.zeros(len(inputs), dtype=torch.float64, device=inputs.device)
    if right.any():
        starts = inputs[_nearest_otherwise(inputs, answered, asker.batch_size)[right]]
        distance[right] = _searched(asker, inputs[right], asker.labels[right], starts, generator, queries - 1).double()
    return distance


def _nearest_otherwise(inputs: Tensor, answered: Tensor, at_once: int) -> Tensor:
    """Returns the index of the nearest candidate with another predicted label, for each candidate."""
    flat, nearest = inputs.flatten(1).double(), []
    for batch, own in zip(flat.split(at_once), answered.split(at_once), strict=True):
        nearest.append(torch.cdist(batch, flat).masked_fill(own[:, None] == answered[None], torch.inf).argmin(dim=1))
    return torch.cat(nearest)


def _round_cost(number: int) -> int:
    """Returns the queries of a round: around the point, along the normal, and back to the boundary."""
    return _around(number) + 2 * HALVINGS


def _around(number: int) -> int:
    return int(FEWEST * math.sqrt(number))


def _searched(
    asker: _Asker, inputs: Tensor, labels: Tensor, starts: Tensor, generator: torch.Generator, queries: int
) -> Float[Tensor, " n"]:
    """Returns the smallest distance found from each input to a point with another label."""
    point = _to_boundary(asker, inputs, labels, starts)
    nearest = _length(point - inputs)
    budget, number = queries - HALVINGS, 1
    while budget >= _round_cost(number):
        budget -= _round_cost(number)
        # Random points within about 1 / dim of the distance see a nearly plane boundary (HopSkipJump, Section III.C).
        radius = _length(point - inputs) / inputs[0].numel()
        normal = _normal(asker, point, labels, radius, _around(number), generator)
        length = _length(point - inputs) / math.sqrt(number)
        point = _to_boundary(asker, inputs, labels, _along(asker, point, labels, normal, length))
        nearest = torch.minimum(nearest, _length(point - inputs))
        number += 1
    return nearest


def _to_boundary(asker: _Asker, inputs: Tensor, labels: Tensor, outside: Tensor) -> Tensor:
    """Returns points just beyond the boundary, on the lines from inputs to points with another label."""
    low, high = inputs.new_zeros(len(inputs)), inputs.new_ones(len(inputs))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beyond = asker.beyond(_between(inputs, outside, middle), labels)
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return _between(inputs, outside, high)


def _normal(
    asker: _Asker, point: Tensor, labels: Tensor, radius: Tensor, around: int, generator: torch.Generator
) -> Tensor:
    """Estimates unit normals towards other labels, from predicted labels around points on the boundary."""
    at_once = max(1, asker.batch_size // len(point))
    weighted, plain, votes = torch.zeros_like(point), torch.zeros_like(point), point.new_zeros(len(point))
    for first in range(0, around, at_once):
        count = min(at_once, around - first)
        away = torch.randn(len(point), count, *point.shape[1:], generator=generator).to(point)
        away = away / _spread(_length(away.flatten(0, 1)).unflatten(0, away.shape[:2]), away).clamp(min=1e-12)
        tried = _inside(asker.target, point[:, None] + _spread(radius, away) * away)
        away = (tried - point[:, None]) / _spread(radius, away).clamp(min=1e-12)
        vote = 2 * asker.beyond(tried.flatten(0, 1), labels.repeat_interleave(count)).to(point) - 1
        vote = vote.unflatten(0, (len(point), count))
        weighted = weighted + (_spread(vote, away) * away).sum(1)
        plain, votes = plain + away.sum(1), votes + vote.sum(1)
    # Subtracting the mean vote lowers the variance. If all votes agree it would cancel the estimate, and their common
    # sign gives the side on which the boundary lies.
    mean = votes / around
    mixed = torch.where(mean.abs() < 1, mean, torch.zeros_like(mean))
    normal = weighted - _spread(mixed, weighted) * plain
    return normal / _spread(_length(normal), normal).clamp(min=1e-12)


def _along(asker: _Asker, point: Tensor, labels: Tensor, normal: Tensor, length: Tensor) -> Tensor:
    """Returns the farthest of halved steps along the normals that changes the label; the point itself if none does."""
    farthest, missing = point, torch.ones(len(point), dtype=torch.bool, device=point.device)
    for _ in range(HALVINGS):
        tried = _inside(asker.target, point + _spread(length, normal) * normal)
        misled = missing & asker.beyond(tried, labels)
        farthest, missing = torch.where(_spread(misled, tried), tried, farthest), missing & ~misled
        length = length / 2
    return farthest


def _inside(target: LabelAccess, points: Tensor) -> Tensor:
    return points.clamp(target.input_low, target.input_high)


def _between(inputs: Tensor, outside: Tensor, share: Tensor) -> Tensor:
    return inputs + _spread(share, inputs) * (outside - inputs)


def _length(moves: Tensor) -> Tensor:
    return moves.flatten(1).double().norm(dim=1).to(moves)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """Reshapes a value per example, or per point of an example, so that it broadcasts over inputs."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))
