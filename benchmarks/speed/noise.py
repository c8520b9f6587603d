"""Cost of the noise of a step: each of our sources against Opacus', from a sum in float32 to a release in float32.

Opacus adds normals in float32, or, in its secure mode, half the sum of four normals. Ours are rounded to a public unit:
`os` adds normals in float64, `secure` discrete Gaussians to whole numbers. Further costs of `secure`, sums without
rounding, are not included: for a whole step use `--way secure` of the step benchmark.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from leakbench.defenses.core.randomness.keys import filled
from leakbench.defenses.core.randomness.noise import from_os, secure

from .part import ROUNDS, Options, SpeedPart
from .ways import opacus_module

# Approximate parameters of the networks in the step benchmark.
SIZES = (26_000, 551_000, 11_000_000)
QUICK_SIZES = SIZES[:2]
STD = 1.0

Draw = Callable[[], Tensor]
"""Single release: float32 [size]."""


def _os(sums: Tensor) -> Draw:
    source = from_os()
    return lambda: source.add(sums.double(), STD).to(sums.dtype)


def _secure(sums: Tensor) -> Draw:
    source = secure()
    whole = (sums.double() / source.unit(STD)).long()  # exact sums come as integers
    return lambda: source.add(whole, STD).to(sums.dtype)


def _float32(sums: Tensor) -> Draw:
    generator = filled(os.urandom(64))
    return lambda: sums + torch.empty(sums.shape, dtype=sums.dtype).normal_(0, STD, generator=generator).to(sums.device)


def _opacus(sums: Tensor, *, secure_mode: bool) -> Draw:
    # Private, because Opacus has no public function for the noise alone.
    draw = opacus_module("optimizers.optimizer")._generate_noise
    return lambda: sums + draw(std=STD, reference=sums, secure_mode=secure_mode)


PEER = "opacus secure mode"
FLOOR = "opacus"
WAYS: dict[str, Callable[[Tensor], Draw]] = {
    "os": _os,
    "secure": _secure,
    "float32, key of the OS": _float32,
    FLOOR: lambda sums: _opacus(sums, secure_mode=False),
    PEER: lambda sums: _opacus(sums, secure_mode=True),
}


def build(*, size: int, way: str, device: str = "cpu") -> Draw:
    """Builds a way on a random sum.

    Args:
        size: of the sum.
        way: in `WAYS`.
        device: "cpu" or "cuda".
    """
    return WAYS[way](torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device))


def measure(*, sizes: Sequence[int] = (), **options: Unpack[Options]) -> dict[str, Any]:
    """Compares all ways at every size.

    Args:
        sizes: numbers in a release; the usual sizes if empty, the two smallest if quick.
        options: see `Options`.
    """
    part = SpeedPart(__name__, options)
    for size in sizes or (QUICK_SIZES if part.quick else SIZES):
        part.say(f"{size:,}")
        part.compare(f"noise-{size}", WAYS, {"size": size}, peer=PEER, floor=FLOOR, about={"parameters": size})
    return part.document(
        title="The noise of one step",
        method=(
            "From a sum in float32 to a noisy one in float32. `float32, key of the OS` is what this library's `os` "
            "drew while it was not rounded to a unit, on one thread: what Opacus draws, under a longer key. "
            f"{ROUNDS} Extra memory: peak beyond the sum, in a process for each way."
        ),
        settings={"std": STD},
    )
