"""Augmentation multiplicity: several views of each example, whose gradients are averaged before the bound.

De, Berrada, Hayes, Smith & Balle, "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
2022, section 3.2: the mean gradient of all views is bounded once, so the privacy cost is that of one view.

Guarantee:
    The same as without augmentation: an example's contribution remains a function of that example alone, bounded once,
    because the randomness of its views is a hash of that record and a public seed (`record_draws.py`). Assumes that
    `draw` and `apply` process every entry independently of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.nn import functional as F

from ..randomness.keys import seed_from
from ..randomness.record_draws import entry_keys, words


@runtime_checkable
class Augmentation(Protocol):
    """Random views of examples; all randomness of a view is a function of the random words passed to `draw`."""

    @property
    def views(self) -> int:
        """Views of each example."""
        ...

    @property
    def words(self) -> int:
        """Random 64-bit words per view."""
        ...

    def draw(self, words: Int64[Tensor, "entries words"]) -> Tensor:
        """Returns the random parameters of each view, a row each: a function of that entry's words alone."""
        ...

    def apply(self, inputs: Tensor, drawn: Tensor) -> Tensor:
        """Returns the views: each entry by itself, of the same shape."""
        ...


def draws(seed: int, step: int) -> int:
    """Returns the public seed of a step's random layers (dropout) and augmentation.

    Args:
        seed: key of a run's public randomness.
        step: number of the step.
    """
    return seed_from(seed, "draws", step)


def draws_at_start(seed: int) -> int:
    """Returns the seed of random layers and augmentation in one-off releases before step 0; no step has this seed.

    Args:
        seed: key of a run's public randomness.
    """
    return seed_from(seed, "draws at the start")


def global_draws(seed: int, step: int | None) -> int:
    """Returns the public seed of PyTorch's global generators, from which a method may draw.

    Args:
        seed: key of a run's public randomness.
        step: number of the step; None for the start of a run.
    """
    return seed_from(seed, "layers", -1 if step is None else step)


Views = Callable[[Tensor, Tensor], Tensor]
"""(inputs [n, ...], targets [n]) -> their views [views, n, ...] in a step."""


def drawn_views(augmentation: Augmentation, keys: Int64[Tensor, " entries"], seed: int) -> Tensor:
    """Returns the random parameters of each view of a step.

    Args:
        augmentation: draws the parameters.
        keys: keys of the views, by `entry_keys`.
        seed: public seed of the step.
    """
    return augmentation.draw(words(keys, augmentation.words, seed_from(seed, "views")))


def views_of(augmentation: Augmentation, inputs: Tensor, targets: Tensor, *, seed: int) -> Tensor:
    """Returns the views of examples in a step [views, n, ...], which anyone who knows the examples can compute.

    Differentiable in the inputs, except through the choice of the views.

    Args:
        augmentation: the run's augmentation.
        inputs: the examples [n, ...].
        targets: their targets [n].
        seed: public seed of the step.
    """
    keys = entry_keys(inputs, targets, augmentation.views, seed)
    repeated = inputs.repeat_interleave(augmentation.views, dim=0)
    augmented = augmentation.apply(repeated, drawn_views(augmentation, keys, seed))
    return augmented.unflatten(0, (len(inputs), augmentation.views)).transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class CropAndFlip:
    """Random crops of the image padded by reflection, flipped left to right with probability 1/2.

    Attributes:
        views: number of views of each example.
        padding: pixels added on every side before a crop of the image's own size is taken.
        flip: True to flip; not for digits or text.
    """

    views: int = 1
    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.views < 1:
            raise ValueError(f"views must be at least 1, got {self.views}")
        if self.padding < 0:
            raise ValueError(f"padding must be at least 0, got {self.padding}")

    @property
    def words(self) -> int:
        """Three: the shifts along both axes, and the flip."""
        return 3

    def draw(self, words: Int64[Tensor, "entries words"]) -> Int64[Tensor, "entries 3"]:
        """Returns row shift, column shift and flip bit of each entry."""
        shifts = words[:, :2].remainder(2 * self.padding + 1)  # bias 2^-60, from the remainder of 2^64 words
        flips = words[:, 2:3] & int(self.flip)
        return torch.cat([shifts, flips], dim=1)

    def apply(
        self, inputs: Float[Tensor, "entries channels height width"], drawn: Int[Tensor, "entries 3"]
    ) -> Float[Tensor, "entries channels height width"]:
        """Crops and flips all entries at once."""
        if inputs.dim() != 4:
            shape = list(inputs.shape[1:])
            raise ValueError(f"views must be of images [channels, height, width], got examples of shape {shape}")
        entries, _, height, width = inputs.shape
        if self.padding >= min(height, width):
            raise ValueError(f"padding must be below the image's {height}x{width} pixels, got {self.padding}")
        padded = F.pad(inputs, (self.padding,) * 4, mode="reflect")
        drawn = drawn.to(inputs.device)
        # Crop and flip in a single gather: a crop shifts row and column indices, a flip reverses the column indices.
        rows = drawn[:, :1] + torch.arange(height, device=inputs.device)
        across = torch.arange(width, device=inputs.device)
        columns = drawn[:, 1:2] + torch.where(drawn[:, 2:].bool(), across.flip(0), across)
        entry = torch.arange(entries, device=inputs.device).view(-1, 1, 1)
        # Indexing around a slice puts the channels last, the fastest order for convolutions.
        return padded[entry, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordSchedule:
    """One view of each example, the example itself; a few known records are shifted in some steps.

    It serves audits of masked training, where a canary's gradient must lie inside the mask of each step, so that its
    input differs from step to step. The shift of a record in a step is looked up in a table, by the random word that
    record and step determine; every other record is unchanged.

    Attributes:
        known: random words of the shifted records, one per record and step, ascending: the keys of the table.
        added: value added to all entries of a record's input in that step, in the order of `known`.
    """

    known: Int64[Tensor, " any"]
    added: Float[Tensor, " any"]

    @property
    def views(self) -> int:
        """One: the record itself."""
        return 1

    @property
    def words(self) -> int:
        """One, the key of the table."""
        return 1

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor, added: Float[Tensor, "steps n"], *, seed: int) -> RecordSchedule:
        """Returns the schedule of some records.

        Args:
            inputs: the records' inputs [n, ...], as they are in the data.
            targets: the records' targets [n].
            added: to all entries of each record, by step.
            seed: key of the run's public randomness.
        """
        record_words = []
        for step in range(len(added)):
            step_seed = draws(seed, step)
            keys = entry_keys(inputs, targets, 1, step_seed)
            record_words.append(words(keys, 1, seed_from(step_seed, "views")).flatten().cpu())
        known, order = torch.cat(record_words).sort()
        return cls(known=known, added=added.flatten().cpu()[order])

    def draw(self, words: Int64[Tensor, "entries words"]) -> Float[Tensor, "entries 1"]:
        """Returns the shift of each entry's input; 0 for a record that is not in the table."""
        known, added = self.known.to(words.device), self.added.to(words.device)
        place = torch.searchsorted(known, words[:, 0].contiguous()).clamp(max=len(known) - 1)
        return torch.where(known[place] == words[:, 0], added[place], 0.0).unsqueeze(1)

    def apply(self, inputs: Tensor, drawn: Tensor) -> Tensor:
        """Returns the shifted inputs, all entries at once."""
        return inputs + drawn.to(inputs).view(-1, *[1] * (inputs.dim() - 1))
