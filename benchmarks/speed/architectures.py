"""DP-SGD steps on networks of fewer than 5 million parameters, against plain SGD in its faster memory format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Unpack

import torch
from torch import nn

from .. import models
from .harness import Ratio, SpeedComparison, TimedCall
from .part import ROUNDS, Options, SpeedPart, check_choices
from .targets import SpeedTarget
from .ways import NOISE_MULTIPLIER, WAYS, has_convolutions

PLAIN = ("sgd", "sgd-channels-last")
OURS = "auto"
BATCHES = (64, 256)
LIMIT = 1.3
# Without convolutions a plain step is a few matrix products, to which DP-SGD adds a further one of the same size.
LIMIT_OF_LINEAR = 2.0
_MOST_PARAMETERS = 5_000_000  # larger networks use the same layers as smaller variants that are measured
_QUICK = 30_000
_LEAST = 0.02  # seconds of consecutive steps, as in a run


def names(*, quick: bool = False) -> list[str]:
    """Returns the networks that are measured."""
    return [name for name in models.names() if models.count(name) < (_QUICK if quick else _MOST_PARAMETERS)]


def build(*, network: str, batch: int, way: str, device: str = "cpu") -> TimedCall:
    """Builds a way's step on a network, with random data of its natural shape.

    Args:
        network: of the catalogue.
        batch: number of examples.
        way: key of `ways.WAYS`.
        device: "cpu" or "cuda".
    """
    natural, generator = models.natural(network), torch.Generator().manual_seed(0)
    model, classes = _model(network)
    inputs = torch.randn(batch, *natural.input_shape, generator=generator).to(device)
    labels = torch.randint(0, classes, (batch,), generator=generator).to(device)
    return WAYS[way](model.to(device).train(), inputs, labels, NOISE_MULTIPLIER)


def _model(network: str) -> tuple[nn.Module, int]:
    """Returns a network of the catalogue in its natural shape, and its number of classes."""
    natural = models.natural(network)
    # With a single logit, cross-entropy is zero for any input.
    classes = max(2, natural.classes)
    return models.build(network, input_shape=natural.input_shape, classes=classes, seed=0), classes


def measure(*, only: Sequence[str] = (), **options: Unpack[Options]) -> dict[str, Any]:
    """Compares the steps on every network.

    Args:
        only: names of networks; all if empty, the smallest if quick.
        options: see `Options`; memory is not measured where None.

    Raises:
        ValueError: a network is not measured.
    """
    part = SpeedPart(__name__, options, budget=10.0, memory=False)
    known = names(quick=part.quick)
    check_choices("case", only, known)
    for network, batch in product(only or known, BATCHES):
        name = f"{network}-{batch}"
        part.say(name)
        about = {"parameters": models.count(network), "batch": batch}
        ways, arguments = (*PLAIN, OURS), {"network": network, "batch": batch}
        compared = part.compare(name, ways, arguments, peer=PLAIN[0], floor=PLAIN[0], about=about, least=_LEAST)
        part.targets.append(_target(compared, linear=not has_convolutions(_model(network)[0])))
    return part.document(
        title="A DP-SGD step on every network",
        method=(
            "Clip at 1, noise multiplier 1, SGD, float32, random data of the natural shape, no loading. The peer is "
            "the memory format in which plain SGD is the faster on this network. Each way runs for "
            f"{1000 * _LEAST:.0f} ms of steps at least in a round. {ROUNDS}"
        ),
    )


def _target(comparison: SpeedComparison, *, linear: bool) -> SpeedTarget:
    """Limit on a network: ratio of our time to that of the faster plain format.

    Args:
        comparison: of the network.
        linear: whether the network has no convolutions. Its layers say so: channels-last may fail for other reasons.
    """
    between = comparison.time_ratio(*PLAIN)
    faster = PLAIN[1] if isinstance(between, Ratio) and between.median > 1 else PLAIN[0]
    limit = LIMIT_OF_LINEAR if linear else LIMIT
    return SpeedTarget(case=comparison.name, way=OURS, against=faster, quantity="time", limit=limit)
