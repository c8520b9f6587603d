"""A shift between members and non-members is found without the model, and exchangeable halves are left alone."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from threadpoolctl import threadpool_limits

from leakbench.attacks.core import Examples
from leakbench.audit.scoring.membership import auc
from leakbench.audit.scoring.shift import LEAST, LEVEL, _of_hard_labels, features_of, of_labels, shift_between
from leakbench.benchmarks import data

from ...parameters import subtests


def examples(inputs, labels=None):
    count = len(inputs)
    return Examples(
        ids=torch.arange(count),
        inputs=inputs,
        labels=torch.zeros(count, dtype=torch.long) if labels is None else labels,
    )


@pytest.fixture(scope="module")
def halves():
    """The pools of digits, which were drawn at random."""
    splits = data.load("digits", seed=0)
    return examples(splits.private.inputs, splits.private.labels), examples(
        splits.non_member.inputs, splits.non_member.labels
    )


def test_exchangeable_halves_are_not_flagged(halves):
    found = shift_between(*halves)
    assert not found.found and found.p_value is not None and found.p_value > 0.05
    assert found.auc == pytest.approx(0.5, abs=0.05)
    assert found.detectable is not None and 0.55 < found.detectable < 0.6


@pytest.mark.long
@subtests(
    "shifted",
    [
        lambda x, y, draw: (x * 0.97, y),  # as of another scanner
        lambda x, y, draw: ((x * 255).round() / 255, y),  # as of another file format
        lambda x, y, draw: (torch.roll(x, 1, dims=-1), y),  # cropped otherwise
        lambda x, y, draw: (x, torch.where(torch.rand(len(y), generator=draw) < 0.3, torch.ones_like(y), y)),
        lambda x, y, draw: (x[y < 8], y[y < 8]),
    ],
)
def test_a_test_set_that_was_collected_apart_is_flagged(halves, shifted):
    members, others = halves
    inputs, labels = shifted(others.inputs, others.labels, torch.Generator().manual_seed(0))
    found = shift_between(members, examples(inputs, labels))
    assert found.found and found.auc is not None and found.auc > 0.55


@pytest.mark.long
def test_a_score_that_never_saw_a_model_looks_like_a_strong_attack_and_the_flag_says_why(halves):
    members, others = halves
    dimmer = examples(others.inputs * 0.9, others.labels)
    # A "membership score" of the input alone: how bright the brightest point is.
    fooled = auc(*(np.sort(part.inputs.flatten(1).amax(1).double().numpy()) for part in (members, dimmer)))
    assert fooled.low is not None and fooled.low > 0.9
    assert shift_between(members, dimmer).found


@pytest.mark.long
def test_the_p_value_errs_with_its_level():
    draw = torch.Generator().manual_seed(3)
    values = []
    for seed in range(40):
        x, y = torch.randn(160, 1, 3, 3, generator=draw), torch.randint(0, 4, (160,), generator=draw)
        values.append(shift_between(examples(x[:80], y[:80]), examples(x[80:], y[80:]), seed=seed).p_value)
    # Of 40 at 10 %, 4 are expected and more than 11 have a chance below one in a thousand.
    assert sum(value < 0.1 for value in values) <= 11 and sum(value < LEVEL for value in values) <= 3


def test_too_few_are_not_tested_and_the_reason_is_a_number_that_is_not_there(halves):
    members, others = halves
    few = examples(others.inputs[: LEAST - 1], others.labels[: LEAST - 1])
    found = shift_between(members, few)
    assert (found.p_value, found.auc, found.detectable, found.found) == (None, None, None, False)
    assert found.to_detail()["shift_p_value"] is None


def test_features_are_of_inputs_and_labels_alone(halves):
    members, _ = halves
    table = features_of(members)
    assert table.shape == (700, 8 + 64) and np.isfinite(table).all()
    # Ids are no feature: they tell the pools apart by how they were numbered.
    renamed = Examples(ids=members.ids + 10_000, inputs=members.inputs, labels=members.labels)
    assert np.array_equal(features_of(renamed), table)


def test_constant_inputs_are_told_by_labels_alone_and_nothing_is_divided_by_zero():
    draw = torch.Generator().manual_seed(0)
    members = examples(torch.ones(200, 1, 8, 8), torch.randint(0, 4, (200,), generator=draw))
    others = examples(torch.ones(200, 1, 8, 8), torch.randint(0, 4, (200,), generator=draw))
    assert not shift_between(members, others).found
    assert shift_between(members, examples(torch.ones(200, 1, 8, 8), torch.full((200,), 3))).found


@pytest.mark.long
def test_wide_inputs_are_projected_in_little_memory_and_a_shift_is_still_found():
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(2, 150, 3, 48, 48, generator=draw)
    members, others = examples(images[0]), examples(images[1])
    assert features_of(members).shape == (150, 8 + 512)
    # Rows decide alone: neither how many there are nor which group they are of changes the axes.
    few = examples(images[0][:70])
    assert np.allclose(features_of(few), features_of(members)[:70], atol=1e-5)
    assert not shift_between(members, others).found
    tilt = torch.linspace(-0.1, 0.1, 48)  # across, so that no mean or range of an image shows it
    tilted = examples((images[1] + tilt).clamp(0, 1))
    assert shift_between(members, tilted).found


def part_changed(inputs, labels, draw, kind):
    """A sample of which a part was changed: a tenth of its labels or images, or the balance of its classes."""
    some = torch.rand(len(labels), generator=draw) < 0.1
    if kind == "wrong labels":
        other = (labels + torch.randint(1, 10, labels.shape, generator=draw)) % 10
        return inputs, torch.where(some, other, labels)
    if kind == "mirrored":
        return torch.where(some[:, None, None, None], inputs.flip(-1), inputs), labels
    # 31 % of the first five classes, where the other sample has half.
    kept = torch.rand(len(labels), generator=draw) < torch.where(labels < 5, 0.4, 0.9)
    return inputs[kept], labels[kept]


@pytest.mark.long
@subtests(("kind", "by"), [("wrong labels", "hard labels"), ("mirrored", "hard labels"), ("balance", "labels")])
def test_a_shift_of_a_small_part_that_moves_losses_is_found(halves, kind, by):
    members, others = halves
    found = [
        shift_between(members, examples(*part_changed(others.inputs, others.labels, draw, kind)), seed=seed)
        for seed, draw in ((seed, torch.Generator().manual_seed(seed)) for seed in range(2))
    ]
    assert all(one.found and one.by == by for one in found)
    said = found[0].words
    assert "p 0.00" in said and ("labels" in said or "shares" in said)


def test_labels_are_compared_as_by_a_chi_square_test():
    draw = np.random.default_rng(0)
    for shares in ([0.1] * 10, [0.5, 0.5], [0.7, 0.2, 0.1]):
        some, others = (draw.choice(len(shares), size=400, p=shares) for _ in range(2))
        table = [np.bincount(labels, minlength=len(shares)) for labels in (some, others)]
        expected: Any = stats.chi2_contingency(table, correction=False)
        # Of 4,000 permutations, and of a table of whole numbers.
        assert of_labels(some, others) == pytest.approx(expected.pvalue, abs=0.06)
    assert of_labels(np.zeros(50), np.zeros(70)) == 1.0
    assert of_labels(np.arange(20) % 2, np.arange(300) % 3) < 0.05


@pytest.mark.long
def test_hard_labels_err_with_their_level():
    values = []
    for seed in range(30):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(160, 6, generator=draw)
        y = (x[:, 0] + torch.randn(160, generator=draw) > 0).long()
        members, others = examples(x[:80], y[:80]), examples(x[80:], y[80:])
        with threadpool_limits(limits=1):
            values.append(_of_hard_labels(members, others, seed))
    # Of 30 at 10 %, 3 are expected, and more than 9 have a chance below one in a thousand.
    assert sum(value <= 0.1 for value in values) <= 9 and min(values) > 0.0005
