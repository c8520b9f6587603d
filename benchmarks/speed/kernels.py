"""Ablation of compiled kernels: time of a DP-SGD step without a kernel, over that of the step with all kernels.

    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python -m leakbench.benchmarks.speed.kernels dp_cnn-64 resnet20-64 --masked

Without a kernel, a step takes the fallback in PyTorch that also serves other devices. Ways take turns in one process,
round by round, and are timed by CPU time; "same" has all kernels, so its deviation from 1 is measurement noise. The
kernels' README has a table, and the rule by which kernels are kept.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch

from leakbench.defenses.core import Block, Coordinates, Engine, Everything, StepPlan, clip, seeded
from leakbench.defenses.core.gradients.layerwise import cost
from leakbench.defenses.core.gradients.layerwise.layers import convolution
from leakbench.defenses.core.kernels.catalog import KERNELS
from leakbench.defenses.core.kernels.normals import Normals
from leakbench.defenses.core.kernels.weighted_rows import SumTable
from leakbench.malloc import keep_freed_memory

from .. import models

Replacement = tuple[Any, str, Any]
"""(owner, attribute, value that replaces it in a step without a kernel)."""
_NEVER = staticmethod(lambda *_, **__: False)


def _torch_noise(self: Normals, values: torch.Tensor, key: bytes, draw: int, std: float, unit: float | None) -> None:
    noisy = values.double() + torch.randn(len(values), dtype=torch.float64) * std
    values.copy_(noisy if unit is None else noisy.div_(unit).round_().mul_(unit))


# Callers take PyTorch's way without a kernel that is `usable`.
_OFF = {name: [(type(kernels[0]), "usable", _NEVER)] for name, kernels in KERNELS.items() if "normals" not in name}
WITHOUT: dict[str, list[Replacement]] = {
    "same": [],
    **_OFF,
    "weighted_rows: outer": [(SumTable, "outer", _NEVER)],
    "winograd": [(cost, "_MOST_FACTORS", -1)],
    "normals": [(Normals, "__call__", _torch_noise)],  # another generator, because PyTorch cannot draw its numbers
    "all": [*chain(*_OFF.values())],
}


def _step(network: str, batch: int, masked: bool) -> Callable[[], None]:
    natural = models.natural(network)
    classes = max(2, natural.classes)
    model = models.build(network, input_shape=natural.input_shape, classes=classes, **natural.settings)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, *natural.input_shape, generator=generator)
    labels = torch.randint(0, classes, (batch,), generator=generator)
    engine = Engine(model, noise=seeded(0))
    dim = engine.layout.dim
    codec = Coordinates(torch.randperm(dim, generator=generator)[: dim // 2], dim=dim) if masked else Everything(dim)
    plan = StepPlan(Block(codec=codec, bound=clip(1.0))).at(1.0)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def step() -> None:
        out = engine.run(plan, inputs, labels)
        for parameter, gradient in zip(parameters, engine.layout.unflatten(out.total / batch).values(), strict=True):
            parameter.grad = gradient
        optimizer.step()

    return step


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Replaces attributes, and forgets the choices of the cost model, some of which depend on them."""
    with ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(patch.object(*replacement))
        _forget()
        yield
    _forget()


def _forget() -> None:
    for cached in (convolution._planned, cost.cheapest, cost.made_by_kernel, cost.summation):
        cached.cache_clear()


def measure(network: str, batch: int, *, masked: bool, rounds: int, seconds: float, only: set[str]) -> dict[str, Any]:
    """Times a step on a network with all kernels, and without each.

    Args:
        network: in `models.names()`.
        batch: number of examples.
        masked: True for a plan that releases a random half of the coordinates.
        rounds: in each of which every way takes a few steps.
        seconds: approximate duration of a way's turn, at least one step.
        only: keys of `WITHOUT`.
    """
    step = _step(network, batch, masked)
    times: dict[str, list[float]] = {way: [] for way in ("with", *(way for way in WITHOUT if way in only))}
    for way in times:  # compiled and tried
        with replaced(WITHOUT.get(way, ())):
            step()
    step()
    start = time.process_time()
    step()
    calls = max(1, round(seconds / (time.process_time() - start)))
    order = list(times)
    for _ in range(rounds):
        random.shuffle(order)
        for way in order:
            with replaced(WITHOUT.get(way, ())):
                step()  # caches belong to the previous way
                durations = []
                for _ in range(calls):
                    start = time.process_time()
                    step()
                    durations.append(time.process_time() - start)
            times[way].append(min(durations))
    base = times.pop("with")
    ratios = {way: [a / b for a, b in zip(each, base, strict=True)] for way, each in times.items()}
    return {
        "milliseconds": 1e3 * min(base),
        **{way: (min(each) / min(base), statistics.median(ratios[way])) for way, each in times.items()},
    }


def main() -> None:
    """Prints, for each network, the ratios of minima and the medians of ratios within a round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+", help="NETWORK-BATCH")
    parser.add_argument("--masked", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--without", nargs="*", default=list(WITHOUT))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a run
    for case in options.cases:
        network, _, batch = case.rpartition("-")
        result = measure(
            network,
            int(batch),
            masked=options.masked,
            rounds=options.rounds,
            seconds=options.seconds,
            only=set(options.without),
        )
        print(f"{case}{' masked' if options.masked else ''}: {result.pop('milliseconds'):.2f} ms", flush=True)
        for way, (least, middle) in result.items():
            print(f"  without {way:34s} {least:.3f} {middle:.3f}", flush=True)


if __name__ == "__main__":
    main()
