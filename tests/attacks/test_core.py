"""Targets, narrowing, results and priors: what they refuse, and what a view withholds."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from leakbench.attacks.core import (
    Access,
    AccessError,
    Box,
    Controls,
    Examples,
    Knows,
    MembershipScores,
    ModelAccess,
    Observation,
    Reconstruction,
    Requirements,
    SeenTranscript,
    Steps,
    Target,
    attack,
    checked_reconstruction,
    checked_scores,
    narrow,
    total_variation,
)
from leakbench.attacks.core.targets.narrow import enabled_by
from leakbench.attacks.core.threat_model.requires import MEANING

from ..parameters import subtests
from . import toys, walker

UPDATE = toys.update_target()[0]


@subtests(
    "change, sentence",
    [
        ({"released": torch.zeros(2, 3)}, r"released must be floats of shape \[m\]"),
        ({"released": UPDATE.released * float("nan")}, "training diverged"),
        ({"input_high": 0.0}, "input_low must be below input_high"),
        ({"expected_batch": 0.0}, "expected_batch must be positive"),
        ({"sample_rate": 2.0}, r"sample_rate must be in \(0, 1\], got 2"),
        (
            {"sample_rate": 0.5},
            "participation must be 'known' where sample_rate is 1 and nowhere else, got 'known' at 0.5",
        ),
        ({"participation": "independent"}, "participation must be 'known' where .* got 'independent' at 1"),
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
        SeenTranscript(steps=iter([UPDATE]))


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


class Auditor:
    """Somebody with a secret, whose methods are handed out."""

    def __init__(self, secret: torch.Tensor) -> None:
        self.secret = secret

    def answer(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.flatten(1)[:, :4] * 0

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.answer(inputs)


def ways_to_hand_out_a_function(secret: torch.Tensor) -> list:
    auditor, cached = Auditor(secret), functools.lru_cache(Auditor(secret).answer)
    return [auditor, auditor.answer, functools.partial(auditor.answer), functools.partial(torch.mul, secret), cached]


@subtests("way", range(5))
def test_a_view_has_functions_and_not_what_they_belong_to(way):
    secret = torch.tensor([41.0, 42.0, 43.0])
    function = ways_to_hand_out_a_function(secret)[way]
    assert any(one is secret for one in walker.reached(function))  # the walk would find it
    view = narrow(replace(toys.model_target()[0], logits=function), Requirements(access=Access.BLACK_BOX))
    assert not any(one is secret for one in walker.reached(view))
    if way < 2:
        assert view.logits(torch.zeros(1, 1, 4, 4)).shape == (1, 4)


def test_a_view_has_tensors_and_not_what_they_were_cut_from():
    whole = toys.examples(50, (1, 4, 4), seed=3)
    cut = Examples(ids=whole.ids[:10], inputs=whole.inputs[:10], labels=whole.labels[:10])
    target = replace(toys.model_target()[0], candidates=cut, shadows=None, parameters={"w": whole.inputs[3]})
    left = whole.inputs[40].numpy().tobytes()
    assert any(left in walker.memory(one) for one in walker.reached(target))  # the walk would find it
    view = narrow(target, Requirements(access=Access.WHITE_BOX))
    assert not any(left in walker.memory(one) for one in walker.reached(view))
    assert view.candidates is not None and torch.equal(view.candidates.inputs, cut.inputs)
    assert view.parameters is not None and torch.equal(view.parameters["w"], whole.inputs[3])


def test_a_view_has_steps_and_not_who_makes_them():
    target, _ = toys.transcript(noise=1.0, steps=2)

    class Source:
        secret = torch.tensor([41.0, 42.0, 43.0])

        def __len__(self):
            return 2

        def __iter__(self):
            return iter(target.steps)

    source = Source()
    lazy = replace(target, steps=source)
    assert any(one is source for one in walker.reached(lazy))  # the walk would find it
    view = narrow(lazy, Requirements(access=Access.ALL_STEPS))
    assert not any(one is source or isinstance(one, Source) for one in walker.reached(view))
    assert len(view.steps) == 2 and [step.step for step in view.steps] == [0, 1]  # pyright: ignore[reportArgumentType]


def test_a_black_box_has_no_parameters():
    target, _ = toys.model_target()
    with pytest.raises(AccessError, match=r"Access\.WHITE_BOX.*ModelAccess\.parameters"):
        _ = narrow(target, Requirements(access=Access.BLACK_BOX)).parameters
    assert narrow(target, Requirements(access=Access.WHITE_BOX)).parameters is not None


def test_what_a_target_of_another_access_has_is_named_as_that():
    target, _ = toys.model_target()
    view: Any = narrow(target, Requirements(access=Access.BLACK_BOX))
    with pytest.raises(AttributeError, match=r"^ModelAccess has no 'contributions': Observation has, by another"):
        _ = view.contributions

    class Plain(Target):
        """Of somebody's own, and no dataclass."""

    assert not hasattr(view, "contribution") and Plain.accesses == ()
    with pytest.raises(AttributeError, match=r"^ModelAccess has no 'contribution'$"):
        _ = view.contribution
    # No field of any target grants control, so all kinds are looked through, this one among them.
    assert enabled_by(Controls.CANARIES) == f"{MEANING[Controls.CANARIES]} (Controls.CANARIES)"
    both = enabled_by(Knows.OTHERS | Knows.DEFENSE)
    assert both.count(" and ") >= 1 and all(enabled_by(one) in both for one in (Knows.OTHERS, Knows.DEFENSE))


