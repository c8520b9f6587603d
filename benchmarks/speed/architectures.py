"""DP-SGD step on every network of the catalogue, against plain SGD in the faster of its two memory formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import models
from . import report
from .harness import Ratio, SpeedComparison, TimedCall, compare
from .memory import Probe
from .targets import SpeedTarget
from .ways import NOISE_MULTIPLIER, WAYS

PLAIN = ("sgd", "sgd-channels-last")
OURS = "auto"
BATCHES = (64, 256)
LIMIT = 1.3
# A network without convolutions: plain training is products over the batch alone, and DP-SGD adds another.
LIMIT_OF_LINEAR = 2.0
_MOST_PARAMETERS = 5_000_000  # wider networks have narrower variants of the same code
_QUICK = 30_000
_LEAST = 0.02  # seconds of consecutive steps, as in a run


def names(*, quick: bool = False) -> list[str]:
    """Returns the networks that are measured."""
    return [name for name in models.names() if models.count(name) < (_QUICK if quick else _MOST_PARAMETERS)]


def refuse_unknown(only: Sequence[str], *, quick: bool) -> None:
    """Raises `ValueError` for a network that is not measured."""
    networks = names(quick=quick)
    if unknown := set(only) - set(networks):
        raise ValueError(f"case must be one of {', '.join(networks)}, got '{min(unknown)}'")


def build(*, network: str, batch: int, way: str, device: str = "cpu") -> TimedCall:
    """Builds a way's step on a network, with random data of its natural shape.

    Args:
        network: of the catalogue.
        batch: number of examples.
        way: key of `ways.WAYS`.
        device: "cpu" or "cuda".
    """
    natural, coins = models.natural(network), torch.Generator().manual_seed(0)
    # With a single logit, cross-entropy is zero for any input.
    classes = max(2, natural.classes)
    model = models.build(network, input_shape=natural.input_shape, classes=classes, seed=0)
    inputs = torch.randn(batch, *natural.input_shape, generator=coins).to(device)
    labels = torch.randint(0, classes, (batch,), generator=coins).to(device)
    return WAYS[way](model.to(device).train(), inputs, labels, NOISE_MULTIPLIER)


def measure(
    *,
    device: str = "cpu",
    rounds: int | None = None,
    quick: bool = False,
    budget: float | None = None,
    memory: bool | None = None,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Compares the steps on every network.

    Args:
        device: "cpu" or "cuda".
        rounds: of each comparison, at most; 15, or 3 if quick.
        quick: the smallest networks and few rounds.
        budget: seconds for the rounds of a comparison, 10 where None.
        memory: whether peak memory is measured, in a process for each way; False where None.
        only: names of networks; all if empty.
        say: receives progress messages.

    Raises:
        ValueError: a network is not measured.
    """
    refuse_unknown(only, quick=quick)
    limit, seconds = rounds or (3 if quick else 15), 10.0 if budget is None else budget
    where, comparisons = report.environment(device), []
    for network in only or names(quick=quick):
        for batch in BATCHES:
            name = f"{network}-{batch}"
            say(f"architectures: {name}")
            arguments = {"network": network, "batch": batch, "device": device}
            compared = compare(
                name,
                {way: Probe(f"{__name__}:build", {**arguments, "way": way}) for way in (*PLAIN, OURS)},
                peer=PLAIN[0],
                floor=PLAIN[0],
                about={"parameters": models.count(network), "batch": batch},
                device=device,
                rounds=limit,
                budget=seconds,
                memory=bool(memory),
                least=_LEAST,
            )
            comparisons.append(compared)
    targets = [_target(comparison) for comparison in comparisons]
    return {
        "benchmark": "architectures",
        "title": "A DP-SGD step on every network",
        "method": (
            "Clip at 1, noise multiplier 1, SGD, float32, random data of the natural shape, no loading. The peer is "
            "the memory format in which plain SGD is the faster on this network. Ways run in turn, round by round, in "
            f"one process, each for {1000 * _LEAST:.0f} ms of steps at least; ratios are medians of "
            "the ratios within a round, with their first and last decile."
        ),
        "environment": where,
        "settings": {"rounds": limit, "budget_seconds": seconds, "quick": quick, "memory": bool(memory)},
        "comparisons": [report.as_dict(comparison) for comparison in comparisons],
        "targets": [target.judge(comparisons).as_dict() for target in targets],
    }


def _target(comparison: SpeedComparison) -> SpeedTarget:
    """Limit on a network: ratio of our time to that of the faster plain format."""
    between = comparison.time_ratio(*PLAIN)
    # Channels-last fails on networks without convolutions.
    linear = not comparison.measurement(PLAIN[1]).seconds
    faster = PLAIN[1] if isinstance(between, Ratio) and between.median > 1 else PLAIN[0]
    limit = LIMIT_OF_LINEAR if linear else LIMIT
    return SpeedTarget(case=comparison.name, way=OURS, against=faster, quantity="time", limit=limit)
