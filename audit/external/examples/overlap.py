"""Examples that are in two groups, or nearly: by exact content, and by distance between all of two groups."""

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
"""Distance of near-duplicates, as a share of the larger one's norm after the mean of all is taken off."""

NEARER = 0.25
"""And as a share of the distance to the nearest other of its own group: dense data are near one another everywhere."""

LEAST_NUMBERS = 6
"""Of an input; in fewer dimensions somebody is that near by chance."""

LARGEST = 10_000
"""Examples a group that are compared; of more, so many at random."""

_WIDE = 1024
_SIDE = 16
_BLOCK = 2048
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class NearDuplicates:
    """What a comparison of two groups found.

    Attributes:
        count: of the first group, who have a near-duplicate in the second; copies are not counted.
        compared: of the first group.
        of: all of the first group.
    """

    count: int
    compared: int
    of: int


def contents(groups: Sequence[Tensor]) -> list[ndarray]:
    """A number for each distinct input of all groups, by its exact values: copies have one number.

    Args:
        groups: inputs [n, *shape], of one shape.
    """
    hashes = np.concatenate([_hashed(group) for group in groups])
    _, numbers = np.unique(hashes, return_inverse=True)
    return np.split(numbers, np.cumsum([len(group) for group in groups])[:-1])


def without_shared(groups: Groups) -> Groups:
    """Groups without examples of two of them: out of members and non-members alike, and out of the population.

    Who is in both is a member whom nobody could tell from a non-member; taken out of one group alone, the copies of a
    pool would be left in the other, and tell the groups apart.

    Raises:
        ValueError: nobody is left of a group.
    """
    given = {name: getattr(groups, name) for name in ("members", "non_members", "population")}
    given = {name: group for name, group in given.items() if group is not None}
    own = dict(zip(given, contents([group.inputs for group in given.values()]), strict=True))
    both = np.intersect1d(own["members"], own["non_members"])
    candidates = np.union1d(own["members"], own["non_members"])
    left, sources = {}, dict(groups.sources)
    for name, group in given.items():
        kept = ~np.isin(own[name], candidates if name == "population" else both)
        if not kept.any():
            raise ValueError(f"{name} must have examples that no other group has, got none: all {len(kept)} are shared")
        at = torch.from_numpy(np.flatnonzero(kept)).to(group.ids.device)
        left[name] = Examples(ids=group.ids[at], inputs=group.inputs[at], labels=group.labels[at])
        if name in sources and not kept.all():
            dropped = f"{int((~kept).sum())} examples that another group has were left out"
            sources[name] = sources[name] | {"notes": [*sources[name]["notes"], dropped]}
    return replace(groups, **left, sources=sources)


def near_duplicates(inside: Tensor, outside: Tensor, *, seed: int = 0) -> NearDuplicates:
    """Who of a group is nearly somebody of another, by the distance between any two.

    Small changes of all values are found; a crop or a shift by a pixel is not. Wide inputs are compared by means over
    squares of pixels, or by a random projection, and who is near by those is held against the inputs themselves.

    Args:
        inside: [p, *shape].
        outside: [q, *shape], on the same device.
        seed: of the choice among more than `LARGEST`.
    """
    if inside[0].numel() < LEAST_NUMBERS:
        return NearDuplicates(0, 0, len(inside))
    coins = torch.Generator().manual_seed(seed)
    first, second = (_some(group, coins) for group in (inside, outside))
    # One mean for both: what all examples share, as a background, makes no two of them alike.
    mean = torch.cat([first.mean(0, keepdim=True), second.mean(0, keepdim=True)]).float().mean(0, keepdim=True)
    short, other = (_shortened(group.float() - mean, coins) for group in (first, second))
    squares, places = _nearest(short, other)
    sizes = torch.maximum(short.square().sum(1), other[places].square().sum(1))
    found = torch.nonzero(squares <= NEAR**2 * sizes).flatten()
    if len(short) > 1 and len(found):
        own, _ = _nearest(short[found], short, apart_from=found)
        found = found[squares[found] <= NEARER**2 * own]
    pairs = ((first[found].float() - mean).flatten(1), (second[places[found]].float() - mean).flatten(1))
    norms = torch.maximum(*(part.norm(dim=1) for part in pairs))
    distance = (pairs[0] - pairs[1]).norm(dim=1)
    # Averages of noise are less noise: the inputs themselves may differ by more.
    close = (distance > 0) & (distance <= (2 * NEAR if short.shape[1] < first[0].numel() else NEAR) * norms)
    return NearDuplicates(int(close.sum()), len(first), len(inside))


def _nearest(
    first: Float[Tensor, "p d"], second: Float[Tensor, "q d"], apart_from: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Squared distance of each to the nearest of others, and the place of that one.

    Args:
        first: who asks.
        second: among whom.
        apart_from: place of each among these, where they are some of these.
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


def _some(inputs: Tensor, coins: torch.Generator) -> Tensor:
    if len(inputs) <= LARGEST:
        return inputs
    return inputs[torch.randperm(len(inputs), generator=coins)[:LARGEST].sort().values.to(inputs.device)]


def _shortened(inputs: Tensor, coins: torch.Generator) -> Float[Tensor, "n d"]:
    """At most about a thousand numbers an input, whose distances are nearly those of the inputs."""
    if inputs[0].numel() <= _WIDE:
        return inputs.flatten(1)
    if inputs.ndim == 4 and inputs.shape[1] <= 4 and min(inputs.shape[2:]) >= _SIDE:
        return nn.functional.adaptive_avg_pool2d(inputs, _SIDE).flatten(1)
    # Drawn anew for each group from one seed, so that both are projected alike.
    axes = torch.randn(inputs[0].numel(), 256, generator=torch.Generator().manual_seed(coins.initial_seed()))
    return inputs.flatten(1) @ axes.to(inputs.device) / 16


def _mixed(words: ndarray) -> ndarray:
    """The finaliser of MurmurHash3, a bijection of 64-bit words: what differs in one bit looks unlike afterwards."""
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


def _hashed(inputs: Tensor) -> ndarray:
    """64 bits an input; among a million of them two that differ agree with chance 3e-8."""
    rows = inputs.detach().cpu().flatten(1)
    # A key a column, so that it counts where a value stands; 0.0 is added because -0.0 equals it.
    keys = _mixed(np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * _ODD) | np.uint64(1)
    found = []
    for part in rows.split(max(1, 2**22 // rows.shape[1])):
        words = np.ascontiguousarray((part.float() + 0.0).numpy()).view(np.uint32).astype(np.uint64)
        found.append(_mixed((_mixed(words + keys) * keys).sum(1, dtype=np.uint64)))
    return np.concatenate(found)
