"""Augmentation multiplicity: several views of each example, whose gradients are averaged before the bound.

De, Berrada, Hayes, Smith & Balle, "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
2022, section 3.2: the mean gradient of all views is bounded once, so that an example costs what it cost with one view.

Guarantee:
    The same as without: an example's contribution is still a function of the example alone, bounded once. Assumes that
    `apply` treats every entry by itself. What is drawn is public randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


@runtime_checkable
class Augmentation(Protocol):
    """Random views of examples; what is random is drawn for a whole batch, so that micro-batches change nothing."""

    @property
    def views(self) -> int:
        """Views of each example."""
        ...

    def draw(self, entries: int, coins: torch.Generator) -> Tensor:
        """What decides each view, one row each."""
        ...

    def apply(self, inputs: Tensor, drawn: Tensor) -> Tensor:
        """The views: each entry by itself, of the same shape."""
        ...


@dataclass(frozen=True, kw_only=True)
class CropAndFlip:
    """Random crops of the image padded by reflection, flipped left to right half of the time.

    Attributes:
        views: of each example.
        padding: pixels added on every side before a crop of the image's own size is taken.
        flip: whether to flip; not for digits or text.
    """

    views: int = 1
    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.views < 1:
            raise ValueError(f"views must be at least 1, got {self.views}")
        if self.padding < 0:
            raise ValueError(f"padding must be at least 0, got {self.padding}")

    def draw(self, entries: int, coins: torch.Generator) -> Int[Tensor, "entries 3"]:
        """Rows and columns to shift by, and whether to flip."""
        shifts = torch.randint(0, 2 * self.padding + 1, (entries, 2), generator=coins)
        flips = torch.randint(0, 2, (entries, 1), generator=coins)
        return torch.cat([shifts, flips if self.flip else torch.zeros_like(flips)], dim=1)

    def apply(
        self, inputs: Float[Tensor, "entries channels height width"], drawn: Int[Tensor, "entries 3"]
    ) -> Float[Tensor, "entries channels height width"]:
        """Crops and flips, all entries at once."""
        entries, _, height, width = inputs.shape
        if self.padding >= min(height, width):
            raise ValueError(f"padding must be below the image's {height}x{width} pixels, got {self.padding}")
        padded = F.pad(inputs, (self.padding,) * 4, mode="reflect")
        drawn = drawn.to(inputs.device)
        rows = drawn[:, :1] + torch.arange(height, device=inputs.device)
        across = torch.arange(width, device=inputs.device)
        columns = drawn[:, 1:2] + torch.where(drawn[:, 2:].bool(), across.flip(0), across)
        entry = torch.arange(entries, device=inputs.device).view(-1, 1, 1)
        # Indexing around a slice puts the channels last, which is the order convolutions like best.
        return padded[entry, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
