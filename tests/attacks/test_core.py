"""Targets, narrowing, results and priors: what they refuse, and what a view withholds."""

from dataclasses import replace

import pytest
import torch

from attacks.core import (
    Access,
    AccessError,
    Box,
    Examples,
    Knows,
    MembershipScores,
    ModelAccess,
    Observation,
    Reconstruction,
    Requirements,
    Transcript,
    attack,
    narrow,
    offer,
    total_variation,
)

from . import toys

UPDATE = toys.update_target()[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"released": torch.zeros(2, 3)}, r"released must be floats of shape \[m\]"),
        ({"released": UPDATE.released * float("nan")}, "training diverged"),
        ({"input_high": 0.0}, "input_low must be below input_high"),
        ({"divisor": 0.0}, "divisor must be positive"),
        ({"sample_rate": 2.0}, r"sample_rate must be in \(0, 1\], got 2"),
        ({"labels": torch.tensor([4])}, r"labels must be in \[0, 4\), got 4"),
        ({"batch_size": 2}, "labels must be one an example: 1 for a batch of 2"),
        ({"noise_std": torch.ones(3)}, "noise_std must have one entry a released coordinate"),
        ({"noise_std": -torch.ones_like(UPDATE.released)}, "noise_std must be finite and at least 0"),
        ({"candidates": None}, "others_removed answers for candidates"),
        ({"candidates": toys.examples(2, (1, 4, 4), seed=0)}, "candidates must have inputs of shape"),
    ],
)
def test_an_observation_that_contradicts_itself_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(UPDATE, **change)


def test_examples_must_fit_together():
    ids, inputs, labels = torch.arange(2), torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="one entry an example"):
        Examples(ids=ids, inputs=inputs[:1], labels=labels)
    with pytest.raises(ValueError, match="ids must be distinct"):
        Examples(ids=torch.zeros(2, dtype=torch.int64), inputs=inputs, labels=labels)
    with pytest.raises(ValueError, match="labels must be int64"):
        Examples(ids=ids, inputs=inputs, labels=labels.float())
    with pytest.raises(ValueError, match="inputs must be finite"):
        Examples(ids=ids, inputs=inputs / 0, labels=labels)


def test_a_transcript_must_be_readable_twice():
    with pytest.raises(ValueError, match="iterable again and again"):
        Transcript(steps=iter([UPDATE]))


def test_a_view_holds_nothing_that_was_not_declared():
    view = narrow(UPDATE, Requirements(access=Access.UPDATE, knows=Knows.LABELS))
    assert isinstance(view, Observation)
    assert torch.equal(view.released, UPDATE.released)
    assert view.labels is not None
    for name in ("batch_size", "population", "noise_std", "others_removed"):
        assert name not in vars(view)
        with pytest.raises(AccessError, match=f"Observation.{name}"):
            getattr(view, name)
    with pytest.raises(AccessError):
        replace(view, step=1)
    assert "noise_std" in repr(view) and "0." not in repr(view)


def test_narrowing_a_view_again_cannot_widen_it():
    everything = Requirements(access=Access.UPDATE, knows=~Knows.NOTHING)
    view = narrow(narrow(UPDATE, Requirements(access=Access.UPDATE)), everything)
    with pytest.raises(AccessError):
        _ = view.labels


def test_steps_and_final_model_of_a_narrowed_transcript_are_narrowed_too():
    target, _ = toys.transcript(noise=1.0, steps=2)
    view = narrow(target, Requirements(access=Access.ALL_STEPS))
    for _ in range(2):  # iterable again and again
        for step in view.steps:
            with pytest.raises(AccessError):
                _ = step.noise_std
    assert view.final is not None
    assert view.final.parameters is not None  # who sees every step has the model
    with pytest.raises(AccessError):
        _ = view.final.population


def test_a_black_box_has_no_parameters():
    target, _ = toys.model_target()
    with pytest.raises(AccessError, match=r"Access\.WHITE_BOX.*ModelAccess\.parameters"):
        _ = narrow(target, Requirements(access=Access.BLACK_BOX)).parameters
    assert narrow(target, Requirements(access=Access.WHITE_BOX)).parameters is not None


def test_an_offer_is_what_is_filled():
    assert offer(UPDATE).knows == ~Knows.NOTHING
    assert offer(replace(UPDATE, labels=None)).knows == ~Knows.LABELS
    model, _ = toys.model_target()
    assert offer(model).access is Access.WHITE_BOX
    assert offer(replace(model, parameters=None)).access is Access.BLACK_BOX


def test_requirements_are_recorded_by_name():
    needs = Requirements(access=Access.ALL_STEPS, knows=Knows.OTHERS | Knows.DEFENSE)
    assert needs.to_dict() == {"access": "ALL_STEPS", "knows": ["DEFENSE", "OTHERS"], "controls": []}


def test_a_function_of_another_shape_is_not_an_attack():
    def on_models(target: ModelAccess, coins: torch.Generator) -> MembershipScores:
        raise NotImplementedError

    def positional(target: Observation, coins: torch.Generator, steps: int = 3) -> MembershipScores:
        raise NotImplementedError

    with pytest.raises(TypeError, match="must be annotated as Observation"):
        attack(access=Access.UPDATE)(on_models)
    with pytest.raises(TypeError, match="got steps"):
        attack(access=Access.UPDATE)(positional)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"inputs": torch.full((1, 3), float("nan"))}, "inputs must be finite"),
        ({"labels": torch.zeros(2, dtype=torch.int64)}, "labels must be int64, one an input"),
        ({"labels": torch.zeros(1)}, "labels must be int64, one an input"),
        ({"objective": float("inf")}, "objective must be finite"),
        ({"restarts": 0}, "restarts must be at least 1"),
    ],
)
def test_a_reconstruction_that_is_none_is_refused(change, sentence):
    good = Reconstruction(inputs=torch.zeros(1, 3), labels=torch.zeros(1, dtype=torch.int64), objective=0.0)
    with pytest.raises(ValueError, match=sentence):
        replace(good, **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scores": torch.zeros(2)}, "scores must be float64"),
        ({"scores": torch.zeros(3, dtype=torch.float64)}, "scores must be one an id"),
        ({"scores": torch.full((2,), float("inf"), dtype=torch.float64)}, "scores must be finite"),
        ({"ids": torch.zeros(2, dtype=torch.int64)}, "ids must be distinct"),
    ],
)
def test_scores_that_cannot_be_ranked_are_refused(change, sentence):
    good = MembershipScores(ids=torch.arange(2), scores=torch.zeros(2, dtype=torch.float64), exact=False)
    with pytest.raises(ValueError, match=sentence):
        replace(good, **change)


def test_total_variation_by_hand():
    image = torch.tensor([[[[0.0, 1.0], [2.0, 4.0]]]])
    # |dx|: 1, 2; |dy|: 2, 3.
    assert total_variation(image) == pytest.approx(1.5 + 2.5)
    assert total_variation(torch.ones(2, 3, 4, 4)) == 0
    assert total_variation(torch.ones(1, 1, 1, 1)) == 0


def test_a_box_maps_its_units_to_the_range_of_inputs():
    box = Box(-1.0, 3.0)
    assert box.inputs(torch.tensor([-2.0, 0.0, 2.0])).tolist() == [-1.0, 1.0, 3.0]
    assert box.project_(torch.tensor([-5.0, 5.0])).tolist() == [-2.0, 2.0]
    with pytest.raises(ValueError, match=r"low must be below high, got 1\.0 and 1\.0"):
        Box(1.0, 1.0)
