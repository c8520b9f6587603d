"""The pre-flight: each mistake that makes an audit meaningless is said, and an honest model passes."""

import copy
import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbench.attacks.core import Examples
from leakbench.audit.external.examples.groups import Groups, Preprocess
from leakbench.audit.external.model.preflight import preflight
from leakbench.audit.external.model.sizes import smallest_leak
from leakbench.audit.scoring.shift import Shift
from leakbench.leaderboard.records.validation import json_values

from .... import pretend_device


@pytest.fixture(autouse=True)
def _no_shift(request, monkeypatch) -> None:
    """Most of the time is that of a shift, which few tests are about."""
    if not request.node.name.endswith(("honest_model_passes", "shifts_are_remarks", "of_the_examples")):
        unmoved = Shift(p_value=0.5, auc=0.5, members=100, non_members=100, detectable=0.6)
        monkeypatch.setattr(importlib.import_module(preflight.__module__), "shift_between", lambda *_: unmoved)


def _groups(members, non_members, population=None):
    made, first = [], 0
    for pair in (members, non_members, population):
        if pair is None:
            made.append(None)
            continue
        inputs, labels = pair
        made.append(Examples(ids=torch.arange(first, first + len(labels)), inputs=inputs, labels=labels))
        first += len(labels)
    return Groups(members=made[0], non_members=made[1], population=made[2])


def _stops(model, *pairs):
    return {one.kind: one.sentence for one in preflight(model, _groups(*pairs)).stops}


def test_an_honest_model_passes(overfitted):
    found = preflight(overfitted.model, _groups(overfitted.members, overfitted.non_members, overfitted.public))
    assert found.remarks == ()
    assert found.accuracy["members"].value == 1.0
    assert 0.9 < (found.accuracy["non_members"].value or 0) < 1.0
    assert found.classes == 10


def test_members_that_are_the_non_members(overfitted):
    stops = _stops(overfitted.model, overfitted.members, overfitted.members)
    assert "the very same examples" in stops["overlap"]
    some = tuple(torch.cat([a[:5], b[5:]]) for a, b in zip(overfitted.members, overfitted.non_members, strict=True))
    assert "5 examples in common" in _stops(overfitted.model, overfitted.members, some)["overlap"]


def test_a_population_with_members(overfitted):
    stops = _stops(overfitted.model, overfitted.members, overfitted.non_members, overfitted.members)
    assert stops["overlap"].startswith("population and members")


def test_another_class_order_is_named(overfitted):
    order = torch.tensor([3, 0, 1, 2, 4, 5, 6, 9, 7, 8])
    pairs = [(x, order[y]) for x, y in (overfitted.members, overfitted.non_members)]
    told = _stops(overfitted.model, *pairs)["order"]
    assert "its classes are in another order" in told
    assert "0 is the model's 1" in told


def test_images_of_0_to_255(overfitted):
    class Strict(nn.Module):  # a model that depends on the scale, as one with a normalisation does
        def forward(self, inputs):
            return overfitted.model(inputs) if inputs.abs().max() <= 2 else inputs.flatten(1)[:, :10].sin()

    pairs = [(x * 255, y) for x, y in (overfitted.members, overfitted.non_members)]
    stops = _stops(Strict(), *pairs)
    assert "inputs go up to 255, as of images in 0..255" in stops["range"]
    assert "with --preprocess mean=0,std=255 it is right on 9" in stops["preprocessing"]


def test_one_class(overfitted):
    pairs = [(x[y == 3], y[y == 3]) for x, y in (overfitted.members, overfitted.non_members)]
    assert _stops(overfitted.model, *pairs)["one class"].startswith("all examples are of class 3")


def test_ten_records(overfitted):
    pairs = [(x[:10], y[:10]) for x, y in (overfitted.members, overfitted.non_members)]
    (few,) = [one for one in preflight(overfitted.model, _groups(*pairs)).remarks if one.kind == "few"]
    assert "10 members and 10 non-members show" in few.sentence
    assert "no TPR at low false positive rates" in few.sentence


