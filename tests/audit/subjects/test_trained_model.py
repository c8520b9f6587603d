"""One training run and what its cells ask of it: who is a candidate, what is claimed, what flags say."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from leakbench.audit.evidence.claim_bounds import gaussian_auc, largest_auc
from leakbench.audit.plan.expand import plan
from leakbench.audit.plan.pretrain import starting_model
from leakbench.audit.plan.request import Request
from leakbench.audit.run.job import compute
from leakbench.audit.scoring import random_split
from leakbench.audit.subjects import trained_run as trained
from leakbench.audit.subjects.outcome import Outcome, candidate_pools, join
from leakbench.audit.subjects.trained_model import TrainedModel
from leakbench.audit.suite import suite as suites
from leakbench.audit.targets.candidates import Candidates, content_order
from leakbench.benchmarks import data
from leakbench.defenses.core.randomness.noise import CipherNoise

from ...parameters import long_but
from ..conftest import SUITE

CPU = torch.device("cpu")
ATTACKS = '{ name = "likelihood_ratio" }, { name = "loss_threshold" }, { name = "one_step_likelihood_ratio" }'
CONTROLLED = SUITE.replace("controls = false", "controls = true").replace(
    '{ name = "likelihood_ratio" }, { name = "loss_threshold" }', ATTACKS
)


def outcomes(suite, defense: str = "dp_sgd", control: str | None = None) -> dict[str | None, Outcome]:
    """Outcomes of one training by attack; None for utility."""
    (job,) = (
        job
        for job in plan(suite).jobs
        if (job.cells[0].request.defense.name, job.cells[0].request.control) == (defense, control)
    )
    done = compute(job.cells, CPU)
    return {cell.request.attack and cell.request.attack.name: outcome for cell, outcome in done}


def remarks(outcome: Outcome) -> list[str]:
    """Flags, without the one that tests on a single update always have."""
    return [flag for flag in outcome.flags if flag != "participation_known"]


@pytest.fixture(scope="module")
def controlled(tmp_path_factory) -> Callable[..., dict[str | None, Outcome]]:
    """What the suite with controls gives, computed once for all tests that only look at it."""
    path = tmp_path_factory.mktemp("suite") / "toy.toml"
    path.write_text(CONTROLLED, encoding="utf-8")
    suite = suites.load(path)
    return cache(lambda defense, control: outcomes(suite, defense, control))


@pytest.fixture
def private(controlled) -> dict[str | None, Outcome]:
    return controlled("dp_sgd", None)


def test_candidates_are_as_many_members_as_non_members_and_the_same_for_all_defenses(controlled, private):
    splits = data.load("digits", seed=0)
    ids = private["likelihood_ratio"].arrays["id"]
    assert len(ids) == 200 and not private["likelihood_ratio"].error
    inside = torch.isin(torch.tensor(ids), splits.private.ids)
    assert inside.sum() == 100
    assert (private["likelihood_ratio"].arrays["member"] == inside.numpy()).all()
    other = controlled("sgd", "positive")
    for attack in ("likelihood_ratio", "loss_threshold"):
        assert (private[attack].arrays["id"] == other[attack].arrays["id"]).all()


def test_with_secure_noise_the_samplers_key_is_nobodys(suite_of):
    """A key made of the request is in every record, and who took part no secret: what then amplifies nothing."""
    keys, assumed = {}, {}
    text = CONTROLLED.replace("batch = 70", "private = 80, batch = 40").replace("epsilon", "noise_multiplier")
    for secure in (False, True):
        jobs = plan(suite_of(text), secure_noise=secure).jobs
        (job,) = (
            job for job in jobs if (job.cells[0].request.defense.name, job.cells[0].request.control) == ("dp_sgd", None)
        )
        model = TrainedModel(job.cells[:1], CPU)
        claim = model.outcome(job.cells[0]).claim
        assert claim is not None
        keys[secure], assumed[secure] = model.model.run.sampler_key, " ".join(claim["assumes"])
        assert (keys[secure] == job.cells[0].request.seed_for("sampler")) == (not secure)
    assert keys[True].bit_length() > 128
    assert "sampler's key was given" in assumed[False] and "follows from a seed" in assumed[False]
    assert "sampler's key, drawn from the operating system" in assumed[True]


def test_one_update_is_judged_by_who_took_part_in_it(private):
    outcome = private["one_step_likelihood_ratio"]
    splits = data.load("digits", seed=0)
    members = torch.tensor(outcome.arrays["id"])[torch.tensor(outcome.arrays["member"])]
    assert 40 < len(members) < 100 and torch.isin(members, splits.private.ids).all()  # 70 expected
    others = torch.tensor(outcome.arrays["id"])[~torch.tensor(outcome.arrays["member"])]
    assert len(others) == 100 and torch.isin(others, splits.non_member.ids).all()  # as many as candidates are asked for


@pytest.mark.parametrize("attack", ["likelihood_ratio", "loss_threshold", "one_step_likelihood_ratio"])
def test_a_model_that_never_saw_the_members_is_measured_and_does_not_leak(controlled, attack):
    outcome = controlled("sgd", "negative")[attack]
    auc = outcome.metrics["auc"]
    assert auc.value is not None and auc.low is not None and auc.low <= 0.5 <= (auc.high or 0)
    assert outcome.task["trained_on"] == 397 and outcome.task["private"] == 700
    assert outcome.arrays["member"].sum() > 40


def test_sgd_leaks_through_its_updates_and_says_that_it_is_a_decision(controlled):
    found = controlled("sgd", "positive")
    # A member that Poisson sampling passed over in every step of the epoch cannot show.
    assert found["likelihood_ratio"].metrics["auc"].value == pytest.approx(1 - 0.9**10 / 2, abs=0.08)
    assert found["one_step_likelihood_ratio"].metrics["auc"].value == 1.0
    assert found["likelihood_ratio"].flags == ["deterministic"]
    assert found[None].flags == []
    claim = found[None].claim
    assert claim is not None and claim["epsilon"] is None and claim["reason"]
    assert found[None].noise == "none"


def test_the_claim_is_the_budget_and_says_what_it_allows(private):
    for outcome in private.values():
        assert outcome.claim is not None
        assert outcome.claim["epsilon"] == pytest.approx(3, rel=0.01) and outcome.claim["epsilon"] <= 3
        assert outcome.noise == "seeded" and outcome.noise_multiplier == private[None].noise_multiplier
        assert remarks(outcome) == []
    for metric, least in (("auc", 0.5), ("tpr_at_1pct_fpr", 0.01), ("advantage", 0.0), ("balanced_accuracy", 0.5)):
        largest = private["likelihood_ratio"].metrics[metric].detail["largest_under_claim"]
        assert isinstance(largest, float) and least < largest < 1


def test_what_was_resolved_is_told(private):
    assert private[None].task == {
        "digest": data.load("digits", seed=0).digest,
        "private": 700,
        "trained_on": 700,
        "non_member": 700,
        "public": 397,
        "tested_on": 700,
        "input_shape": [1, 8, 8],
        "public_in_distribution": True,
        "steps": 10,
        "sample_rate": 0.1,
        "parameters": 64 * 8 + 8 + 8 * 10 + 10,
    }
    assert private[None].engine == "layerwise"


def test_utility_has_the_cosine_of_successive_updates_that_the_transcript_shows(suite_of):
    jobs = plan(suite_of(CONTROLLED)).jobs
    for name, low, high in (("sgd", 0.1, 1.0), ("dp_sgd", -0.2, 0.2)):
        (job,) = (
            job
            for job in jobs
            if job.cells[0].request.defense.name == name and job.cells[0].request.control != "negative"
        )
        model = TrainedModel(job.cells, CPU)
        cell = next(cell for cell in job.cells if cell.kind == "utility")
        found = model.outcome(cell).metrics["successive_cosine"]
        updates = torch.stack([torch.cat(step.noisy or ()) for step in model.model.run.transcript.steps]).double()
        cosines = torch.cosine_similarity(updates[1:], updates[:-1])
        assert found.n == len(cosines) == 9 and found.value == pytest.approx(float(cosines.mean()), abs=1e-5)
        assert found.low is not None and low < float(cosines.mean()) < high


def test_a_cell_is_the_same_alone_and_after_others(suite_of, private):
    alone = outcomes(suite_of(CONTROLLED.replace(ATTACKS, '{ name = "loss_threshold" }')))["loss_threshold"]
    assert alone.metrics == private["loss_threshold"].metrics
    assert (alone.arrays["score"] == private["loss_threshold"].arrays["score"]).all()


@pytest.mark.long
def test_fewer_private_examples_are_fewer_members(suite_of):
    text = CONTROLLED.replace("batch = 70", "private = 80, batch = 40").replace("epsilon", "noise_multiplier")
    found = outcomes(suite_of(text))
    assert found[None].task["trained_on"] == 80 and found[None].task["sample_rate"] == 0.5
    assert len(found["likelihood_ratio"].arrays["id"]) == 160
    negative = outcomes(suite_of(text), "sgd", "negative")["one_step_likelihood_ratio"]
    assert 0 < negative.arrays["member"].sum() <= 80 and not negative.error


@pytest.mark.long
def test_noise_is_found_as_claimed_and_members_tell_where_gradients_are_of_views_and_the_model_is_an_average(suite_of):
    """The auditor finds the views that were drawn: without them a remainder would be more than the noise."""
    said = "views = 2, crop_padding = 1, horizontal_flip = false, average = 0.9"
    found = outcomes(suite_of(CONTROLLED.replace("candidates = 100", f"candidates = 100, {said}")))
    assert all(remarks(outcome) == [] and not outcome.error for outcome in found.values())
    silent = outcomes(suite_of(CONTROLLED.replace("candidates = 100", f"candidates = 100, {said}")), "sgd", "positive")
    assert silent["one_step_likelihood_ratio"].metrics["auc"].value == 1.0


@pytest.mark.long
def test_released_statistics_are_a_part_of_the_budget_and_of_what_is_attacked(suite_of, private):
    """Pixels standardised by two releases: noise is found as claimed, and the steps get what the budget leaves."""
    said = "statistics = { mean_norm = 4.0, square_norm = 3.0, noise_multiplier = 4 }"
    suite = suite_of(CONTROLLED.replace("candidates = 100", f"candidates = 100, {said}"))
    found = outcomes(suite)
    # Attacks on updates read the steps alone, as they were taken behind the statistics.
    for name, outcome in found.items():
        reads = name in ("likelihood_ratio", "one_step_likelihood_ratio")
        assert remarks(outcome) == (["one_off_not_attacked"] if reads else []) and not outcome.error
    claim, plain = found[None].claim, private[None]
    assert found[None].noise_multiplier is not None and plain.noise_multiplier is not None
    assert claim is not None and 2.97 < claim["epsilon"] <= 3
    assert list(claim["events"][:2]) == ["1 x Gaussian, noise 4 on all records"] * 2
    assert found[None].noise_multiplier > 1.04 * plain.noise_multiplier
    matched = outcomes(
        suite_of(CONTROLLED.replace('"dp_sgd"', '"noisy_sgd"').replace("epochs = 1", f"epochs = 1, {said}")),
        "noisy_sgd",
    )
    # An unbounded defense gets the noise that a bounded defense would need beside the same releases.
    assert matched[None].noise_multiplier == pytest.approx(found[None].noise_multiplier, rel=1e-3)


PRETRAIN = "pretrain = { epochs = 20, lr = 0.5, batch = 20, train = '%s' }"


@pytest.mark.long
def test_a_pretrained_model_is_attacked_says_so_and_learns_more_at_a_small_epsilon(suite_of):
    """What follows is private; 100 public examples of the same kind tell more than epsilon 1 lets 700 private ones."""
    # The noise of epsilon 1, whose search takes longer than everything else.
    text = CONTROLLED.replace("epsilon = 3.0", "noise_multiplier = 1.742").replace(
        "lr = 0.5,", "lr = 0.5, public = 100,"
    )
    scratch = outcomes(suite_of(text.replace(ATTACKS, "")))[None].metrics["accuracy"]
    for train in ("last", "all", "lora"):
        pretrain = (PRETRAIN % train).replace("'lora'", "'lora', rank = 2")
        found = outcomes(suite_of(text.replace("lr = 0.5,", f"lr = 0.1, {pretrain},")))
        for outcome in found.values():
            assert not outcome.error, train
            # No remark on the noise: it is found as claimed, also where most of the model is frozen.
            assert remarks(outcome) == ["public_in_distribution", "pretrained_on_public"], train
            assert outcome.claim is not None and 0.99 < outcome.claim["epsilon"] <= 1
            assert "the public examples are public, and tell nothing of the private ones" in outcome.claim["assumes"]
        low = found[None].metrics["accuracy"].low
        assert low is not None and scratch.high is not None and low > scratch.high + 0.2, train
        assert found["likelihood_ratio"].metrics["auc"].value == pytest.approx(0.5, abs=0.15), train


@pytest.mark.long
def test_a_linear_probe_moves_the_last_layer_and_not_one_bit_of_the_others(suite_of):
    suite = suite_of(CONTROLLED.replace("lr = 0.5,", f"lr = 0.5, {PRETRAIN % 'last'},"))
    for name, control in (("dp_sgd", None), ("sgd", "positive"), ("sgd", "negative")):
        (cell,) = (
            job.cells[0]
            for job in plan(suite).jobs
            if (job.cells[0].request.defense.name, job.cells[0].request.control) == (name, control)
        )
        model = TrainedModel((cell,), CPU).model
        before = starting_model(cell.request, model.splits, model.splits.public).state_dict()
        after = model.run.model.state_dict()
        moved = [key for key in before if not torch.equal(before[key], after[key])]
        assert moved == list(before)[-2:], (name, control)
        assert model.run.transcript.layout.dim == 8 * 10 + 10


def test_low_rank_adaptation_moves_products_and_the_last_layer_and_not_one_bit_of_the_others(suite_of):
    lora = (PRETRAIN % "lora").replace("'lora'", "'lora', rank = 2, alpha = 4.0")
    suite = suite_of(CONTROLLED.replace("lr = 0.5,", f"lr = 0.5, {lora},"))
    (cell,) = (job.cells[0] for job in plan(suite).jobs if job.cells[0].request.control == "positive")
    model = TrainedModel((cell,), CPU).model
    start = starting_model(cell.request, model.splits, model.splits.public)
    before, after = start.state_dict(), model.run.model.state_dict()
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert moved == ["1.down.weight", "1.up.weight", "3.weight", "3.bias"]
    assert [key for key in before if key not in moved] == ["1.frozen.weight", "1.frozen.bias"]
    assert start.get_submodule("1").scale == 2.0
    # Of 64 inputs and 8 hidden units; noise, and updates, have these dimensions alone.
    assert model.run.transcript.layout.dim == 2 * (64 + 8) + 8 * 10 + 10
    assert model.run.engine == "layerwise"


def test_members_of_a_pretrained_model_without_a_defense_still_show_and_a_model_that_never_saw_them_does_not_leak(
    suite_of,
):
    suite = suite_of(CONTROLLED.replace("lr = 0.5,", f"lr = 0.5, {PRETRAIN % 'last'},"))
    positive, negative = (outcomes(suite, "sgd", control) for control in ("positive", "negative"))
    assert positive["one_step_likelihood_ratio"].metrics["auc"].value == 1.0
    for attack in ("likelihood_ratio", "loss_threshold", "one_step_likelihood_ratio"):
        auc = negative[attack].metrics["auc"]
        assert auc.low is not None and auc.low <= 0.5 <= (auc.high or 0)


def test_a_training_that_diverged_is_flagged_and_its_attacks_fail_by_themselves(suite_of, monkeypatch):
    real = trained.OngoingRun.run

    def diverging(training):
        run = real(training)
        with torch.no_grad():
            next(run.model.parameters()).fill_(math.nan)
        return run

    monkeypatch.setattr(trained.OngoingRun, "run", diverging)
    found = outcomes(suite_of(CONTROLLED), "sgd", "positive")
    assert found[None].flags == ["diverged"]
    assert found[None].metrics["accuracy"].value == 0 and found[None].metrics["loss"].value is None
    assert found["likelihood_ratio"].flags == ["deterministic", "diverged"]  # the updates are what they were
    assert found["loss_threshold"].error.startswith("ValueError: scores must be finite")


@pytest.mark.long
def test_a_run_that_spent_more_than_its_budget_violates_its_claim(suite_of, monkeypatch):
    real = trained.defend

    def sloppy(request, examples):
        made, matched = real(request, examples)
        return made.with_noise(made.calibrated_multiplier / 2), matched

    monkeypatch.setattr(trained, "defend", sloppy)
    found = outcomes(suite_of(CONTROLLED))
    assert all(remarks(outcome) == ["claim_violated"] for outcome in found.values())


@pytest.mark.long
def test_noise_that_proves_nothing_is_flagged_as_matched(suite_of):
    text = CONTROLLED.replace('"dp_sgd"', '"noisy_sgd"')
    found = outcomes(suite_of(text), "noisy_sgd")
    assert found[None].flags == ["noise_matched"] and found[None].noise == "seeded"
    claim = found[None].claim
    assert claim is not None and claim["epsilon"] is None and "not bounded" in claim["reason"]


@pytest.mark.long
def test_less_noise_than_claimed_violates_the_claim_and_the_right_amount_does_not(suite_of, private, monkeypatch):
    assert not any(remarks(outcome) for outcome in private.values())
    real = CipherNoise.add
    monkeypatch.setattr(CipherNoise, "add", lambda self, sums, std: real(self, sums, std / 2))
    for outcome in outcomes(suite_of(CONTROLLED)).values():
        violated, found = remarks(outcome)
        assert violated == "claim_violated" and found in ("noise_0.49x_of_claimed", "noise_0.5x_of_claimed")


@pytest.mark.parametrize("kind", long_but(["nan"], ["constant", "repeated", "nan"]))
def test_noise_of_the_right_size_that_anybody_can_take_off_violates_the_claim(suite_of, monkeypatch, kind):
    def added(self, sums, std):
        drawn = torch.randn(len(sums), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return sums + std * {"constant": torch.ones_like(drawn), "repeated": drawn, "nan": drawn * math.nan}[kind]

    monkeypatch.setattr(CipherNoise, "add", added)
    flags = outcomes(suite_of(SUITE))[None].flags
    said = ["diverged", "noise_nanx_of_claimed"] if kind == "nan" else ["claim_violated", "dependent_noise"]
    assert flags == said


@pytest.mark.long
def test_who_is_asked_about_alone_gets_ids_that_follow_from_no_place_in_the_pools(suite_of, monkeypatch):
    told: list[str] = []
    alone: list[int] = []
    seed_for, draw = Request.seed_for, Candidates.draw
    monkeypatch.setattr(Request, "seed_for", lambda self, purpose: (told.append(purpose), seed_for(self, purpose))[1])

    def drawn(examples, key):
        alone.extend(examples.ids.tolist() if len(examples) == 1 else [])
        return draw(examples, key)

    monkeypatch.setattr(Candidates, "draw", drawn)
    cells = plan(suite_of(SUITE)).cells
    asked = ((one.request.attack and one.request.attack.name, one.request.defense.name) for one in cells)
    cell = next(one for one, names in zip(cells, asked, strict=True) if names == ("likelihood_ratio", "dp_sgd"))
    subject = TrainedModel((cell,), CPU)
    subject.outcome(cell)
    examples = join(*candidate_pools(subject.model.splits, subject.model.request.training.candidates, CPU))
    in_order = examples.ids[content_order(examples)].tolist()
    places = [int(purpose.split()[1]) for purpose in told if re.fullmatch(r"alone \d+ .*", purpose)]
    assert alone and sorted(places) == sorted(in_order.index(one) for one in alone)


@pytest.mark.long
def test_less_noise_than_claimed_in_one_release_beside_the_steps_is_found_there(suite_of, monkeypatch):
    real = CipherNoise.add
    # Of that release alone: its multiplier is 8, and that of the steps is 1.
    monkeypatch.setattr(CipherNoise, "add", lambda self, sums, std: real(self, sums, std / 2 if std == 8 else std))
    text = CONTROLLED.replace('"dp_sgd"', '"dp_snip"').replace("epsilon = 3.0", "noise_multiplier = 1.0")
    flags = outcomes(suite_of(text), "dp_snip")[None].flags
    assert flags[0] == "claim_violated" and len(flags) == 2
    assert re.fullmatch(r"noise_0\.(4[5-9]|5\d?)x_of_claimed_in_one_off_0", flags[1])


@pytest.mark.long
def test_more_noise_than_claimed_is_said_and_violates_nothing(suite_of, monkeypatch):
    real = CipherNoise.add
    monkeypatch.setattr(CipherNoise, "add", lambda self, sums, std: real(self, sums, 1.5 * std))
    assert outcomes(suite_of(CONTROLLED))[None].flags == ["noise_1.5x_of_claimed"]


def test_scores_lie_beside_a_record_in_the_order_of_the_data_set(private):
    for attack in ("likelihood_ratio", "one_step_likelihood_ratio"):
        ids = private[attack].arrays["id"]
        assert (ids[1:] > ids[:-1]).all()


@pytest.mark.parametrize(
    "sampling",
    [
        *long_but(["shuffle", "full"], ["poisson", "shuffle", "full", "random_allocation"]),
        *(pytest.param(other, marks=pytest.mark.slow) for other in ("partition", "fixed")),
        pytest.param('cyclic", groups = 3, engine = "auto', marks=pytest.mark.long),
        # dp-accounting walks over its losses in Python here.
        pytest.param('truncated_poisson", largest_batch = 90, engine = "auto', marks=pytest.mark.slow),
    ],
)
def test_the_ratio_of_a_run_is_called_the_most_powerful_test_where_it_is_one(suite_of, sampling):
    text = CONTROLLED.replace("batch = 70", f'batch = 70, sampling = "{sampling}"').replace(
        "controls = true", "controls = false"
    )
    text = text.replace("epsilon = 3.0", "noise_multiplier = 1.0")
    found = outcomes(suite_of(text))
    flagged = {name for name, outcome in found.items() if "not_most_powerful" in outcome.flags}
    # Where who takes part in one step tells of others, a product over steps is no likelihood.
    assert flagged == (set() if sampling in ("poisson", "full") else {"likelihood_ratio"})
    assert not [outcome.error for outcome in found.values() if outcome.error]


@pytest.mark.parametrize("name", long_but(["dp_ftrl"], ["dp_ftrl", "dpsur"]))
def test_correlated_noise_and_trials_leave_no_ratio_the_most_powerful_test(suite_of, name):
    text = CONTROLLED.replace("controls = true", "controls = false").replace("epsilon = 3.0", "noise_multiplier = 1.0")
    found = outcomes(suite_of(text.replace('"dp_sgd"', f'"{name}"')), name)
    assert "not_most_powerful" in found["likelihood_ratio"].flags
    assert "not_most_powerful" not in found["one_step_likelihood_ratio"].flags


@pytest.mark.long
@pytest.mark.parametrize(("name", "flagged"), [("dp_snip", True), ("random_sparsification", False)])
def test_a_release_before_the_steps_is_attacked_by_itself_and_with_them_and_who_does_not_read_it_says_so(
    suite_of, name, flagged
):
    text = CONTROLLED.replace("controls = true", "controls = false").replace("epsilon = 3.0", "noise_multiplier = 1.0")
    text = text.replace(ATTACKS, f'{ATTACKS}, {{ name = "one_off_likelihood_ratio" }}')
    found = outcomes(suite_of(text.replace('"dp_sgd"', f'"{name}"')), name)
    assert {attack for attack, one in found.items() if "one_off_not_attacked" in one.flags} == (
        {"one_step_likelihood_ratio"} if flagged else set()
    )
    alone = found["one_off_likelihood_ratio"]
    if not flagged:
        assert "nothing is released of gradients beside the steps" in alone.skipped
        return
    assert not alone.error and remarks(alone) == []
    # Bounded by its own Gaussian, of multiplier 8, and not by the steps, which are charged as much more.
    assert alone.metrics["auc"].detail["largest_under_claim"] == pytest.approx(gaussian_auc(1 / 8), rel=1e-3)
    both = found["likelihood_ratio"].metrics["auc"].detail["largest_under_claim"]
    assert isinstance(both, float) and both > gaussian_auc(1 / 8) + 0.05
    assert alone.metrics["auc"].n == 200


def test_who_reads_a_release_without_noise_beside_noisy_steps_makes_decisions(suite_of):
    text = CONTROLLED.replace("controls = true", "controls = false").replace("epsilon = 3.0", "noise_multiplier = 1.0")
    text = text.replace(ATTACKS, f'{ATTACKS}, {{ name = "one_off_likelihood_ratio" }}')
    found = outcomes(suite_of(text.replace('"dp_sgd"', '"snip"')), "snip")
    decided = {attack for attack, one in found.items() if "deterministic" in one.flags}
    assert decided == {"likelihood_ratio", "one_off_likelihood_ratio"}  # the last step alone is noisy
    assert all(found[attack].metrics["auc"].value == 1.0 for attack in decided)


@pytest.mark.long
def test_a_clip_norm_that_adapts_by_name_is_trained_with_attacked_and_claimed_as_one_gaussian_a_step(suite_of):
    text = CONTROLLED.replace("controls = true", "controls = false").replace("epsilon = 3.0", "noise_multiplier = 1.0")
    entries = ['"random_sparsification"', '"random_sparsification", bound = "adaptive"']
    plain, adaptive = (
        outcomes(suite_of(text.replace('"dp_sgd"', entry)), "random_sparsification") for entry in entries
    )
    assert not [outcome.error for outcome in adaptive.values() if outcome.error]
    claims = [found[None].claim or {} for found in (adaptive, plain)]
    assert claims[0]["epsilon"] == pytest.approx(claims[1]["epsilon"], rel=1e-9)
    assert adaptive[None].metrics["accuracy"] != plain[None].metrics["accuracy"]
    # Nor is its noise, that of the count included, found to be other than claimed.
    assert adaptive["likelihood_ratio"].flags == plain["likelihood_ratio"].flags


def test_what_scores_mean_is_not_the_attacks_own_word(suite_of, site):
    source = """
