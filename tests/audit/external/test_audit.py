"""The audit of a model in memory: the same pre-flight as the command's, and arguments that are refused."""

import pytest

from audit.external.audit import audit_model
from audit.external.preflight import StoppedError

QUICK = {"gradients": False, "attacks": [("loss_threshold", {})]}


def test_a_model_in_memory_is_audited_and_left_as_it_was(overfitted):
    overfitted.model.train()
    try:
        found = audit_model(
            overfitted.model, members=overfitted.members, non_members=overfitted.non_members, split="random", **QUICK
        )
        assert found.verdict.word == "leaks"
        assert overfitted.model.training
    finally:
        overfitted.model.eval()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda a, b: (b, a), "are the two groups exchanged"),
        (lambda a, b: (a, a), "the very same examples"),
        (lambda a, b: ((a[0], (a[1] + 1) % 10), (b[0], (b[1] + 1) % 10)), "its classes are in another order"),
        (lambda a, b: ((a[0] - 5, a[1]), (b[0] - 5, b[1])), "with --preprocess"),
        (lambda a, b: ((a[0], a[1] * 0), (b[0], b[1] * 0)), "all examples are of class 0"),
    ],
)
def test_what_would_mean_nothing_is_stopped_as_the_command_does(overfitted, change, told):
    """A leaking model must not be told to leak nothing because its inputs were not those of its training."""
    members, non_members = change(overfitted.members, overfitted.non_members)
    with pytest.raises(StoppedError, match=told):
        audit_model(overfitted.model, members=members, non_members=non_members, **QUICK)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x, y: (x * float("nan"), y), "inputs of members must be finite"),
        (lambda x, y: ((255 * x).byte(), y), "inputs of members must be finite floats"),
        (lambda x, y: (x, y.float()), "labels of members must be int64"),
        (lambda x, y: (x, y - 1), "labels of members must be at least 0, got -1"),
        (lambda x, y: (x[:0], y[:0]), "members must hold at least one example"),
        (lambda x, y: (x, y[1:]), "a label an input"),
        (lambda x, y: (x.flatten(1), y), "inputs of one shape"),
    ],
)
def test_examples_of_another_form_are_refused_in_one_sentence(overfitted, change, told):
    with pytest.raises(ValueError, match=told):
        audit_model(overfitted.model, members=change(*overfitted.members), non_members=overfitted.non_members)


def test_no_leak_is_found_with_the_accuracy_that_the_model_had(overfitted):
    """Images that are mirrored: the model knows half of them, and nothing of them is a mistake by itself."""
    members, others = ((x.flip(-1), y) for x, y in (overfitted.members, overfitted.non_members))
    found = audit_model(overfitted.model, members=members, non_members=others, **QUICK)
    assert found.verdict.word == "no leak found"
    inside = found.accuracy["members"].value
    assert inside is not None and inside < 0.6
    assert f"right on {inside:.1%} of members" in found.verdict.sentence


def test_another_scale_that_makes_most_a_little_better_is_named(overfitted):
    members, others = ((x - 0.9, y) for x, y in (overfitted.members, overfitted.non_members))
    with pytest.raises(StoppedError, match="with --preprocess mean="):
        audit_model(overfitted.model, members=members, non_members=others, **QUICK)
