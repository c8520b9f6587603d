"""Memory of a CUDA device: what the card has, and what a pass may use of it."""

from __future__ import annotations

from functools import cache

import torch

_SHARE = 1 / 2
"""Share of a card that a pass may use. Not of what is free, where that is more: micro-batches are then alike."""
_RESERVE = 1 / 10
"""Share of the free memory that is left to libraries, fragmentation and vectors of the parameters' length."""


@cache
def total_memory(device: torch.device) -> int:
    """Returns the bytes of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def usable_memory(device: torch.device) -> int:
    """Returns the bytes that a pass may use on a CUDA device: half of it, or less if other programs hold the rest."""
    free, total = torch.cuda.mem_get_info(device)
    # Memory that PyTorch's allocator holds and does not use is free to this process.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(min(_SHARE * total, (1 - _RESERVE) * free))