from leakbench.attacks.core import Access, MembershipScores, ModelAccess, attack

@attack(access=Access.BLACK_BOX)
def boaster(target: ModelAccess, coins) -> MembershipScores:
    \"\"\"Says that its scores are decisions, and the best there are.\"\"\"
    ids = target.candidates.ids
    return MembershipScores(ids=ids, scores=ids.double(), exact=True, deterministic=True)
"""
    site.add("attacks", "boaster", source)
    found = outcomes(suite_of(CONTROLLED.replace(ATTACKS, '{ name = "boaster" }')))
    assert remarks(found["boaster"]) == []


def test_what_one_update_may_show_is_not_amplified_by_sampling(private):
    sigma = private["one_step_likelihood_ratio"].noise_multiplier
    assert sigma is not None
    found = private["one_step_likelihood_ratio"].metrics["auc"].detail["largest_under_claim"]
    # Nor is it all that is seen: nine sampled steps have left the record in the parameters it was taken at.
    assert gaussian_auc(1 / sigma) + 1e-3 < found < gaussian_auc(10**0.5 / sigma)
    # Of ten steps that a tenth takes part in: less than of one pair of epsilon and delta, and of ten unsampled ones.
    amplified = private["likelihood_ratio"].metrics["auc"].detail["largest_under_claim"]
    assert 0.5 < amplified < min(largest_auc(3.0, 1e-5), gaussian_auc(10**0.5 / sigma)) - 0.1


def test_nothing_is_trained_before_a_cell_asks(suite_of, monkeypatch):
    monkeypatch.setattr(trained, "OngoingRun", lambda *_, **__: pytest.fail("trained"))
    TrainedModel(plan(suite_of(SUITE)).jobs[0].cells, CPU)


PUBLIC = CONTROLLED.replace('{ name = "dp_sgd" }', '{ name = "pcdp", rank = 3 }').replace("epsilon", "noise_multiplier")


@pytest.mark.long
def test_who_reads_public_data_is_flagged_and_who_does_not_is_not(suite_of):
    assert remarks(outcomes(suite_of(PUBLIC), "pcdp")[None]) == ["public_in_distribution"]
    assert remarks(outcomes(suite_of(PUBLIC), "sgd", "positive")[None]) == []


@pytest.mark.long
def test_a_negative_control_that_reads_public_data_trains_on_one_half_and_reads_the_other(suite_of, monkeypatch):
    real, seen = trained.OngoingRun, []

    def watch(model, examples, public, settings):
        assert public is not None
        seen.append((len(examples[0]), len(public[0])))
        together = torch.cat([examples[0], public[0]]).flatten(start_dim=1)
        assert len(together.unique(dim=0)) == len(together)
        return real(model, examples, public, settings)

    monkeypatch.setattr(trained, "OngoingRun", watch)
    found = outcomes(suite_of(PUBLIC), "pcdp", "negative")
    assert seen == [(198, 199)]
    assert not found[None].error and found["loss_threshold"].metrics["auc"].value is not None


@pytest.mark.long
def test_a_negative_control_trains_on_no_more_than_there_are_members(suite_of):
    text = CONTROLLED.replace("batch = 70", "private = 80, batch = 40").replace("epsilon", "noise_multiplier")
    found = outcomes(suite_of(text), "dp_sgd", "negative")
    assert found[None].task["trained_on"] == 80
    assert found[None].task["sample_rate"] == 0.5


@pytest.mark.long
def test_a_run_that_outgrows_its_memory_is_taken_once_more_for_who_reads_every_step(suite_of, private, monkeypatch):
    monkeypatch.setattr(trained, "TRANSCRIPT_MEMORY", 10_000)
    monkeypatch.setattr(trained, "WATCHED", 2)
    real, taken = trained.OngoingRun.step, []

    def counted(training, step, **check):
        taken.append(step)
        return real(training, step, **check)

    monkeypatch.setattr(trained.OngoingRun, "step", counted)
    again = outcomes(suite_of(CONTROLLED))
    # For training, for everybody, and for the four that are asked about alone, together; each looks at step 0 before.
    assert sorted(taken) == sorted([*range(10)] * 3 + [0, 0])
    for name, found in again.items():
        assert not found.error and found.metrics == private[name].metrics and found.flags == private[name].flags
    assert "claim_violated" not in again[None].flags


@pytest.mark.long
def test_noise_that_cannot_be_drawn_again_refuses_who_reads_every_step_of_a_long_run_and_nobody_else(
    suite_of, monkeypatch
):
    monkeypatch.setattr(trained, "TRANSCRIPT_MEMORY", 10_000)
    (_, job) = plan(suite_of(SUITE), secure_noise=True).jobs  # of sgd and of dp_sgd
    found = {cell.request.attack and cell.request.attack.name: outcome for cell, outcome in compute(job.cells, CPU)}
    assert "noise must be seeded for steps to be taken once more, got secure: nobody" in found["likelihood_ratio"].error
    assert not found[None].error and not found["loss_threshold"].error


def test_the_watched_steps_are_spread_out_and_the_last_is_among_them():
    assert trained.watched(3) == [0, 1, 2]
    many = trained.watched(3200)
    assert len(many) == trained.WATCHED and many[-1] == 3199
    assert max(b - a for a, b in itertools.pairwise(many)) <= 101


# Of 300 examples; noise is given, because the search for that of an epsilon takes longer than everything else.
FEW = SUITE.replace("batch = 70", "batch = 20").replace("epsilon", "noise_multiplier")


@pytest.fixture
def own(tmp_path) -> str:
    """Name of 300 examples of noise, beside an official test set of 40."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (340, 8, 8), dtype=np.uint8), draw.integers(0, 3, 340)
    np.savez(tmp_path / "own.npz", x_train=x[:300], y_train=y[:300], x_test=x[300:], y_test=y[300:])
    return f"npz:{tmp_path / 'own.npz'}"


