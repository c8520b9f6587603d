"""DP-SGD step: ours by every engine, Opacus' two ways, and plain SGD, on the networks that papers train.

Every way takes whole steps on its own model: norms, clip, sum, noise, division, update. `auto` is the default of
`train`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from . import report
from .harness import SpeedComparison, TimedCall, compare
from .memory import Probe
from .networks import Workload, parameters
from .targets import SpeedTarget
from .ways import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, USUAL, WAYS, others_warnings

CASES = {
    load.name: load
    for load in (
        Workload("dp_cnn_small", 256),
        Workload("dp_cnn_small", 1024),
        Workload("dp_cnn", 256),
        # Per-example gradients of 11 million parameters: 1.4 GB for 32 examples.
        Workload("resnet18_gn", 32),
    )
}
QUICK_CASES = {load.name: load for load in (Workload("dp_cnn_small", 256), Workload("dp_cnn", 32))}
FLOOR, PEER = "sgd", "opacus-hooks"
METHOD = (
    f"Clip at {CLIP_NORM:g}, noise multiplier {NOISE_MULTIPLIER:g}, SGD at {LEARNING_RATE:g}, float32, random "
    "data, no loading. Ways run in turn, round by round, in one process; ratios are medians of the ratios "
    "within a round, with their first and last decile. Extra memory: peak beyond what is there before the "
    "first step, in a process for each way; first steps with all preparations, and later ones."
)


def _targets(case: str, *, faster: float, cost: float | None = None, memory: float | None = None) -> list[SpeedTarget]:
    targets = [SpeedTarget(case=case, way="auto", against=PEER, quantity="speed-up", limit=faster)]
    if cost is not None:
        targets.append(SpeedTarget(case=case, way="auto", against=FLOOR, quantity="time", limit=cost))
    if memory is not None:
        targets.append(SpeedTarget(case=case, way="auto", against=PEER, quantity="memory", limit=memory))
    return targets


TARGETS = (
    *_targets("dp_cnn-256", faster=2.5, cost=1.35, memory=0.5),
    *_targets("dp_cnn_small-1024", faster=4.0, cost=1.0, memory=0.6),
    *_targets("resnet18_gn-32", faster=3.0),
)

Sweep = tuple[str, str, tuple[Workload, ...]]
"""(title, axis, points)."""


def _by_batch(network: str, batches: Sequence[int]) -> Sweep:
    return network, "batch", tuple(Workload(network, batch) for batch in batches)


def _by_width(family: str, widths: Sequence[int], batch: int = 64) -> Sweep:
    return f"{family}, batch {batch}", "parameters", tuple(Workload(family, batch, width) for width in widths)


SWEEPS = {
    "batch_dp_cnn_small": _by_batch("dp_cnn_small", (16, 32, 64, 128, 256, 512, 1024)),
    "batch_dp_cnn": _by_batch("dp_cnn", (16, 32, 64, 128, 256)),
    "dimension_mlp": _by_width("mlp", (8, 32, 128, 512, 2048)),
    "dimension_cnn": _by_width("cnn", (4, 8, 16, 32, 64, 128)),
}
QUICK_SWEEPS = {
    "batch_dp_cnn_small": _by_batch("dp_cnn_small", (16, 64)),
    "dimension_mlp": _by_width("mlp", (16, 128)),
}


def build(
    *,
    network: str,
    batch: int,
    way: str,
    width: int = 0,
    device: str = "cpu",
    noise_multiplier: float = NOISE_MULTIPLIER,
) -> TimedCall:
    """Builds a way's step on a workload.

    Args:
        network: see `Workload`.
        batch: number of examples.
        way: key of `WAYS`.
        width: of a network of a family.
        device: "cpu" or "cuda".
        noise_multiplier: noise standard deviation / clip norm.
    """
    load = Workload(network, batch, width)
    inputs, labels = load.data()
    return WAYS[way](load.model().to(device).train(), inputs.to(device), labels.to(device), noise_multiplier)


def refuse_unknown(cases: Sequence[str], ways: Sequence[str], *, quick: bool) -> None:
    """Raises `ValueError` for an unknown case or way."""
    for kind, requested, known in (("case", cases, QUICK_CASES if quick else CASES), ("way", ways, WAYS)):
        for name in requested:
            if name not in known:
                raise ValueError(f"{kind} must be one of {', '.join(known)}, got '{name}'")


def measure(
    *,
    device: str = "cpu",
    rounds: int | None = None,
    quick: bool = False,
    budget: float | None = None,
    cases: Sequence[str] = (),
    ways: Sequence[str] = (),
    memory: bool | None = None,
    sweeps: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Runs the comparisons, judges the targets, and runs the sweeps.

    Args:
        device: "cpu" or "cuda".
        rounds: of each comparison, at most; 15, or 3 if quick; a sweep's points get a third of them.
        quick: small cases and few rounds, as a smoke test; its figures have no other use.
        budget: seconds for the rounds of a comparison, 90 where None; a sweep's points get a sixth.
        cases: subset of `CASES` (of `QUICK_CASES` if quick); all if empty.
        ways: subset of `WAYS`; the usual ways if empty.
        memory: whether peak memory is measured, in a process for each way of each case; unless quick where None.
        sweeps: whether cost by batch size and by dimension is measured.
        say: receives progress messages.

    Raises:
        ValueError: an unknown case or way.
    """
    refuse_unknown(cases, ways, quick=quick)
    known = QUICK_CASES if quick else CASES
    limit = rounds or (3 if quick else 15)
    seconds = 90.0 if budget is None else budget
    space = not quick if memory is None else memory
    compared = partial(_compared, ways=tuple(ways) or USUAL, device=device, say=say)
    fewer = partial(compared, rounds=math.ceil(limit / 3), budget=seconds / 6, memory=False)
    where = report.environment(device)  # read first: later the load is our own
    with others_warnings():
        comparisons = [compared(known[name], rounds=limit, budget=seconds, memory=space) for name in (cases or known)]
        swept = _swept(QUICK_SWEEPS if quick else SWEEPS, fewer) if sweeps else {}
    return {
        "benchmark": "step",
        "title": "One DP-SGD step",
        "method": METHOD,
        "environment": where,
        "settings": {"rounds": limit, "budget_seconds": seconds, "quick": quick, "memory": space},
        "comparisons": [report.as_dict(comparison) for comparison in comparisons],
        "targets": [target.judge(comparisons).as_dict() for target in TARGETS],
        "sweeps": swept,
    }


def _compared(
    load: Workload,
    *,
    ways: Sequence[str],
    device: str,
    rounds: int,
    budget: float,
    memory: bool,
    say: Callable[[str], None],
) -> SpeedComparison:
    """Compares all ways of taking a step on a workload."""
    say(f"step: {load.name}")
    about = {"parameters": parameters(load.model()), "batch": load.batch}
    arguments = {"network": load.network, "batch": load.batch, "width": load.width, "device": device}
    return compare(
        load.name,
        {way: Probe(f"{__name__}:build", {**arguments, "way": way}) for way in ways},
        peer=PEER,
        floor=FLOOR,
        about=about,
        device=device,
        rounds=rounds,
        budget=budget,
        memory=memory,
    )


def _swept(sweeps: Mapping[str, Sweep], compared: Callable[[Workload], SpeedComparison]) -> dict[str, Any]:
    """Cost by batch size and by dimension: key -> title, axis, and the comparison at each point."""
    return {
        key: {"title": title, "axis": axis, "comparisons": [report.as_dict(compared(load)) for load in loads]}
        for key, (title, axis, loads) in sweeps.items()
    }