def test_an_offer_is_what_is_filled():
    assert UPDATE.offered().knows == ~Knows.SHADOWS  # which are of a trained model
    assert replace(UPDATE, labels=None).offered().knows == ~(Knows.SHADOWS | Knows.LABELS)
    model, _ = toys.model_target()
    assert model.offered().knows == Knows.POPULATION | Knows.SHADOWS
    assert model.offered().access is Access.WHITE_BOX
    assert replace(model, parameters=None).offered().access is Access.BLACK_BOX


def test_requirements_are_recorded_by_name():
    needs = Requirements(access=Access.ALL_STEPS, knows=Knows.OTHERS | Knows.DEFENSE)
    assert needs.to_dict() == {"access": "ALL_STEPS", "knows": ["DEFENSE", "OTHERS"], "controls": []}


def test_a_function_of_another_shape_is_not_an_attack():
    def on_models(target: ModelAccess, coins: torch.Generator) -> MembershipScores:
        raise NotImplementedError

    def positional(target: Observation, coins: torch.Generator, steps: int = 3) -> MembershipScores:
        raise NotImplementedError

    def without_coins(target: Observation) -> MembershipScores:
        raise NotImplementedError

    with pytest.raises(TypeError, match=r"must be written \(target, generator, .*got target$"):
        attack(access=Access.UPDATE)(without_coins)
    with pytest.raises(TypeError, match="must be annotated as Observation"):
        attack(access=Access.UPDATE)(on_models)
    with pytest.raises(TypeError, match="got steps"):
        attack(access=Access.UPDATE)(positional)


@subtests(
    "change, sentence",
    [
        ({"inputs": torch.full((1, 3), float("nan"))}, "inputs must be finite"),
        ({"labels": torch.zeros(2, dtype=torch.int64)}, "labels must be int64, one an input"),
        ({"labels": torch.zeros(1)}, "labels must be int64, one an input"),
        ({"objective": float("inf")}, "objective must be finite"),
        ({"restarts": 0}, "restarts must be at least 1"),
        ({"inputs": torch.zeros(1, 3, dtype=torch.complex64)}, "inputs must be finite floats"),
        ({"history": torch.zeros(3, 10)}, r"history must be \[restarts, iterations\] with 1 restarts, got \[3, 10\]"),
    ],
)
def test_a_reconstruction_that_is_none_is_refused(change, sentence):
    good = Reconstruction(inputs=torch.zeros(1, 3), labels=torch.zeros(1, dtype=torch.int64), objective=0.0)
    with pytest.raises(ValueError, match=sentence):
        replace(good, **change)


