"""Scenarios: pairs of neighbouring data sets on tiny models, each with the task that a trainer gets for both.

The two sets differ in a single record. Under add/remove, the canary is present or not. Under `zero_out`, it is replaced
by a blank record without a contribution: an input of zeros has no gradient in models without biases. The noise is
chosen so that the claim's limit is far from the effect of the mistake that the scenario targets: small if contributions
are measured, large if an exact trace reveals it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from leakbench.defenses.core import keyed, seed_from

from ..plan.gradient_canaries import LinearLogit, as_records, unit_directions
from .protocol import TrainerTask

HUGE = 100.0
"""Norm of a canary's gradient over the clip norm, before clipping."""

SIDE = 8  # pixels: 64 parameters, with which a run takes two milliseconds
_LARGE = 40  # for traces that are counted over coordinates


@dataclass(frozen=True, kw_only=True, eq=False)
class NeighbouringSets:
    """Data sets, of inputs and labels, that differ in a single record.

    Attributes:
        present: the set with the canary, as its first record.
        without: the set without the canary.
        blanked: the set with a blank record in its place; None if every record contributes.
    """

    present: tuple[Tensor, Tensor]
    without: tuple[Tensor, Tensor]
    blanked: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """A pair of neighbouring data sets, the model and task of a trainer on them, and the number of runs.

    Attributes:
        name: of the scenario.
        task: task of the trainer, the same for both data sets.
        model: makes a new model, always with the same weights.
        sets: data sets with and without the canary.
        direction: of a canary's contribution to the sum of gradients, scaled to length 1 in each layer [dim]; zeros if
            the scenario's tests do not use it.
        looks: numbers of runs on either side at which the tests are evaluated; the last is the maximum.
        calibration: number of runs on either side for thresholds and directions, used for nothing else.
        may_be_refused: whether a trainer may correctly refuse to train.
        repeated: whether each run is repeated on the data without the canary, given all that was published.
    """

    name: str
    task: TrainerTask
    model: Callable[[], nn.Module]
    sets: NeighbouringSets
    direction: Float[Tensor, " dim"]
    looks: tuple[int, ...]
    calibration: int = 24
    may_be_refused: bool = False
    repeated: bool = False


def scenarios(seed: int) -> tuple[Scenario, ...]:
    """Returns all scenarios, the quickest first.

    Args:
        seed: of canaries, other records and public randomness.
    """
    makers = (_buffers, _count, _traces, _positions, _order, _layers, _steps, _participation, _canary)
    return tuple(make(seed) for make in makers)


def _generator(seed: int, name: str) -> torch.Generator:
    return keyed(seed_from("selftest", name, seed))


