"""Numbers that tests compute from what a run released, each larger or smaller where the canary was there.

All take the scenario, the answer of a run and, where the scenario repeats runs, that of the same training on the data
without the canary, given all that the run published.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .protocol import TrainerAnswer
from .scenarios import Scenario


def along_canary(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """The sum of all releases along the canary's direction."""
    return _steps_along(scenario, answer).sum()


def largest(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """The largest release along the canary's direction."""
    return _steps_along(scenario, answer).max()


def differences(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """The largest difference between releases along the canary's direction."""
    steps = _steps_along(scenario, answer)
    return steps.max() - steps.min()


def whole(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """The sum of all releases, whose direction is to be learned."""
    return torch.stack([one.double() for one in answer.releases]).sum(dim=0)


def size(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """The length of the sum of all releases, in logarithms."""
    return torch.linalg.vector_norm(whole(scenario, answer, again)).clamp(min=1e-30).log()


def support(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """The share of coordinates that are not zero, where the canary is less where it is not."""
    there = answer.releases[0] != 0
    inside = scenario.direction != 0
    return there[inside].double().mean() - there[~inside].double().mean()


def exact_values(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Coordinates on which a release is the clipped canary's own entry to a thousandth; eight at most.

    With the noise of the scenario a coordinate is so by chance once in a hundred thousand.
    """
    inside = scenario.direction != 0
    wanted = scenario.direction[inside].double() * scenario.task.clip_norm
    got = answer.releases[0][inside].double() * scenario.task.expected_batch
    return ((got - wanted).abs() <= 1e-3 * wanted.abs()).sum().clamp(max=8)


def low_bits(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Whether all numbers that are small beside the canary's entry are multiples of that entry's last place.

    Where noise is added in float32, a number u = v + z that is near zero had a z near -v, on the grid of numbers of
    that size, and so is on it too; without the canary u = z, and its own grid is finer. Noise on a public grid shows
    the same either way.
    """
    inside = scenario.direction != 0
    entry = scenario.direction[inside].abs().double() * scenario.task.clip_norm
    # An expected batch that is a power of two moves no bit.
    got = answer.releases[0][inside].double() * scenario.task.expected_batch
    small = (got.abs() < entry / 4) & (got != 0)
    last_place = torch.exp2(entry[small].log2().floor() - 23)
    steps = got[small] / last_place
    return torch.tensor(float(bool(small.any()) and bool((steps == steps.round()).all())))


def repeats(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Whether a run on the data without the canary, with all that was published, gives the very same release."""
    same = (
        again is not None
        and len(again.releases) == len(answer.releases)
        and all(torch.equal(one, other) for one, other in zip(answer.releases, again.releases, strict=True))
    )
    return torch.tensor(float(same))


def buffers(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """How far everything that the model keeps beside its parameters has moved."""
    before = dict(scenario.model().named_buffers())
    moved = [
        (value.double() - before[name].double()).square().sum()
        for name, value in answer.buffers.items()
        if name in before
    ]
    return torch.stack([*moved, torch.zeros((), dtype=torch.float64)]).sum().log1p()


def _steps_along(scenario: Scenario, answer: TrainerAnswer) -> Tensor:
    return torch.stack([one.double() for one in answer.releases]) @ scenario.direction.double()
