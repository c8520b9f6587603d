"""Micro-batch sizes that fit a memory budget, which are also the batch sizes that an engine is checked on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# What a CPU's allocator hands out again without returning it to the system in between, roughly.
REUSED_MEMORY = 256 * 2**20


class Batches(NamedTuple):
    """The batches of a run, as far as they are known before it.

    Attributes:
        expected: examples in one; 0 where unknown.
        views: entries of an example.
        most: examples that are worked on at a time, whatever fits; None for no such limit.
        budget: bytes that these may take.
    """

    expected: float = 0.0
    views: int = 1
    most: int | None = None
    budget: int = 2 * 2**30

    def fitting(self, bytes_per_entry: int) -> int:
        """Most examples that are worked on at a time; at least one."""
        return self.most or max(1, self.budget // max(1, self.views * bytes_per_entry))

    def sizes(self, bytes_per_entry: int) -> set[int]:
        """Entries that an engine will be handed at a time: of the expected batch, and of a large Poisson sample.

        A batch that does not fit is cut, so that what is left over is one of the sizes.
        """
        most, expected = self.fitting(bytes_per_entry), math.ceil(self.expected)
        # Four standard deviations: a Poisson sample's variance is its mean.
        large = math.ceil(self.expected + 4 * math.sqrt(self.expected))
        return {self.views * size for size in (min(expected, most), expected % most, min(large, most)) if size}


def reused(budget: int, parameter: torch.Tensor, dim: int) -> int:
    """The part of a memory budget that is worth using at a time.

    On a CPU the kernel clears fresh pages, which takes longer than most passes over them; smaller micro-batches reuse
    what the allocator holds. But each of them costs passes over vectors of the parameters' length.

    Args:
        budget: bytes.
        parameter: one of the model's.
        dim: numbers in all of them.
    """
    # At least 64 such vectors at a time, of which those passes are a small share.
    return min(budget, max(REUSED_MEMORY, 64 * dim * parameter.element_size())) if parameter.is_cpu else budget
