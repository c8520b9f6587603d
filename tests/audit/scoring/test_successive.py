"""The cosine of successive updates: by hand, under noise, with gaps, and as a run is trained, resumed or taken back."""

import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

from leakbench.audit.scoring.successive import SuccessiveCosines, block_interval, score_successive
from leakbench.defenses.core import Sampling
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dp_zo import dp_zo
from leakbench.defenses.dpsur import dpsur
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.sgd import sgd

from ...defenses import duties
from ...parameters import subtests


def scored(updates: torch.Tensor):
    meter = SuccessiveCosines(len(updates))
    for step, update in enumerate(updates):
        meter.add(step, update)
    return meter.score()


def cosines_of(updates: torch.Tensor) -> np.ndarray:
    return torch.cosine_similarity(updates[1:].double(), updates[:-1].double()).numpy()


def test_three_pairs_worked_out_by_hand():
    found = scored(torch.tensor([[1.0, 0.0], [3.0, 3.0], [0.0, 2.0], [-5.0, 0.0]]))
    root = math.sqrt(0.5)
    assert found.value == pytest.approx(2 * root / 3) and (found.n, found.detail["pairs"]) == (3, 3)
    # Two blocks, of the first two pairs and of the third, whose means are root and 0: s / sqrt(2) = root / 2.
    half = stats.t.ppf(0.975, 1) * root / 2
    assert half > 1 and (found.low, found.high) == (-1.0, 1.0)
    assert block_interval(np.array([root, root, 0.0]), 2) == pytest.approx((2 * root / 3 - half, 2 * root / 3 + half))
    assert found.detail["first_tenth"] == pytest.approx(root) and found.detail["last_tenth"] == pytest.approx(0)


@subtests(("sign", "cosine"), [(1.0, 1.0), (-1.0, -1.0)])
def test_one_direction_gives_1_and_turning_round_at_each_step_gives_minus_1(sign, cosine):
    lengths = torch.rand(60, 1, generator=torch.Generator().manual_seed(0)) + 0.1
    found = scored(lengths * sign ** torch.arange(60)[:, None] * torch.tensor([[3.0, -4.0, 1.0]]))
    ends = (found.value, found.low, found.high, found.detail["first_tenth"], found.detail["last_tenth"])
    assert ends == pytest.approx((cosine,) * 5, abs=1e-6)
    assert abs(found.value or 0) <= 1


@pytest.mark.long
def test_independent_noise_has_cosines_about_0_and_intervals_that_cover_it_as_often_as_they_say():
    runs, steps, dim = 1000, 201, 20
    noise = np.random.default_rng(0).standard_normal((runs, steps, dim))
    noise /= np.linalg.norm(noise, axis=2, keepdims=True)
    cosines = (noise[:, 1:] * noise[:, :-1]).sum(axis=2)
    found = [score_successive(row, np.ones(steps)) for row in cosines]
    low, high = (np.array([getattr(metric, end) for metric in found]) for end in ("low", "high"))
    # Five standard deviations of a proportion of 0.95 below it; intervals of two thirds the length cover 0.82.
    assert np.mean((low <= 0) & (high >= 0)) > 0.95 - 5 * math.sqrt(0.95 * 0.05 / runs)
    middle, half = (low + high) / 2, (high - low) / 2
    assert np.mean(abs(middle) <= half * 2 / 3) < 0.88
    # A cosine has variance 1 / dim, and 20 blocks cost a tenth of the length that 200 pairs would give.
    assert np.mean(half) == pytest.approx(stats.t.ppf(0.975, 19) / math.sqrt(dim * (steps - 1)), rel=0.05)


def test_intervals_cover_where_cosines_depend_on_those_before_and_an_interval_over_single_steps_would_not():
    runs, steps, past = 1000, 400, 0.6
    shocks = np.random.default_rng(1).standard_normal((steps, runs)) * 0.05
    values = np.zeros((steps, runs))
    values[0] = shocks[0] / math.sqrt(1 - past**2)
    for step in range(1, steps):
        values[step] = past * values[step - 1] + shocks[step]
    found = [score_successive(row, np.ones(steps + 1)) for row in values.T.copy()]
    covered = np.mean([(metric.low or 0.0) <= 0 <= (metric.high or 0.0) for metric in found])
    naive = abs(values.mean(axis=0)) <= stats.t.ppf(0.975, steps - 1) * values.std(axis=0, ddof=1) / math.sqrt(steps)
    assert covered > 0.89 and naive.mean() < 0.75


def test_what_falls_in_training_shows_in_the_tenths():
    found = score_successive(np.linspace(0.9, 0.1, 99), np.ones(100))
    assert found.value == pytest.approx(0.5) and found.detail["blocks"] == 9
    step = 0.8 / 98
    assert found.detail["first_tenth"] == pytest.approx(0.9 - 4.5 * step)
    assert found.detail["last_tenth"] == pytest.approx(0.1 + 4.5 * step)


