"""Micro-batch sizes that fit a memory budget, which are also the batch sizes that an engine is checked on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Memory that a CPU allocator reuses without returning it to the system, roughly.
REUSED_MEMORY = 256 * 2**20


class Batches(NamedTuple):
    """Known sizes of a run's batches.

    Attributes:
        expected: examples in a batch; 0 if unknown.
        views: entries of an example.
        most: maximum number of examples processed at a time; None to use the budget.
        budget: bytes that these may take.
    """

    expected: float = 0.0
    views: int = 1
    most: int | None = None
    budget: int = 2 * 2**30

    def fitting(self, bytes_per_entry: int) -> int:
        """Returns the maximum number of examples processed at a time, at least 1."""
        return self.most or max(1, self.budget // max(1, self.views * bytes_per_entry))

    def micro_batch(self, examples: int, bytes_per_entry: int) -> int:
        """Returns the size of a batch's micro-batches: as even as they can be, as a small last one costs a whole pass.

        Args:
            examples: in the batch.
            bytes_per_entry: of the engine.
        """
        number = -(-examples // self.fitting(bytes_per_entry))
        return max(1, -(-examples // max(1, number)))

    def public_size(self, examples: int, bytes_per_entry: int) -> int:
        """Returns the size of passes whose kernels must not depend on the number of examples in the batch.

        It follows from the expected batch, plus two standard deviations of a Poisson sample: larger batches, of which
        there are 2 %, take a second pass. Without an expected batch, from the batch itself, rounded up by an eighth.

        Args:
            examples: in the batch.
            bytes_per_entry: of the engine.
        """
        grain = max(1, 2 ** (examples.bit_length() - 1) // 8)
        size = math.ceil(self.expected + 2 * math.sqrt(self.expected)) or -(-examples // grain) * grain
        return min(self.fitting(bytes_per_entry), size)

    def sizes(self, bytes_per_entry: int) -> set[int]:
        """Returns the sizes, in entries, on which an engine is checked.

        They are those of the micro-batches of the expected batch and of a large Poisson sample, their last ones
        included, and the largest that fits.
        """
        # Four standard deviations: a Poisson sample's variance is its mean.
        large = math.ceil(self.expected + 4 * math.sqrt(self.expected))
        sizes = {min(large, self.fitting(bytes_per_entry))}
        for examples in (math.ceil(self.expected), large):
            even = self.micro_batch(examples, bytes_per_entry)
            sizes |= {min(even, examples), examples % even}
        return {self.views * size for size in sizes if size}


def reused(budget: int, parameter: torch.Tensor, dim: int) -> int:
    """Returns the part of a memory budget that is worth using at a time.

    On a CPU the operating system clears fresh pages, which takes longer than most passes over them; smaller
    micro-batches reuse the allocator's memory. But each micro-batch costs passes over vectors of the parameters'
    length.

    Args:
        budget: bytes.
        parameter: any of the model's.
        dim: total number of parameters.
    """
    # At least 64 vectors of that length at a time, so that passes over the sums are a small share.
    return min(budget, max(REUSED_MEMORY, 64 * dim * parameter.element_size())) if parameter.is_cpu else budget