class _Dropout(nn.Module):
    """A model whose dropout is on, whatever mode it is in."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        return self.model(nn.functional.dropout(inputs, 0.5, training=True))


class _OwnStatistics(_Dropout):
    """A model that takes off the mean of the batch that it is asked about."""

    def forward(self, inputs):
        return self.model(inputs - inputs.mean(0) + 0.3)


@pytest.mark.parametrize(("kind", "told"), [(_Dropout, "64 of 64 members otherwise when it is asked again"),
                                            (_OwnStatistics, "its answers depend on the batch")])  # fmt: skip
def test_answers_that_vary_hide_a_leak_and_stop_the_audit(overfitted, kind, told):
    model = kind(overfitted.model).eval()
    assert told in _stops(model, overfitted.members, overfitted.non_members)["unsteady"]
    accepted = preflight(
        model, _groups(overfitted.members, overfitted.non_members), accept=["unsteady", "chance", "preprocessing"]
    )
    assert "unsteady" not in {one.kind for one in accepted.stops}
    assert "unsteady" in {one.kind for one in accepted.remarks}


def test_a_model_that_answers_one_class(overfitted):
    class Constant(nn.Module):
        def forward(self, inputs):
            return torch.eye(10)[torch.full((len(inputs),), 4)]

    stops = _stops(Constant(), overfitted.members, overfitted.non_members)
    assert "answers class 4 for all 1200" in stops["one answer"]
    assert "chance" in stops


def test_a_weak_model_with_unequal_classes_is_no_mistake():
    """Right in 40 % of ten classes, of which one holds a quarter: bad, and no other order of classes helps."""
    coins = torch.Generator().manual_seed(0)
    labels = torch.where(
        torch.rand(800, generator=coins) < 0.25, torch.tensor(0), torch.randint(10, (800,), generator=coins)
    )
    right = torch.rand(800, generator=coins) < 0.4
    answers = torch.where(right, labels, torch.randint(10, (800,), generator=coins))
    inputs = nn.functional.one_hot(answers, 10).float() + 0.01 * torch.rand(800, 10, generator=coins)
    pairs = [(inputs[:400], labels[:400]), (inputs[400:], labels[400:])]
    assert _stops(nn.Identity(), *pairs) == {}


def test_an_untrained_model_is_told(overfitted):
    from leakbench.benchmarks import models

    for seed in range(4):
        model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=seed).eval()
        said = {one.kind: one.sentence for one in preflight(model, _groups(*_pairs(overfitted))).remarks}
        # A stop, or, where weights of chance are right more often than chance, a remark.
        assert "preprocessing, class order or the file" in said.get("chance", said.get("weak", ""))


def _pairs(world):
    return world.members, world.non_members


def test_nan_answers_and_labels_beyond_the_classes(overfitted):
    class Broken(nn.Module):
        def forward(self, inputs):
            return overfitted.model(inputs) * torch.where(inputs.flatten(1).sum(1) > 20, torch.nan, 1.0)[:, None]

    assert "answers NaN for" in _stops(Broken(), *_pairs(overfitted))["NaN"]
    pairs = [(x, y + 3) for x, y in _pairs(overfitted)]
    assert "labels go from 3 to 12" in _stops(overfitted.model, *pairs)["classes"]


def test_a_model_of_other_inputs_is_refused(overfitted):
    pairs = [(x[:, :, :4], y) for x, y in _pairs(overfitted)]
    with pytest.raises(ValueError, match=r"must take inputs of shape \[1, 4, 8\]"):
        preflight(overfitted.model, _groups(*pairs))
    with pytest.raises(ValueError, match="must answer with logits"):
        preflight(nn.Flatten(0), _groups(*_pairs(overfitted)))


@pytest.mark.long
def test_exchanged_groups_near_duplicates_copies_and_shifts_are_remarks(overfitted):
    members, outside = _pairs(overfitted)
    kinds = {one.kind for one in preflight(overfitted.model, _groups(outside, members)).remarks}
    assert "swapped" in kinds
    assert "are the two groups exchanged?" in _stops(overfitted.model, outside, members)["swapped"]
    noisy = (torch.cat([members[0][:7] + 1e-5, outside[0][7:]]), torch.cat([members[1][:7], outside[1][7:]]))
    (near,) = [
        one for one in preflight(overfitted.model, _groups(members, noisy)).remarks if one.kind.startswith("near")
    ]
    assert near.sentence.startswith("7 members")
    twice = tuple(torch.cat([part, part[:3]]) for part in members)
    assert "duplicates" in {one.kind for one in preflight(overfitted.model, _groups(twice, outside)).remarks}
    darker = (outside[0] * 0.7, outside[1])
    assert "shift" in {one.kind for one in preflight(overfitted.model, _groups(members, darker)).remarks}


def least(*sizes, **settings):
    return json_values(smallest_leak(*sizes, **settings))


def test_the_smallest_leak_shrinks_with_the_groups_and_needs_no_model():
    small, large = least(400, 400), least(10_000, 10_000)
    assert 0.5 < large["auc"] < small["auc"] < 0.7
    assert 0.01 < large["tpr_at_1pct_fpr"] < small["tpr_at_1pct_fpr"] < 0.1
    assert 0.001 < large["tpr_at_0.1pct_fpr"] < 0.01
    # With 100 non-members the interval of a TPR at 1 % begins at 0, whatever the scores are.
    assert least(100, 100)["tpr_at_1pct_fpr"] is None
    assert small["epsilon_ceiling"] < large["epsilon_ceiling"]
    # Of several attacks each has its part of the error rate, as the bound has.
    assert least(400, 400, attacks=8)["epsilon_ceiling"] < small["epsilon_ceiling"]
    none = least(9, 9)
    assert none["epsilon_ceiling"] is None
    assert none["tpr_at_1pct_fpr"] is None


def test_two_classes_exchanged_among_ten_are_found_where_the_model_is_right_on_the_others(overfitted):
    order = torch.arange(10)
    order[3], order[5] = 5, 3
    told = _stops(overfitted.model, *[(x, order[y]) for x, y in _pairs(overfitted)])["order"]
    assert told.endswith("3 is the model's 5, 5 is the model's 3")
    assert "which it is right on 9" in told


def _unequal(world, order):
    """Zeros, and one in twenty of the others."""
    rare = [(y == 0) | (torch.arange(len(y)) % 20 == 0) for _, y in _pairs(world)]
    return [(x[kept], order[y[kept]]) for (x, y), kept in zip(_pairs(world), rare, strict=True)]


def test_another_order_of_unequal_classes_is_found_and_their_own_passes(overfitted):
    assert _stops(overfitted.model, *_unequal(overfitted, torch.arange(10))) == {}
    turned = _stops(overfitted.model, *_unequal(overfitted, torch.arange(10).roll(1)))
    assert "0 is the model's 1" in turned["order"]


def _says(answers, labels, **settings):
    """The stops for a model that answers so."""
    coins = torch.Generator().manual_seed(5)
    inputs = torch.cat([nn.functional.one_hot(answers, 10).float(), torch.rand(len(answers), 20, generator=coins)], 1)
    half = len(labels) // 2
    groups = _groups((inputs[:half], labels[:half]), (inputs[half:], labels[half:]))
    return preflight(_First(), groups, **settings)


class _First(nn.Module):
    def forward(self, inputs):
        return inputs[:, :10]


@pytest.mark.parametrize("share", [0.15, 0.3])
def test_a_bad_and_honest_model_is_not_stopped(share):
    coins = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (4000,), generator=coins)
    known = torch.rand(4000, generator=coins) < (share - 0.1) / 0.9
    found = _says(torch.where(known, labels, torch.randint(10, (4000,), generator=coins)), labels)
    assert found.stops == ()
    assert ("weak" in {one.kind for one in found.remarks}) == (share < 0.2)


def test_a_good_model_may_be_right_less_often_than_who_always_answers_the_commonest_class():
    coins = torch.Generator().manual_seed(1)
    labels = (torch.rand(4000, generator=coins) < 0.05).long()
    wrong = torch.rand(4000, generator=coins) < torch.where(labels == 1, 0.2, 0.06)
    assert _says(torch.where(wrong, 1 - labels, labels), labels).stops == ()
    guessed = (torch.rand(4000, generator=coins) < 0.05).long()  # the same shares, and nothing known
    assert {one.kind for one in _says(guessed, labels).stops} == {"chance"}


def test_answers_that_know_nothing_stop_unless_they_are_meant_to():
    coins = torch.Generator().manual_seed(2)
    answers, labels = torch.randint(10, (2, 2000), generator=coins)
    (stop,) = _says(answers, labels).stops
    assert stop.kind == "chance"
    assert "--accept chance" in stop.sentence
    accepted = _says(answers, labels, accept=["chance"])
    assert accepted.stops == ()
    assert "chance" in {one.kind for one in accepted.remarks}
    with pytest.raises(ValueError, match=r"accept must be of chance, .* got 'overlap'"):
        _says(answers, labels, accept=["overlap"])
    # Of two classes and few examples nobody can say.
    true = torch.arange(24) % 2
    few = torch.where(torch.arange(24) < 14, true, 1 - true)
    said = {one.kind: one for one in _says(few, true).remarks}
    assert not said["undecided"].stop
    assert "24 examples are too few" in said["undecided"].sentence


def test_the_way_out_takes_the_place_of_what_was_given(overfitted):
    class Strict(nn.Module):
        def forward(self, inputs):
            return overfitted.model(inputs) if inputs.abs().max() <= 2 else inputs.flatten(1)[:, :10].sin()

    given = Preprocess.parse("mean=10,std=2")
    fed = [(given(x * 255), y) for x, y in _pairs(overfitted)]
    stops = {one.kind: one.sentence for one in preflight(Strict(), replace(_groups(*fed), preprocess=given)).stops}
    option = stops["preprocessing"].partition("--preprocess ")[2].partition(" ")[0]
    right = Preprocess.parse(option)(overfitted.members[0] * 255)
    assert (overfitted.model(right).argmax(1) == overfitted.members[1]).double().mean() > 0.9


def test_two_groups_that_are_nearly_the_same_stop(overfitted):
    inputs, labels = overfitted.members
    noise = 0.01 * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))
    stops = _stops(overfitted.model, (inputs, labels), (inputs + noise, labels))
    assert stops["near-duplicates"].startswith("600 members have a near-duplicate")


def test_answers_that_are_infinite_and_inputs_that_hold_nothing(overfitted):
    class Infinite(nn.Module):
        def forward(self, inputs):
            return overfitted.model(inputs) * torch.tensor([torch.inf] + [1.0] * 9)

    assert "answers infinity for 1200 of 1200" in _stops(Infinite(), *_pairs(overfitted))["NaN"]
    flat = [(torch.ones_like(x), y) for x, y in _pairs(overfitted)]
    assert _stops(overfitted.model, *flat)["constant"] == "all inputs are 1 everywhere: they hold nothing"
    members, outside = _pairs(overfitted)
    some = members[0].clone()
    some[:4] = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(4, 1, 1, 1)
    said = {one.kind: one.sentence for one in preflight(overfitted.model, _groups((some, members[1]), outside)).remarks}
    assert said["blank"] == "4 of 1200 inputs have one value everywhere"


@pytest.mark.long
def test_everything_is_looked_at_on_the_device_of_the_examples(overfitted):
    with pretend_device.device() as pretend:
        model = copy.deepcopy(overfitted.model).to(pretend)
        moved = [(inputs.to(pretend), labels.to(pretend)) for inputs, labels in _pairs(overfitted)]
        made = []
        for first, (inputs, labels) in zip((0, 600), moved, strict=True):
            made.append(Examples(ids=torch.arange(first, first + 600).to(pretend), inputs=inputs, labels=labels))
        groups = Groups(members=made[0], non_members=made[1], population=None)
        assert preflight(model, groups).remarks == ()
        turned = replace(groups, non_members=replace(made[1], labels=(made[1].labels + 1) % 10))
        assert preflight(model, turned).remarks != ()