def test_a_zero_update_leaves_out_the_pairs_on_both_sides():
    found = scored(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 3.0], [0.0, 1.0]]))
    assert (found.value, found.n, found.detail["left_out"], found.detail["zero_updates"]) == (1.0, 2, 2, 1)
    assert found.detail["first_tenth"] == 1.0


@subtests(
    ("updates", "reason"),
    [
        ([[1.0, 0.0]], "fewer than two pairs of successive updates that are not zero: 0 in 1 steps, 0 of them zero"),
        ([[1.0], [2.0]], "fewer than two pairs .*: 1 in 2 steps, 0 of them zero"),
        ([[1.0], [0.0], [2.0], [0.0]], "fewer than two pairs .*: 0 in 4 steps, 2 of them zero"),
        ([[1.0], [1.0], [1.0], [math.nan]], "the update of 1 of 4 steps is not finite: the model diverged"),
        ([[1.0], [math.inf], [1.0], [math.nan]], "the update of 2 of 4 steps is not finite"),
    ],
)
def test_without_two_pairs_or_finite_updates_there_is_no_value_but_a_reason(updates, reason):
    found = scored(torch.tensor(updates))
    assert found.value is None and re.match(reason, found.reason or "")


@pytest.mark.parametrize("after", [1, 3, duties.STEPS])
def test_a_resumed_run_has_the_same_digits(tmp_path, after):
    whole, first, second = (SuccessiveCosines(duties.STEPS) for _ in range(3))
    duties.trained(dp_sgd(noise_multiplier=1.0), meter=whole)
    with pytest.raises(KeyboardInterrupt):
        duties.trained(
            dp_sgd(noise_multiplier=1.0), checkpoint=tmp_path / "c", progress=duties._Stop(after), meter=first
        )
    duties.trained(dp_sgd(noise_multiplier=1.0), checkpoint=tmp_path / "c", meter=second)
    assert second.score() == whole.score() and whole.score().n == duties.STEPS - 1


def test_a_checkpoint_of_a_run_without_the_measurement_is_none_of_one_with_it(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        duties.trained(sgd(), checkpoint=tmp_path / "c", progress=duties._Stop(2))
    with pytest.raises(ValueError, match="belongs to another run"):
        duties.trained(sgd(), checkpoint=tmp_path / "c", meter=SuccessiveCosines(duties.STEPS))


def test_a_run_that_begins_anew_forgets_the_one_before():
    meter, fresh = SuccessiveCosines(duties.STEPS), SuccessiveCosines(duties.STEPS)
    duties.trained(sgd(), meter=meter)
    for one in (meter, fresh):
        duties.trained(dp_sgd(noise_multiplier=1.0), meter=one)
    assert meter.score() == fresh.score()


@subtests(
    "defense",
    [
        sgd(),
        dp_sgd(noise_multiplier=1.0),
        random_sparsification(clip_norm=0.5, final_sparsity=0.9, noise_multiplier=1.0),
        pcdp(clip_norm=0.5, rank=2, noise_multiplier=1.0),
        dp_zo(noise_multiplier=1.0),
    ],
)
def test_it_is_the_cosine_of_how_the_parameters_moved(defense):
    """Without momentum a step moves the parameters by its update, whatever space that was released in."""
    meter = SuccessiveCosines(duties.STEPS)
    run = duties.trained(defense, momentum=0.0, meter=meter)
    points = [step.parameters for step in run.transcript.steps] + [duties.parameters(run)]
    moved = torch.stack(points).double().diff(dim=0)
    found = meter.score()
    assert found.n == duties.STEPS - 1 and found.value == pytest.approx(cosines_of(moved).mean(), abs=1e-4)


def test_steps_without_examples_have_no_direction_where_there_is_no_noise():
    meter = SuccessiveCosines(3)
    duties.trained(sgd(), sampling=Sampling("poisson", 1e-4), steps=3, meter=meter)
    assert "0 in 3 steps, 3 of them zero" in str(meter.score().reason)


def test_a_step_that_is_taken_back_has_released_its_update_all_the_same():
    meter = SuccessiveCosines(duties.STEPS)
    run = duties.trained(dpsur(noise_multiplier=1.0), momentum=0.0, meter=meter)
    points = [step.parameters for step in run.transcript.steps] + [duties.parameters(run)]
    stood = torch.stack(points).diff(dim=0).any(dim=1)
    assert not stood.all(), "no step was taken back"
    assert meter.score().detail["left_out"] == 0 and meter.score().n == duties.STEPS - 1
