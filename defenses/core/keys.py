"""PyTorch's generator, keyed by more than 32 bits.

`Generator.manual_seed` takes 64 bits, but the CPU's Mersenne Twister is started from the lower 32 of them: whoever
sees one draw tries all the keys in hours, and two of a hundred thousand streams are probably the same. Here the
whole state, 624 words, is filled from a key of any length.
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import torch

_WORDS = 624
BYTES = 4 * _WORDS
"""Length of what `filled` takes."""
_BEFORE = 24  # bytes of the saved state ahead of the words, which take 8 bytes each


def keyed(key: int) -> torch.Generator:
    """A generator on the CPU that any key of at least 0 sets apart; those below 2^32 are PyTorch's own seeds.

    Args:
        key: any number of bits.
    """
    if key < 2**32 or not fills_states():
        return torch.Generator().manual_seed(key & (2**63 - 1))
    length = (key.bit_length() + 7) // 8
    return filled(hashlib.shake_256(key.to_bytes(length, "big")).digest(BYTES))


def filled(content: bytes) -> torch.Generator:
    """A generator whose state is these bytes.

    Args:
        content: `BYTES` bytes, as good as random.
    """
    # What `initial_seed` tells, for those who tell generators apart by it.
    generator = torch.Generator().manual_seed(int.from_bytes(content[:8], "little") >> 1)
    state = generator.get_state()
    words = torch.frombuffer(bytearray(content), dtype=torch.int32).long() & 0xFFFF_FFFF
    state[_BEFORE : _BEFORE + 8 * _WORDS] = words.view(torch.uint8)
    generator.set_state(state)
    return generator


@cache
def fills_states() -> bool:
    """Whether this PyTorch keeps its state as we fill it: its draws are then those of NumPy's twister."""
    content = hashlib.shake_256(b"probe").digest(BYTES)
    other = np.random.MT19937()
    other.state = {
        "bit_generator": "MT19937",
        "state": {"key": np.frombuffer(content, dtype=np.uint32), "pos": _WORDS},
    }
    try:
        ours = torch.empty(2 * _WORDS, dtype=torch.int32).random_(generator=filled(content))
    except RuntimeError:  # a state of another length
        return False
    return bool((other.random_raw(2 * _WORDS) & 0x7FFF_FFFF == ours.numpy()).all())
