"""Canaries of a training: their gradients are what was asked for, their coins fair, and nobody else changes."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from leakbench.audit.plan.build import build_model, load_splits, planned
from leakbench.audit.plan.canaries import GRADIENT_KINDS, drawn, why_none, with_canaries
from leakbench.audit.plan.expand import plan
from leakbench.audit.suite.suite import SuiteError
from leakbench.defenses.core import Engine, Layout, cross_entropy, per_example_gradients

from ...parameters import subtests
from ..conftest import SUITE

CPU = torch.device("cpu")
LOOKING = SUITE.replace('{ name = "likelihood_ratio" }', '{ name = "canary_alignment" }')


def with_table(words: str, text: str = LOOKING) -> str:
    return text.replace("candidates = 100", f"candidates = 100, canaries = {{ {words} }}")


def made(suite, name: str = "toy") -> Any:
    """Canaries of the first training of a suite, its splits and its model."""
    request = plan(suite).jobs[0].cells[0].request.of_training()
    request = dataclasses.replace(request, suite=name)
    splits = load_splits(request, CPU)
    model = build_model(request, splits)
    return drawn(request, splits, model, planned(request, len(splits.private)), CPU), splits, model


@subtests("kind", GRADIENT_KINDS)
def test_the_gradient_of_a_canary_is_its_direction_wherever_the_model_is(suite_of, kind):
    canaries, splits, model = made(suite_of(with_table(f'kind = "{kind}", number = 30, norm = 7.0')))
    layout = Layout.of(model)
    wrapped = with_canaries(model, canaries, splits)
    assert Layout.of(wrapped) == layout
    there = layout.read(model) + torch.randn(layout.dim, generator=torch.Generator().manual_seed(0))
    for point in (None, there):
        rows = per_example_gradients(
            wrapped, cross_entropy, layout, canaries.examples.inputs, canaries.examples.labels, parameters=point
        )
        torch.testing.assert_close(rows, 7.0 * canaries.directions[0], atol=1e-5, rtol=1e-4)
    # One by itself is computed another way.
    alone = per_example_gradients(
        wrapped, cross_entropy, layout, canaries.examples.inputs[3:4], canaries.examples.labels[3:4]
    )
    torch.testing.assert_close(alone, 7.0 * canaries.directions[0, 3:4], atol=1e-5, rtol=1e-4)


def test_examples_do_not_see_the_canaries_of_a_model(suite_of):
    canaries, splits, model = made(suite_of(with_table('kind = "random", number = 30')))
    wrapped, layout = with_canaries(model, canaries, splits), Layout.of(model)
    some = splits.private.inputs[:20], splits.private.labels[:20]
    torch.testing.assert_close(wrapped(some[0]), model(some[0]))
    rows = [per_example_gradients(one, cross_entropy, layout, *some) for one in (wrapped, model)]
    torch.testing.assert_close(*rows)
    # An engine that works layer by layer would find no gradient of a canary, so it must not be taken.
    engine = Engine(wrapped, expected_batch=20.0)
    found = engine.gradients(canaries.examples.inputs, canaries.examples.labels)(None)
    torch.testing.assert_close(found, 10.0 * canaries.directions[0], atol=1e-5, rtol=1e-4)


@subtests("kind", ["blank", "crafted", "mislabelled"])
def test_canaries_of_the_input_space_are_valid_and_distinct_records(suite_of, kind):
    canaries, splits, _ = made(suite_of(with_table(f'kind = "{kind}", number = 100')))
    inputs, labels = canaries.examples.inputs, canaries.examples.labels
    assert inputs.min() >= splits.low and inputs.max() <= splits.high and inputs.shape[1:] == splits.input_shape
    assert labels.min() >= 0 and labels.max() < splits.classes and (canaries.examples.ids < 0).all()
    records = torch.cat([inputs.flatten(1), labels[:, None]], dim=1)
    assert len(records.unique(dim=0)) == 100 and canaries.directions is None


def test_a_mislabelled_example_is_in_no_pool_and_its_label_is_another(suite_of):
    suite = suite_of(with_table('kind = "mislabelled", number = 100'))
    canaries, splits, _ = made(suite)
    plain = load_splits(plan(suite_of(LOOKING)).jobs[0].cells[0].request, CPU)
    assert len(plain.non_member) - len(splits.non_member) == 100 and splits.digest != plain.digest
    assert torch.equal(plain.private.ids, splits.private.ids)
    gone = plain.non_member.inputs[~torch.isin(plain.non_member.ids, splits.non_member.ids)].flatten(1)
    own = canaries.examples.inputs.flatten(1)
    distances = torch.cdist(own, gone)
    assert (distances.min(dim=1).values == 0).all() and (distances.min(dim=0).values == 0).all()
    true = plain.non_member.labels[torch.cdist(own, plain.non_member.inputs.flatten(1)).argmin(dim=1)]
    assert (canaries.examples.labels != true).all()


def test_coins_are_fair_and_of_the_request_while_canaries_are_everybodys(suite_of):
    suite = suite_of(with_table('kind = "blank", number = 600'))
    one, other = made(suite)[0], made(suite, "another")[0]
    assert abs(int(one.included.sum()) - 300) < 5 * 150**0.5
    assert torch.equal(one.examples.inputs, other.examples.inputs) and not torch.equal(one.included, other.included)
    assert len(one.put_in) == int(one.included.sum())


def test_a_training_without_canaries_keeps_its_id(suite_of):
    def tasks(text):
        return [json.dumps(cell.request.canonical()) for cell in plan(suite_of(text)).cells]

    assert not any("canaries" in one.replace("canary_alignment", "") for one in tasks(SUITE))
    table = with_table('kind = "blank", number = 30', SUITE)
    assert all('"canaries": {"kind": "blank", "number": 30}' in one for one in tasks(table))


@subtests(
    ("words", "sentence"),
    [
        (
            'kind = "dirac", number = 700',
            "610 parameters have as many directions of kind 'dirac', and the training asks",
        ),
        ('kind = "blank", number = 641', "there are 640 blank canaries, one a pixel and class"),
    ],
)
def test_what_is_not_possible_is_skipped_with_its_sentence(suite_of, words, sentence):
    skipped = [cell for cell in plan(suite_of(with_table(words))).skipped if cell.kind == "canaries"]
    assert skipped and all(sentence in cell.skip for cell in skipped)
    assert made(suite_of(with_table(words)))[0] is None


def test_an_engine_that_goes_by_layers_has_no_gradient_canaries(suite_of):
    for kind, possible in (("random", False), ("blank", True)):
        text = with_table(f'kind = "{kind}", number = 30').replace("batch = 70", 'batch = 70, engine = "layerwise"')
        skipped = [cell.skip for cell in plan(suite_of(text)).skipped]
        assert possible != any("engine 'layerwise' goes by layers" in skip for skip in skipped)


def test_an_attack_on_canaries_is_skipped_where_there_are_none(suite_of):
    (skip,) = {cell.skip for cell in plan(suite_of(LOOKING)).skipped}
    assert skip == "canary_alignment needs canaries in the training; set task.canaries"


def test_a_model_with_dropout_has_no_gradient_canaries(suite_of):
    _, splits, model = made(suite_of(with_table('kind = "random", number = 30')))
    request = plan(suite_of(with_table('kind = "random", number = 30'))).cells[0].request.of_training()
    steps = planned(request, 700)
    drops = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 10))
    assert "'1' has some" in why_none(request, drops, splits, steps) and why_none(request, model, splits, steps) == ""


@subtests(
    ("words", "sentence"),
    [
        ('kind = "blank", number = 19', "task.canaries.number: must be >= 20, got 19"),
        ('kind = "blind", number = 30', "did you mean 'blank'?"),
        ('kind = "blank", count = 30', "task.canaries.count: unknown key"),
        ('kind = "mislabelled", number = 700', "must be below 700, the non-members that they are taken from, got 700"),
    ],
)
def test_a_table_with_mistakes_is_refused(suite_of, words, sentence):
    with pytest.raises(SuiteError) as caught:
        plan(suite_of(with_table(words)))
    assert sentence in str(caught.value)


def test_canaries_go_with_coins_of_their_own_alone(suite_of):
    """Other samplers deal batches by how many records there are, which is the sum of the coins."""
    text = with_table('kind = "blank", number = 30')
    with pytest.raises(SuiteError, match="canaries must go with poisson or full sampling, got 'shuffle'"):
        plan(suite_of(text.replace("batch = 70", 'batch = 70, sampling = "shuffle"')))
    with pytest.raises(SuiteError, match="must go with poisson or full sampling, got 'partition'"):
        plan(suite_of(text.replace('{ name = "dp_sgd" }', '{ name = "dp_sgd", sampling = "partition" }')))