@pytest.mark.long
def test_utility_is_measured_on_the_test_set_where_there_is_one(suite_of, own):
    found = outcomes(suite_of(FEW.replace("digits", own)))
    assert found[None].task["tested_on"] == 40
    assert found[None].metrics["accuracy"].n == 40
    assert found["loss_threshold"].metrics["auc"].n == 200


@pytest.mark.long
def test_where_the_test_set_stands_in_for_non_members_the_record_says_so(suite_of, own):
    text = FEW.replace('"digits"', f'"{own}", private = 300, non_member = 0, public = 0')
    found = outcomes(suite_of(text))
    assert found["loss_threshold"].metrics["auc"].n == 80
    assert found["loss_threshold"].flags == ["non_members_are_test"]
    assert "non_members_are_test" not in found[None].flags
    controlled = text.replace("controls = false", "controls = true")
    (lost,) = {outcome.error for outcome in outcomes(suite_of(controlled), "sgd", "negative").values()}
    assert "the negative control trains on public examples; set task.public, or controls = false" in lost


def test_a_method_that_needs_public_data_says_so_where_there_are_none(suite_of, own):
    text = FEW.replace('"digits"', f'"{own}", public = 0')
    text = text.replace('{ name = "dp_sgd" }', '{ name = "pcdp", rank = 3 }')
    assert "this method needs public data, got none" in outcomes(suite_of(text), "pcdp")[None].error


def test_a_random_split_proves_something_of_attacks_that_were_told_nobodys_membership(private):
    for name, outcome in private.items():
        if name is None:
            continue
        found = outcome.metrics["epsilon_lower"]
        if name == "loss_threshold":
            assert found.value is not None and float(found.detail["claimed"] or 0) > found.value
        else:
            assert found.value is None and found.reason


@pytest.mark.long
def test_a_bound_above_what_the_claim_implies_refutes_it(monkeypatch, suite_of):
    real = random_split.epsilon_lower

    def forged(*arguments):
        found = real(*arguments)
        return dataclasses.replace(found, detail=found.detail | {"value_at_verdict": 1e6})

    monkeypatch.setattr(random_split, "epsilon_lower", forged)
    found = outcomes(suite_of(CONTROLLED))
    assert "claim_violated" in found["loss_threshold"].flags
    assert "claim_violated" not in found["likelihood_ratio"].flags