@subtests(
    "change, sentence",
    [
        ({"scores": torch.zeros(2)}, "scores must be float64"),
        ({"scores": torch.zeros(3, dtype=torch.float64)}, "scores must be one an id"),
        ({"scores": torch.full((2,), float("inf"), dtype=torch.float64)}, "scores must be finite"),
        ({"ids": torch.zeros(2, dtype=torch.int64)}, "ids must be distinct"),
        ({"ids": torch.arange(2).double()}, "ids must be int64"),
    ],
)
def test_scores_that_cannot_be_ranked_are_refused(change, sentence):
    good = MembershipScores(ids=torch.arange(2), scores=torch.zeros(2, dtype=torch.float64), exact=False)
    with pytest.raises(ValueError, match=sentence):
        replace(good, **change)


IDS = torch.tensor([30, 10, 20])


def scores_of(ids, **changes) -> MembershipScores:
    ids = torch.as_tensor(ids)
    given = {"ids": ids, "scores": ids.double() / 10, "exact": False}
    return MembershipScores(**given | changes)


def test_scores_come_back_in_the_order_of_the_candidates():
    found = checked_scores(scores_of([10, 20, 30]), IDS)
    assert found.ids.tolist() == [30, 10, 20] and found.scores.tolist() == [3.0, 1.0, 2.0]


@subtests(
    "ids, sentence",
    [
        ([10, 20], "got 2: 0 are of no candidate, and 1 candidates have no score"),
        ([10, 20, 40], "got 3: 1 are of no candidate, and 1 candidates have no score"),
        ([10, 20, 30, 40], "got 4: 1 are of no candidate, and 0 candidates have no score"),
        ([-1, -2, -3], "got 3: 3 are of no candidate, and 3 candidates have no score"),
    ],
)
def test_scores_of_others_than_the_candidates_are_refused(ids, sentence):
    with pytest.raises(ValueError, match=f"ids must be those of the 3 candidates, each once, {sentence}"):
        checked_scores(scores_of(ids), IDS)


def test_an_answer_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="a membership attack must return MembershipScores, got Tensor"):
        checked_scores(torch.zeros(3), IDS)
    with pytest.raises(TypeError, match="a reconstruction attack must return Reconstruction, got MembershipScores"):
        checked_reconstruction(scores_of([1]), 1)


@subtests(
    "answer, field, check",
    [
        (scores_of([10, 20, 30]), "dependence", lambda answer: checked_scores(answer, IDS)),
        (
            Reconstruction(inputs=torch.zeros(1, 3), labels=torch.zeros(1, dtype=torch.int64), objective=0.0),
            "status",
            lambda answer: checked_reconstruction(answer, 1),
        ),
    ],
)
def test_a_word_that_no_answer_has_is_refused(answer, field, check):
    object.__setattr__(answer, field, "splendid")  # what goes on to a board as a flag
    with pytest.raises((ValueError, TypeError), match="splendid"):  # while tests run, types are checked first
        check(answer)


class Spy(torch.Tensor):
    """Is told of every operation that it takes part in, with what it is compared to."""


def test_an_answer_in_tensors_of_a_class_of_its_own_is_refused_before_it_is_compared_with_anything():
    spying = scores_of(IDS.as_subclass(Spy))
    with pytest.raises(TypeError, match="ids must be a plain tensor, got Spy"):
        checked_scores(spying, IDS)
    picture = Reconstruction(
        inputs=torch.zeros(1, 3).as_subclass(Spy), labels=torch.zeros(1, dtype=torch.int64), objective=0.0
    )
    with pytest.raises(TypeError, match="inputs must be a plain tensor, got Spy"):
        checked_reconstruction(picture, 1)


def test_an_answer_is_copied_by_pytorch_and_not_by_the_answer():
    picture = torch.zeros(1, 3)
    picture.detach = picture.clone = lambda: picture.as_subclass(Spy)  # pyright: ignore[reportAttributeAccessIssue]
    answer = Reconstruction(inputs=picture, labels=torch.zeros(1, dtype=torch.int64), objective=0.0)
    copy = checked_reconstruction(answer, 1).inputs
    assert type(copy) is torch.Tensor and not vars(copy)


