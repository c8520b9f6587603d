"""PyTorch generators keyed by more than 32 bits, and seeds derived by hashing.

`Generator.manual_seed` takes 64 bits, but initialises the CPU's Mersenne Twister from the lower 32: an attacker with a
single draw can try all keys in hours, and two of a hundred thousand streams are probably the same. Here the whole
state, 624 words, is filled from a key of any length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor

_WORDS = 624
_BEFORE = 24  # bytes that precede the words in a saved state; each word takes 8 bytes


def seed_from(*parts: object) -> int:
    """Derives a 63-bit seed by SHA-256 from the text of its parts; the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def key_from(*parts: object) -> int:
    """Derives a 256-bit key by SHA-256 from the text of its parts; secret if a part is secret and hard to guess."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest(), "big")


def keyed(key: int) -> torch.Generator:
    """Returns a CPU generator from a key of any length; a key below 2^32 gives the generator that `manual_seed` gives.

    If a later PyTorch changes the layout of its state (`fills_states`), only the lower 32 bits of a key count, as in
    `manual_seed`.

    Args:
        key: nonnegative integer with any number of bits.

    Raises:
        ValueError: for a negative key.
    """
    if key < 0:
        raise ValueError(f"key must be at least 0, got {key}")
    if key < 2**32 or not fills_states():
        return torch.Generator().manual_seed(key & (2**63 - 1))
    return filled(key.to_bytes((key.bit_length() + 7) // 8, "big"))


def filled(content: bytes) -> torch.Generator:
    """Returns a CPU generator whose whole state is hashed (SHAKE-256) from a byte string of any length."""
    state = hashlib.shake_256(content).digest(4 * _WORDS)
    # This seed is the value of `initial_seed` only: a hash that does not reveal the state, and differs between keys.
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1)
    return _with_words(generator, state)


def _with_words(generator: torch.Generator, content: bytes) -> torch.Generator:
    state = generator.get_state()
    # NumPy, because a PyTorch call on so few numbers takes as long as all of these lines, which would need five.
    words = np.frombuffer(content, dtype=np.uint32).astype(np.uint64)
    state.numpy()[_BEFORE : _BEFORE + 8 * _WORDS] = words.view(np.uint8)
    generator.set_state(state)
    return generator


@contextmanager
def global_generators(start: int | Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
    """Seeds PyTorch's global generators inside the context, so that code which draws from them can be resumed.

    Args:
        start: a seed, or the states yielded by an earlier call.
        device: device whose generator is seeded in addition to the CPU's.

    Yields:
        A list that receives the final states when the context ends.
    """
    on_gpu, final_states = device.type == "cuda", []
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        if isinstance(start, int):
            torch.default_generator.manual_seed(start)
            if on_gpu:
                with torch.cuda.device(device):  # `manual_seed` seeds the current GPU
                    torch.cuda.manual_seed(start)
        else:
            torch.set_rng_state(start[0])
            if on_gpu:
                torch.cuda.set_rng_state(start[1], device)
        yield final_states
        final_states.append(torch.get_rng_state())
        if on_gpu:
            final_states.append(torch.cuda.get_rng_state(device))


@cache
def fills_states() -> bool:
    """True if this PyTorch has the expected state layout: its draws then equal those of NumPy's Mersenne Twister."""
    content = hashlib.shake_256(b"probe").digest(4 * _WORDS)
    numpy_twister = np.random.MT19937()
    numpy_twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": np.frombuffer(content, dtype=np.uint32), "pos": _WORDS},
    }
    try:
        generator = _with_words(torch.Generator(), content)
    except (RuntimeError, ValueError):  # a state of another length
        return False
    ours = torch.empty(2 * _WORDS, dtype=torch.int32, device="cpu").random_(generator=generator)
    return bool((numpy_twister.random_raw(2 * _WORDS) & 0x7FFF_FFFF == ours.numpy()).all())
