"""DP-SGD steps of every engine of leakbench, of Opacus with hooks and with ghost clipping, and of plain SGD.

Networks are those of the papers. Every way takes whole steps on its own model: norms, clip, sum, noise, division,
update. `auto` is the default of `train`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

from . import report
from .harness import SpeedComparison, TimedCall
from .networks import Workload, parameters
from .part import ROUNDS, Options, SpeedPart, check_choices
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
    f"data, no loading. {ROUNDS} Extra memory: peak beyond what is there before the first step, in a process for each "
    "way; first steps with all preparations, and later ones."
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
    check_choices("case", cases, list(QUICK_CASES if quick else CASES))
    check_choices("way", ways, list(WAYS))


def measure(
    *, cases: Sequence[str] = (), ways: Sequence[str] = (), sweeps: bool = True, **options: Unpack[Options]
) -> dict[str, Any]:
    """Runs the comparisons, judges the targets, and runs the sweeps.

    Args:
        cases: subset of `CASES` (of `QUICK_CASES` if quick); all if empty.
        ways: subset of `WAYS`; the usual ways if empty.
        sweeps: whether cost by batch size and by dimension is measured, at each point in a third of the rounds and a
            sixth of the budget.
        options: see `Options`.

    Raises:
        ValueError: an unknown case or way.
    """
    part = SpeedPart(__name__, options)
    refuse_unknown(cases, ways, quick=part.quick)
    known, usual = QUICK_CASES if part.quick else CASES, tuple(ways) or USUAL
    fewer = {"rounds": math.ceil(part.rounds / 3), "budget": part.budget / 6, "memory": False}
    with others_warnings():
        for name in cases or known:
            _compare(part, known[name], usual)
        part.targets += TARGETS
        document = part.document(title="One DP-SGD step", method=METHOD)
        # After the document is made: comparisons of a sweep are its points, not the document's.
        document["sweeps"] = {
            key: {
                "title": title,
                "axis": axis,
                "comparisons": [report.as_dict(_compare(part, load, usual, **fewer)) for load in loads],
            }
            for key, (title, axis, loads) in (QUICK_SWEEPS if part.quick else SWEEPS).items()
            if sweeps
        }
    return document


def _compare(part: SpeedPart, load: Workload, ways: Sequence[str], **settings: Any) -> SpeedComparison:
    """Compares all ways of taking a step on a workload."""
    part.say(load.name)
    about = {"parameters": parameters(load.model()), "batch": load.batch}
    arguments = {"network": load.network, "batch": load.batch, "width": load.width}
    return part.compare(load.name, ways, arguments, peer=PEER, floor=FLOOR, about=about, **settings)
