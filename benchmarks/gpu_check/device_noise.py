"""Noise of a step: leakbench's against Opacus's and PyTorch's own, and the same numbers on the device as on a CPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from leakbench.defenses.core import from_os, seeded

from ..speed.harness import TimedCall, clock_of, interleaved
from ..speed.noise import FLOOR, STD
from ..speed.noise import WAYS as NOISE_WAYS
from .rows import CheckedFigure, CheckedRow, PartSettings

# About the parameters of dp_cnn, resnet18 and a transformer of GPT-2's size.
SIZES, SMALL_SIZES = (551_000, 11_000_000, 85_000_000), (1_000,)
_DTYPES = (torch.float32, torch.float64)
_ROUNDS = 9
_COMPARED = 1_000_003  # numbers that are drawn on the CPU too, where 85 million take seconds


def _ours(sums: Tensor) -> TimedCall:
    source = from_os()
    return lambda: source.add(sums.clone(), STD)  # in float32, as the sums of a step


_WAYS: dict[str, Callable[[Tensor], TimedCall]] = {
    "leakbench": _ours,
    "Opacus": NOISE_WAYS[FLOOR],
    "torch.randn": lambda sums: lambda: sums + torch.randn_like(sums) * STD,
}


def measure(settings: PartSettings) -> Iterator[CheckedRow]:
    """Yields a row for each size.

    Args:
        settings: of the part.
    """
    sizes = SMALL_SIZES if settings.small else SIZES
    for size in sizes:
        sums = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(settings.device)
        ways = {name: partial(way, sums) for name, way in _WAYS.items()}
        timed = interleaved(
            ways, rounds=_ROUNDS, budget=settings.seconds / (2 * len(sizes)), clock=clock_of(settings.device)
        )
        figures: dict[str, CheckedFigure] = {
            f"{way} ms": 1e3 * statistics.median(timed.seconds[way]) if way in timed.seconds else None for way in ways
        }
        differences = {str(dtype): _differences(min(size, _COMPARED), dtype, settings.device) for dtype in _DTYPES}
        wrong = [
            f"{count:,} numbers in {dtype} are not those of the CPU" for dtype, count in differences.items() if count
        ]
        remarks = [f"{way}: {failure}" for way, failure in timed.failed.items()]
        yield CheckedRow(
            name=f"{size:,} numbers",
            figures={**figures, "unlike the CPU's": sum(differences.values())},
            wrong=tuple(wrong),
            remarks=tuple(remarks),
        )


def _differences(size: int, dtype: torch.dtype, device: str) -> int:
    """Returns how many numbers of a seeded release on the device are not those on the CPU."""
    sums = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=dtype)
    on_cpu, on_device = seeded(0).add(sums.clone(), STD), seeded(0).add(sums.clone().to(device), STD)
    return int((on_cpu != on_device.cpu()).sum())
