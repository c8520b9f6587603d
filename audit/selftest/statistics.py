"""Test statistics of a run's releases, which shift if the canary was in the data.

All take the scenario, the answer of a run and, in scenarios that repeat runs, the answer of the same training on the
data without the canary, given all that the run published.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .protocol import TrainerAnswer
from .scenarios import Scenario


def along_canary(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns the sum of all releases along the canary's direction."""
    return _steps_along(scenario, answer).sum()


def largest(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns the largest release along the canary's direction."""
    return _steps_along(scenario, answer).max()


def differences(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns the largest difference between releases along the canary's direction."""
    steps = _steps_along(scenario, answer)
    return steps.max() - steps.min()


def sum_of_releases(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns the sum of all releases, whose direction is learned on calibration runs."""
    return torch.stack([release.double() for release in answer.releases]).sum(dim=0)


def size(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns the log norm of the sum of all releases."""
    return torch.linalg.vector_norm(sum_of_releases(scenario, answer, again)).clamp(min=1e-30).log()


def support(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns the fraction of nonzero coordinates in the canary's support, minus the fraction outside it."""
    nonzero = answer.releases[0] != 0
    inside = scenario.direction != 0
    return nonzero[inside].double().mean() - nonzero[~inside].double().mean()


def exact_values(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns the number of coordinates, at most eight, at which a release equals the clipped canary to a thousandth.

    With the noise of the scenario a coordinate does so by chance once in a hundred thousand.
    """
    inside = scenario.direction != 0
    expected = scenario.direction[inside].double() * scenario.task.clip_norm
    released = answer.releases[0][inside].double() * scenario.task.expected_batch
    return ((released - expected).abs() <= 1e-3 * expected.abs()).sum().clamp(max=8)


def low_bits(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns 1 if all numbers much smaller than the canary's entry are multiples of that entry's last place.

    Let noise z be added in float32 to an entry v of the canary. If u = v + z is near zero, then z is near -v, and both
    are multiples of the last place of numbers of that size, so u is one, too. Without the canary u = z, whose last
    place is finer. Noise on a public grid gives the same numbers with and without the canary.
    """
    inside = scenario.direction != 0
    entry = scenario.direction[inside].abs().double() * scenario.task.clip_norm
    # An expected batch that is a power of two changes no bit of the significand.
    released = answer.releases[0][inside].double() * scenario.task.expected_batch
    small = (released.abs() < entry / 4) & (released != 0)
    last_place = torch.exp2(entry[small].log2().floor() - 23)
    steps = released[small] / last_place
    return torch.tensor(float(bool(small.any()) and bool((steps == steps.round()).all())))


def repeats(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns 1 if a run on the data without the canary, given all that was published, has exactly the same release."""
    same = (
        again is not None
        and len(again.releases) == len(answer.releases)
        and all(
            torch.equal(release, repetition)
            for release, repetition in zip(answer.releases, again.releases, strict=True)
        )
    )
    return torch.tensor(float(same))


def buffers(scenario: Scenario, answer: TrainerAnswer, again: TrainerAnswer | None) -> Tensor:
    """Returns log(1 + squared distance by which the run moved the model's buffers)."""
    before = dict(scenario.model().named_buffers())
    moved = [
        (value.double() - before[name].double()).square().sum()
        for name, value in answer.buffers.items()
        if name in before
    ]
    return torch.stack([*moved, torch.zeros((), dtype=torch.float64)]).sum().log1p()


def _steps_along(scenario: Scenario, answer: TrainerAnswer) -> Tensor:
    return torch.stack([release.double() for release in answer.releases]) @ scenario.direction.double()
