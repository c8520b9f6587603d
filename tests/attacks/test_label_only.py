"""What is particular to label-only membership; the duties of every attack are in test_every_attack.py."""

import dataclasses

import pytest
import torch

from leakbench.attacks.core import AccessError, Examples, LabelAccess, NotApplicable, viewed
from leakbench.attacks.label_only import label_only

from . import toys


def half_spaces(
    *, dim: int = 30, count: int = 40, low: float = -50.0, seed: int = 0
) -> tuple[LabelAccess, torch.Tensor, list[int]]:
    """Two classes on the sides of a plane: distances are known. Also how many inputs each call asked about."""
    coins = toys.generator(seed)
    normal = torch.randn(dim, generator=coins)
    normal = normal / normal.norm()
    inputs = 2 * torch.randn(count, dim, generator=coins)
    away = inputs @ normal - 0.3
    asked: list[int] = []

    def labels_of(points: torch.Tensor) -> torch.Tensor:
        asked.append(len(points))
        return (points @ normal > 0.3).long()

    target = LabelAccess(
        labels_of=labels_of,
        input_shape=(dim,),
        input_low=low,
        input_high=-low,
        classes=2,
        candidates=Examples(ids=torch.arange(count), inputs=inputs, labels=(away > 0).long()),
    )
    return target, away.abs().double(), asked


def test_distances_to_a_plane_are_found_and_never_below_the_truth():
    target, away, _ = half_spaces()
    found = label_only(target, toys.generator(1), by="boundary", queries=2000).scores
    assert (found >= away * (1 - 1e-3)).all()
    assert float((found / away).median()) < 1.05
    # The start, on the line to the nearest candidate of the other class, is much farther.
    start = label_only(target, toys.generator(1), by="boundary", queries=53).scores
    assert float((start / away).median()) > 1.5


def test_no_more_is_asked_than_was_allowed():
    for queries in (53, 100, 500):
        target, _, asked = half_spaces(count=10)
        label_only(target, by="boundary", queries=queries, batch_size=64)
        assert sum(asked) <= 10 * queries and max(asked) <= 64
    target, _, asked = half_spaces(count=10)
    label_only(target, views=1)
    assert sum(asked) == 10


def test_points_outside_of_the_valid_inputs_are_never_asked_about():
    target, _, _ = half_spaces(count=10)
    asked = target.candidates
    assert asked is not None
    boxed = dataclasses.replace(asked, inputs=asked.inputs.clamp(-1, 1))
    own = target.labels_of
    labels = own(boxed.inputs)
    assert 0 < int(labels.sum()) < 10

    def watched(points: torch.Tensor) -> torch.Tensor:
        assert float(points.abs().max()) <= 1 + 1e-6
        return own(points)

    narrow = dataclasses.replace(
        target, labels_of=watched, input_low=-1.0, input_high=1.0, candidates=dataclasses.replace(boxed, labels=labels)
    )
    assert (label_only(narrow, by="boundary", queries=200).scores > 0).all()


def test_who_is_answered_wrongly_is_at_no_distance_and_lies_below_all_others():
    target, away, _ = half_spaces()
    asked = target.candidates
    assert asked is not None
    turned = torch.where(torch.arange(40) < 10, 1 - asked.labels, asked.labels)
    wrong = dataclasses.replace(target, candidates=dataclasses.replace(asked, labels=turned))
    scores = label_only(wrong, by="boundary", queries=300).scores
    assert (scores[:10] == 0).all() and (scores[10:] >= away[10:] * (1 - 1e-3)).all()


def test_the_share_of_views_is_counted_one_image_at_a_time():
    target, _ = toys.label_target(count=20)
    asked = target.candidates
    assert asked is not None
    for views in (1, 2, 18):
        found = label_only(target, views=views, batch_size=7).scores
        for one in range(20):
            seen = viewed(asked.inputs[one : one + 1], views)[0]
            assert float(found[one]) == pytest.approx(
                float((target.labels_of(seen) == asked.labels[one]).double().mean())
            )


def test_more_views_tell_more_than_whether_the_image_itself_is_right():
    aucs = {views: [] for views in (1, 18)}
    for seed in range(2):
        target, member = toys.label_target(seed=seed)
        for views in aucs:
            aucs[views].append(toys.auc(label_only(target, views=views).scores, member))
    assert max(aucs[1]) < 0.92 < 0.97 < min(aucs[18])


def test_what_it_cannot_do_is_refused():
    target, _, _ = half_spaces()
    asked = target.candidates
    assert asked is not None
    with pytest.raises(NotApplicable, match="views are of images"):
        label_only(target)
    same = dataclasses.replace(target, labels_of=lambda points: torch.zeros(len(points), dtype=torch.int64))
    with pytest.raises(NotApplicable, match="answers all candidates alike"):
        label_only(same, by="boundary")
    with pytest.raises(ValueError, match="by must be views or boundary, got 'distance'"):
        label_only(target, by="distance")
    with pytest.raises(ValueError, match="queries must be at least 53, for one round of the search, got 52"):
        label_only(target, by="boundary", queries=52)
    assert label_only(target, views=1, queries=1).scores.shape == (40,)
    with pytest.raises(ValueError, match=r"views must be in \[1, 18\]"):
        label_only(toys.label_target(count=20)[0], views=19)
    with pytest.raises(AccessError, match="needs access to the labels that the final model answers with"):
        label_only(toys.model_target(count=20)[0])
    with pytest.raises(ValueError, match="inputs of shape"):
        dataclasses.replace(target, input_shape=(3,))


def test_searches_that_all_end_at_once_are_of_nobody():
    target, _, _ = half_spaces()
    asked = target.candidates
    assert asked is not None
    wrong = dataclasses.replace(target, candidates=dataclasses.replace(asked, labels=1 - asked.labels))
    assert (label_only(wrong, by="boundary").scores == 0).all()


def test_nobody_to_ask_about_is_refused():
    target, _ = toys.label_target(count=20)
    asked = target.candidates
    assert asked is not None
    nobody = dataclasses.replace(target, candidates=toys.subset(asked, asked.ids < 0))
    assert "needs candidates to score" in (label_only.check(nobody) or "")
    with pytest.raises(AccessError, match=r"needs candidates to score: fill LabelAccess\.candidates"):
        label_only(nobody)
