"""The pre-flight: each mistake that makes an audit meaningless is said, and an honest model passes."""

import pytest
import torch
from torch import nn

from attacks.core import Examples
from audit.external.data import Groups
from audit.external.preflight import preflight, smallest_leak


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
    told = _stops(overfitted.model, *pairs)["chance"]
    assert "its classes are in another order" in told
    assert "0 is the model's 1" in told


def test_images_of_0_to_255(overfitted):
    class Strict(nn.Module):  # a model that depends on the scale, as one with a normalisation does
        def forward(self, inputs):
            return overfitted.model(inputs) if inputs.abs().max() <= 2 else inputs.flatten(1)[:, :10].sin()

    pairs = [(x * 255, y) for x, y in (overfitted.members, overfitted.non_members)]
    stops = _stops(Strict(), *pairs)
    assert "inputs go up to 255, as of images in 0..255" in stops["range"]
    assert "with --preprocess mean=0,std=255 it is right on 9" in stops["chance"]


def test_one_class(overfitted):
    pairs = [(x[y == 3], y[y == 3]) for x, y in (overfitted.members, overfitted.non_members)]
    assert _stops(overfitted.model, *pairs)["one class"].startswith("all examples are of class 3")


def test_ten_records(overfitted):
    pairs = [(x[:10], y[:10]) for x, y in (overfitted.members, overfitted.non_members)]
    (few,) = [one for one in preflight(overfitted.model, _groups(*pairs)).remarks if one.kind == "few"]
    assert "10 members and 10 non-members show" in few.sentence
    assert "no TPR at low false positive rates" in few.sentence


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
    from benchmarks import models

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
    assert "labels go up to 12" in _stops(overfitted.model, *pairs)["classes"]


def test_a_model_of_other_inputs_is_refused(overfitted):
    pairs = [(x[:, :, :4], y) for x, y in _pairs(overfitted)]
    with pytest.raises(ValueError, match=r"must take inputs of shape \[1, 4, 8\]"):
        preflight(overfitted.model, _groups(*pairs))
    with pytest.raises(ValueError, match="must answer with logits"):
        preflight(nn.Flatten(0), _groups(*_pairs(overfitted)))


def test_exchanged_groups_near_duplicates_copies_and_shifts_are_remarks(overfitted):
    members, outside = _pairs(overfitted)
    kinds = {one.kind for one in preflight(overfitted.model, _groups(outside, members)).remarks}
    assert "swapped" in kinds
    noisy = (torch.cat([members[0][:7] + 1e-5, outside[0][7:]]), torch.cat([members[1][:7], outside[1][7:]]))
    (near,) = [
        one for one in preflight(overfitted.model, _groups(members, noisy)).remarks if one.kind.startswith("near")
    ]
    assert near.sentence.startswith("7 members")
    twice = tuple(torch.cat([part, part[:3]]) for part in members)
    assert "duplicates" in {one.kind for one in preflight(overfitted.model, _groups(twice, outside)).remarks}
    darker = (outside[0] * 0.7, outside[1])
    assert "shift" in {one.kind for one in preflight(overfitted.model, _groups(members, darker)).remarks}


def test_the_smallest_leak_shrinks_with_the_groups_and_needs_no_model():
    small, large = smallest_leak(100, 100), smallest_leak(10_000, 10_000)
    assert 0.5 < large["auc"] < small["auc"] < 0.7
    assert 0.01 < large["tpr_at_1pct_fpr"] < small["tpr_at_1pct_fpr"] < 0.2
    assert small["epsilon_ceiling"] < large["epsilon_ceiling"]
    none = smallest_leak(9, 9)
    assert none["epsilon_ceiling"] is None
    assert none["tpr_at_1pct_fpr"] is None