def _labels(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def _blank(count: int, side: int = SIDE) -> Tensor:
    return torch.zeros(count, 1, side, side)


def _ordinary(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 1, SIDE, SIDE, generator=generator)


def _linear() -> nn.Module:
    return LinearLogit(SIDE * SIDE)


def _sets(canary: Tensor, others: Tensor, label: int = 0) -> NeighbouringSets:
    """Returns the sets with the canary, without it, and with a blank in its place, before the same other records."""
    first = canary.view(1, *others.shape[1:])
    labels = _labels(len(others) + 1)
    labels[0] = label
    return NeighbouringSets(
        present=(torch.cat([first, others]), labels),
        without=(others, labels[1:]),
        blanked=(torch.cat([torch.zeros_like(first), others]), labels),
    )


def _random_canary(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns the input of a canary along a random direction, and the direction of its gradient."""
    direction = unit_directions("random", 1, SIDE * SIDE, generator)
    return as_records(direction, HUGE)[0], -direction[0]


def _canary(seed: int) -> Scenario:
    generator = _generator(seed, "canary")
    canary, direction = _random_canary(generator)
    sets = _sets(canary, _ordinary(3, generator))
    task = TrainerTask(noise_multiplier=0.5, seed=seed)
    return Scenario(
        name="canary",
        task=task,
        model=_linear,
        sets=sets,
        direction=direction,
        looks=(64, 192, 640),
    )


def _layers(seed: int) -> Scenario:
    """Four layers whose gradients all far exceed the clip norm."""
    generator = _generator(seed, "layers")
    widths = (SIDE * SIDE, 16, 16, 16, 2)
    weights = [torch.randn(b, a, generator=generator) * math.sqrt(2 / a) for a, b in pairwise(widths)]

    def model() -> nn.Module:
        layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
        with torch.no_grad():
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight.copy_(weight)
        hidden = [part for layer in layers[:-1] for part in (layer, nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, layers[-1])

    canary = torch.randn(SIDE * SIDE, generator=generator) * HUGE
    image = canary.view(1, 1, SIDE, SIDE)
    network = model()
    label = network(image).argmin(dim=1)  # a wrong class: a loss that is nearly zero has no gradient
    parameters = tuple(network.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(network(image), label), parameters)
    direction = torch.cat([(g / torch.linalg.vector_norm(g)).flatten() for g in gradients])
    return Scenario(
        name="layers",
        task=TrainerTask(noise_multiplier=0.5, seed=seed),
        model=model,
        sets=_sets(canary, _ordinary(3, generator), int(label)),
        direction=direction,
        looks=(64, 192),
    )


def _traces(seed: int) -> Scenario:
    """A canary of equal entries on some coordinates, among blanks, under large noise: exact values are detected."""
    generator = _generator(seed, "traces")
    size = _LARGE * _LARGE
    chosen = torch.zeros(size)
    # Entries of 1 / sqrt(1200), well above a power of two: see `statistics.low_bits`.
    chosen[torch.randperm(size, generator=generator)[: 3 * size // 4]] = 1.0
    direction = chosen / torch.linalg.vector_norm(chosen)
    sets = _sets(as_records(direction.unsqueeze(0), HUGE)[0], _blank(3, _LARGE))
    return Scenario(
        name="traces",
        task=TrainerTask(noise_multiplier=2.0, seed=seed),
        model=lambda: LinearLogit(size),
        sets=sets,
        direction=-direction,
        looks=(32, 96),
        repeated=True,
    )


class GatedPositions(nn.Module):
    """A linear layer at every position, gated by the record; two classes, zero weights, no bias.

    The first channel of an input holds values and the second gates, a position a row. The logit, beside a constant zero
    logit, is the sum over positions of <gates, weight @ values>. The gradient of a record of class 0 is -1/2 times the
    sum over positions of the outer products of gates and values, so its terms may be far longer than their sum.
    """

    def __init__(self, width: int) -> None:
        """Takes the number of values of a position, and of its gates."""
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns two logits per record."""
        values, gates = inputs.unbind(dim=1)
        logit = (self.linear(values) * gates).sum(dim=(1, 2)).unsqueeze(1)
        return torch.cat([logit, torch.zeros_like(logit)], dim=1)


def cancelling_record(generator: torch.Generator, norm: float) -> tuple[Tensor, Tensor]:
    """Returns a record of `GatedPositions` whose positions cancel, and the direction of its gradient.

    Its lower half has the values of the upper half, and the opposite gates, larger by a fraction f = 2**-13. The
    gradient is f times the sum of the upper half's terms, exactly in float32. The squared norm by inner products
    between positions is a large number times 1 - 2 (1 + f) + (1 + f)**2 = f**2. In float32 (1 + f)**2 is 1 + 2f, and
    the sum is 0, in every order of additions.

    Args:
        generator: of the signs of values and gates.
        norm: smallest norm of the gradient; powers of two are exact, so it is at most four times as long.

    Returns:
        The record [2, SIDE, SIDE], and the direction [SIDE * SIDE], of length 1.
    """
    values, gates = (torch.randint(0, 2, (SIDE,), generator=generator) * 2.0 - 1 for _ in range(2))
    larger = 2.0**-13
    # Half the positions, each with a term of -1/2 times an outer product of length SIDE, cancel up to that fraction.
    length = SIDE / 2 * SIDE / 2 * larger
    scale = 2.0 ** math.ceil(math.log2(norm / length) / 2)
    upper = torch.stack([values, gates]).unsqueeze(1).expand(-1, SIDE // 2, -1) * scale
    lower = upper * torch.tensor([1.0, -(1 + larger)]).view(2, 1, 1)
    return torch.cat([upper, lower], dim=1), torch.outer(gates, values).flatten() / SIDE


def _positions(seed: int) -> Scenario:
    """A record whose positions cancel: its gradient is short beside its terms, and long beside the clip norm."""
    generator = _generator(seed, "positions")
    record, direction = cancelling_record(generator, HUGE)
    others = torch.randn(3, 2, SIDE, SIDE, generator=generator)
    return Scenario(
        name="positions",
        task=TrainerTask(noise_multiplier=2.0, seed=seed),
        model=lambda: GatedPositions(SIDE),
        sets=_sets(record, others),
        direction=direction,
        looks=(32, 96),
    )


def _count(seed: int) -> Scenario:
    """A single blank, and two of them: only the number of records changes."""
    return Scenario(
        name="count",
        task=TrainerTask(noise_multiplier=2.0, expected_batch=1.0, seed=seed),
        model=_linear,
        sets=NeighbouringSets(present=(_blank(2), _labels(2)), without=(_blank(1), _labels(1))),
        direction=torch.zeros(SIDE * SIDE),
        looks=(32, 96),
    )


def _steps(seed: int) -> Scenario:
    """Two steps, each of which the canary may join by a fair coin; the model hardly moves."""
    generator = _generator(seed, "steps")
    canary, direction = _random_canary(generator)
    sets = _sets(canary, _blank(3))
    return Scenario(
        name="steps",
        task=TrainerTask(noise_multiplier=2.0, sample_rate=0.5, steps=2, lr=1e-3, expected_batch=2.0, seed=seed),
        model=_linear,
        sets=sets,
        direction=direction,
        looks=(64, 160),
    )


def _participation(seed: int) -> Scenario:
    """An epoch of four steps with little noise: participation is visible, and under sampling may never happen."""
    generator = _generator(seed, "participation")
    canary, direction = _random_canary(generator)
    sets = _sets(canary, _blank(7))
    return Scenario(
        name="participation",
        task=TrainerTask(noise_multiplier=0.2, sample_rate=0.25, steps=4, lr=1e-3, expected_batch=2.0, seed=seed),
        model=_linear,
        sets=sets,
        direction=direction,
        looks=(64, 192),
    )


def _order(seed: int) -> Scenario:
    """An additional image in front of others, which shifts their positions."""
    generator = _generator(seed, "order")
    images = _ordinary(13, generator) * 4
    return Scenario(
        name="order",
        task=TrainerTask(noise_multiplier=1.0, seed=seed),
        model=_linear,
        sets=NeighbouringSets(present=(images, _labels(13)), without=(images[1:], _labels(12))),
        direction=torch.zeros(SIDE * SIDE),
        looks=(32, 96),
        calibration=32,
    )


def _buffers(seed: int) -> Scenario:
    """A model that keeps statistics of its inputs in buffers."""
    generator = _generator(seed, "buffers")
    size = SIDE * SIDE

    def model() -> nn.Module:
        network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size), nn.Linear(size, 2, bias=False))
        nn.init.zeros_(network[2].weight)  # pyright: ignore[reportArgumentType] -- a Linear's
        return network

    canary = torch.randn(size, generator=generator) * HUGE
    sets = _sets(canary, _ordinary(3, generator))
    return Scenario(
        name="buffers",
        task=TrainerTask(noise_multiplier=2.0, seed=seed),
        model=model,
        sets=replace(sets, blanked=None),  # after standardisation, zeros are not blank
        direction=torch.zeros(4 * size),
        looks=(32, 96),
        may_be_refused=True,
    )