def test_an_answer_that_was_changed_after_its_own_checks_is_checked_again():
    changed = scores_of([10, 20, 30])
    changed.scores[0] = float("nan")
    with pytest.raises(ValueError, match="scores must be finite"):
        checked_scores(changed, IDS)
    answer = scores_of([10, 20, 30])
    copy = checked_scores(answer, IDS)
    answer.scores.zero_()
    assert copy.scores.tolist() == [3.0, 1.0, 2.0]


def test_an_attack_that_scores_somebody_else_is_refused_where_it_was_called():
    @attack(access=Access.BLACK_BOX)
    def inventive(target: ModelAccess, coins: torch.Generator) -> MembershipScores:
        """Adds candidates of its own that it is sure about."""
        assert target.candidates is not None
        made_up = torch.arange(20_000) + 10**6
        scores = torch.cat([torch.zeros(len(target.candidates)), -torch.ones(len(made_up))]).double()
        target.candidates.ids.copy_(made_up[: len(target.candidates)])  # as if they had been asked about
        return MembershipScores(
            ids=torch.cat([target.candidates.ids, made_up[400:]]), scores=scores[:20_000], exact=True
        )

    with pytest.raises(
        ValueError, match="ids must be those of the 400 candidates, each once, got 20000: 20000 are of no"
    ):
        inventive(toys.model_target()[0])


def test_an_attack_that_returns_more_guesses_than_the_batch_has_examples_is_refused_where_it_was_called():
    @attack(access=Access.UPDATE, knows=Knows.POPULATION)
    def prolific(target: Observation, coins: torch.Generator) -> Reconstruction:
        """Returns everything that the batch might be."""
        assert target.population is not None
        return Reconstruction(inputs=target.population.inputs, labels=target.population.labels, objective=0.0)

    with pytest.raises(ValueError, match="inputs must be at most as many as the batch has examples, 1, got 16"):
        prolific(UPDATE)


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


@dataclass(frozen=True, kw_only=True)
class Rounds(Target):
    """A target of somebody's own that leads to observations by several ways."""

    accesses: ClassVar[tuple[Access, ...]] = (Access.FEDERATED,)
    rounds: Iterable[Observation]
    clients: tuple[Observation, ...]
    by_name: dict[str, Observation]
    candidates: Examples | None = None


def test_whatever_field_leads_to_further_targets_they_are_as_narrow():
    labelled = replace(UPDATE, labels=torch.zeros(1, dtype=torch.int64), batch_size=1)
    lazy = Steps(lambda: iter([labelled]), lambda: 1)
    view = narrow(
        Rounds(rounds=lazy, clients=(labelled,), by_name={"a": labelled}), Requirements(access=Access.FEDERATED)
    )
    assert len(list(view.rounds)) == len(list(view.clients)) == len(view.by_name) == 1
    for one in (*view.rounds, *view.clients, *view.by_name.values()):
        with pytest.raises(AccessError, match=r"did not declare Knows\.LABELS"):
            _ = one.labels


def test_an_access_of_our_name_that_includes_more_is_another_access():
    def greedy(target: ModelAccess, coins: torch.Generator) -> MembershipScores: ...

    with pytest.raises(TypeError, match="its target must be annotated as"):
        attack(access=Access("BLACK_BOX", "the answers of the final model", includes=("WHITE_BOX",)))(greedy)


def test_a_reconstruction_of_another_shape_is_the_attacks_mistake():
    @attack(access=Access.UPDATE, knows=Knows.LABELS)
    def flat(target: Observation, coins: torch.Generator) -> Reconstruction:
        """Returns one number an image."""
        labels = target.labels
        assert labels is not None
        return Reconstruction(inputs=torch.zeros(len(labels), 1), labels=labels, objective=0.0)

    with pytest.raises(ValueError, match=r"inputs must have the .*shape"):
        flat(UPDATE)
