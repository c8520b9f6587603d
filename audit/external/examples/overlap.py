"""Duplicates and near-duplicates between two groups: by exact content, and by the distances of all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from leakbench.attacks.core import Examples

from .groups import Groups

NEAR = 0.1
"""Largest distance of near-duplicates, as a fraction of the larger norm after subtraction of the common mean."""

NEARER = 0.25
"""The same, as a fraction of the distance to the nearest other example of its own group: in dense data every example
has near neighbours."""

LEAST_NUMBERS = 6
"""Fewest dimensions of an input; in fewer, near neighbours occur by chance."""

LARGEST = 10_000
"""Most examples compared per group; larger groups are sampled at random."""

_WIDE = 1024
_SIDE = 16
_BLOCK = 2048
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class NearDuplicates:
    """Result of a near-duplicate comparison of two groups.

    Attributes:
        count: examples of the first group with a near-duplicate in the second; exact copies are not counted.
        compared: examples compared of the first group.
        of: size of the first group.
    """

    count: int
    compared: int
    of: int


def contents(groups: Sequence[Tensor]) -> list[ndarray]:
    """Numbers the distinct inputs of all groups by their exact values: copies share a number.

    Args:
        groups: inputs [n, *shape], of one shape.
    """
    hashes = np.concatenate([_hashed(group) for group in groups])
    _, numbers = np.unique(hashes, return_inverse=True)
    return np.split(numbers, np.cumsum([len(group) for group in groups])[:-1])


def without_shared(groups: Groups) -> Groups:
    """Removes examples shared by two groups: from both members and non-members, and from the population.

    A member that is also a non-member cannot be distinguished from non-members. If shared examples were removed from
    one of the two groups alone, repeated content in the other would reveal that group.

    Raises:
        ValueError: a group is left empty.
    """
    by_name = {name: getattr(groups, name) for name in ("members", "non_members", "population")}
    by_name = {name: group for name, group in by_name.items() if group is not None}
    own = dict(zip(by_name, contents([group.inputs for group in by_name.values()]), strict=True))
    both = np.intersect1d(own["members"], own["non_members"])
    candidates = np.union1d(own["members"], own["non_members"])
    remaining, sources = {}, dict(groups.sources)
    for name, group in by_name.items():
        kept = ~np.isin(own[name], candidates if name == "population" else both)
        if not kept.any():
            raise ValueError(f"{name} must have examples that no other group has, got none: all {len(kept)} are shared")
        at = torch.from_numpy(np.flatnonzero(kept)).to(group.ids.device)
        remaining[name] = Examples(ids=group.ids[at], inputs=group.inputs[at], labels=group.labels[at])
        if name in sources and not kept.all():
            dropped = f"{int((~kept).sum())} examples that another group has were left out"
            sources[name] = replace(sources[name], notes=(*sources[name].notes, dropped))
    return replace(groups, **remaining, sources=sources)


def near_duplicates(inside: Tensor, outside: Tensor, *, seed: int = 0) -> NearDuplicates:
    """Counts the examples of a group that have a near-duplicate in another, by the distances of all pairs.

    Finds small changes of all values, but not a crop or a shift by a pixel. Wide inputs are compared by averages over
    squares of pixels or by a random projection, and the matches are then checked on the full inputs.

    Args:
        inside: [p, *shape].
        outside: [q, *shape], on the same device.
        seed: of the sample of groups larger than `LARGEST`.
    """
    if inside[0].numel() < LEAST_NUMBERS:
        return NearDuplicates(0, 0, len(inside))
    generator = torch.Generator().manual_seed(seed)
    first, second = (_subsample(group, generator) for group in (inside, outside))
    # The mean is common to both groups: shared content, such as a background, then makes no two examples similar.
    mean = torch.cat([first.mean(0, keepdim=True), second.mean(0, keepdim=True)]).float().mean(0, keepdim=True)
    shortened, candidates = (_shortened(group.float() - mean, generator) for group in (first, second))
    squares, places = _nearest(shortened, candidates)
    sizes = torch.maximum(shortened.square().sum(1), candidates[places].square().sum(1))
    matches = torch.nonzero(squares <= NEAR**2 * sizes).flatten()
    if len(shortened) > 1 and len(matches):
        own, _ = _nearest(shortened[matches], shortened, apart_from=matches)
        matches = matches[squares[matches] <= NEARER**2 * own]
    pairs = ((first[matches].float() - mean).flatten(1), (second[places[matches]].float() - mean).flatten(1))
    norms = torch.maximum(*(part.norm(dim=1) for part in pairs))
    distance = (pairs[0] - pairs[1]).norm(dim=1)
    # Averaging reduces noise, so the full inputs may differ by more than their shortened forms.
    close = (distance > 0) & (distance <= (2 * NEAR if shortened.shape[1] < first[0].numel() else NEAR) * norms)
    return NearDuplicates(int(close.sum()), len(first), len(inside))


def _nearest(
    first: Float[Tensor, "p d"], second: Float[Tensor, "q d"], apart_from: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the squared distance of each example to its nearest neighbour, and the neighbour's index.

    Args:
        first: queries.
        second: possible neighbours.
        apart_from: each query's own index in `second`, if the queries are part of it.
    """
    norms, least, places = second.square().sum(1), [], []
    for start, part in zip(range(0, len(first), _BLOCK), first.split(_BLOCK), strict=True):
        squares = part.square().sum(1, keepdim=True) + norms - 2 * part @ second.T
        if apart_from is not None:
            squares.scatter_(1, apart_from[start : start + len(part), None], torch.inf)
        values, at = squares.clamp(min=0).min(1)
        least.append(values)
        places.append(at)
    return torch.cat(least), torch.cat(places)


def _subsample(inputs: Tensor, generator: torch.Generator) -> Tensor:
    if len(inputs) <= LARGEST:
        return inputs
    return inputs[torch.randperm(len(inputs), generator=generator)[:LARGEST].sort().values.to(inputs.device)]


def _shortened(inputs: Tensor, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """Reduces inputs to about a thousand numbers at most, nearly preserving distances."""
    if inputs[0].numel() <= _WIDE:
        return inputs.flatten(1)
    if inputs.ndim == 4 and inputs.shape[1] <= 4 and min(inputs.shape[2:]) >= _SIDE:
        return nn.functional.adaptive_avg_pool2d(inputs, _SIDE).flatten(1)
    # The same seed for each group, so that both are projected alike.
    axes = torch.randn(inputs[0].numel(), 256, generator=torch.Generator().manual_seed(generator.initial_seed()))
    return inputs.flatten(1) @ axes.to(inputs.device) / 16


def _mixed(words: ndarray) -> ndarray:
    """Applies MurmurHash3's finaliser, a bijection of 64-bit words; nearby inputs give unrelated outputs."""
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


def _hashed(inputs: Tensor) -> ndarray:
    """Hashes each input to 64 bits; among a million inputs the probability of any collision is 3e-8."""
    rows = inputs.detach().cpu().flatten(1)
    # A key per column makes the hash depend on positions; adding 0.0 turns -0.0 into 0.0, which equals it.
    keys = _mixed(np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * _ODD) | np.uint64(1)
    hashes = []
    for part in rows.split(max(1, 2**22 // rows.shape[1])):
        words = np.ascontiguousarray((part.float() + 0.0).numpy()).view(np.uint32).astype(np.uint64)
        hashes.append(_mixed((_mixed(words + keys) * keys).sum(1, dtype=np.uint64)))
    return np.concatenate(hashes)
