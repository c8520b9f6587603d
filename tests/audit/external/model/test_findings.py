"""The strongest attack, the bound on epsilon, exposure, the verdict: golden numbers, and error rates under chance."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from leakbench.attacks.core import MembershipScores
from leakbench.audit.evidence.one_run import Guesses, one_run
from leakbench.audit.external.claim import StatedClaim
from leakbench.audit.external.examples.identity import ids_of
from leakbench.audit.external.model.attacks import AttackOutcome
from leakbench.audit.external.model.findings import (
    COMPARED,
    allowed_by,
    epsilon_bound,
    exposure,
    strongest,
)
from leakbench.audit.external.model.verdict import verdict
from leakbench.audit.scoring import membership
from leakbench.audit.scoring.shift import Shift
from leakbench.leaderboard.records.audit_findings import EpsilonBound

from .test_verdict import NO_SHIFT, _outcome


def _bound(*arguments, **settings) -> EpsilonBound:
    found = epsilon_bound(*arguments, **settings)
    assert isinstance(found, EpsilonBound)
    return found


def _by(outcomes):
    return [one for one in (strongest(outcomes, metric) for metric in COMPARED) if one is not None]


@pytest.mark.long
def test_chance_is_called_a_leak_in_few_audits(monkeypatch):
    monkeypatch.setattr(membership, "FPRS", {"tpr_at_1pct_fpr": 0.01})
    draw, called, flattered, runs = np.random.default_rng(0), 0, 0, 200
    for _ in range(runs):
        outcomes = [_outcome(f"a{i}", draw.normal(size=150), draw.normal(size=150)) for i in range(4)]
        called += verdict(_by(outcomes), "none", NO_SHIFT).word == "leaks"
        best = max(outcomes, key=lambda one: one.metrics["auc"].value or 0.0)
        flattered += (best.metrics["auc"].low or 0.0) > 0.5
    # Two questions, each wrong in at most 2.5 % of all audits.
    assert called <= stats.binom.ppf(0.9999, runs, 0.05)
    # The best of four by their own numbers of all candidates is what the halves are there to prevent.
    assert flattered > called


def test_a_leak_is_called_one_by_the_attack_that_finds_it():
    draw = np.random.default_rng(1)
    outcomes = [
        _outcome("blind", draw.normal(size=400), draw.normal(size=400)),
        _outcome("sees", draw.normal(1.0, 1.0, size=400), draw.normal(size=400)),
    ]
    found = verdict(_by(outcomes), "none", NO_SHIFT)
    assert found.word == "leaks"
    assert "sees has an AUC of 0.7" in found.sentence
    assert "blind" not in found.sentence


def test_the_number_shown_is_of_the_half_that_did_not_choose():
    draw = np.random.default_rng(2)
    one = _outcome("a", draw.normal(size=300), draw.normal(size=300))
    other = _outcome("b", draw.normal(size=300), draw.normal(size=300))
    chosen = strongest([one, other], "auc")
    assert chosen is not None
    detail = {"a": one, "b": other}[chosen.attack].metrics["auc"].detail
    assert chosen.value == detail["report_value"]
    values = [float(x.metrics["auc"].detail["calibration_value"] or 0.0) for x in (one, other)]
    assert detail["calibration_value"] == max(values)


def test_without_halves_the_largest_of_several_is_no_evidence():
    few = [_outcome(name, np.array([1.0, 2.0, 3.0]), np.array([0.0])) for name in ("a", "b")]
    chosen = strongest(few, "auc")
    assert chosen is not None
    assert chosen.of_all
    assert not chosen.found


def test_a_shift_leaves_no_verdict_but_a_refuted_claim_none_the_less():
    draw = np.random.default_rng(3)
    outcomes = [_outcome("sees", draw.normal(2.0, 1.0, size=400), draw.normal(size=400))]
    shift = Shift(p_value=1e-4, auc=0.8, members=400, non_members=400, detectable=0.6)
    assert verdict(_by(outcomes), "none", shift).word == "cannot be told"
    assert verdict(_by(outcomes), "none", shift, ["noise of half the scale"]).word == "claim refuted"


def test_the_bound_divides_the_level_among_attacks_that_ran_or_failed():
    members = np.arange(400)
    perfect = _outcome("perfect", np.linspace(1, 2, 400), np.zeros(400))
    alone = _bound([perfect], members, delta=1e-5, level=0.95, split="random")
    assert alone.value == pytest.approx(one_run(Guesses(400, 40, 40), 1e-5, 0.95))
    broken = AttackOutcome(name="broken", why_not="it failed", failed=True)
    skipped = AttackOutcome(name="skipped", why_not="it needs shadow models")
    beside = _bound([perfect, broken, skipped], members, delta=1e-5, level=0.95, split="random")
    assert beside.looks == 2
    assert beside.value == pytest.approx(one_run(Guesses(400, 40, 40), 1e-5, 0.975))


def test_scores_that_tell_classes_alone_prove_nothing():
    """Both files sorted by class, as owners have them: matched by place, one class would meet another always."""
    above, runs = 0, 60
    for seed in range(runs):
        draw = np.random.default_rng(seed)
        classes = np.repeat(np.arange(10), 40)
        member = np.zeros(400, dtype=bool)
        for kind in range(10):  # half of each class at random
            member[draw.permutation(np.flatnonzero(classes == kind))[:20]] = True
        names = np.concatenate([np.flatnonzero(member), np.flatnonzero(~member)])
        ids = ids_of(str(i).encode() for i in names)
        scores = MembershipScores(ids=ids, scores=torch.tensor(classes[names] / 10), exact=False)
        bound = _bound(
            [AttackOutcome(name="a", scores=scores)], ids[:200].numpy(), delta=0.0, level=0.9, split="random"
        )
        above += bound.value > 0
    assert above <= stats.binom.ppf(0.9999, runs, 0.1)


@pytest.mark.parametrize("attacks", [1, 5])
def test_the_bound_is_above_0_in_few_audits_of_nothing(attacks):
    draw, above, runs = np.random.default_rng(4), 0, 150
    for _ in range(runs):
        outcomes = []
        for i in range(attacks):
            # Heavy tails, where single gaps are huge.
            values = draw.standard_cauchy(size=200)
            scores = MembershipScores(ids=torch.arange(200), scores=torch.tensor(values), exact=False)
            outcomes.append(AttackOutcome(name=f"a{i}", scores=scores))
        bound = _bound(outcomes, np.arange(100), delta=0.0, level=0.9, split="random")
        above += bound.value > 0
    assert above <= stats.binom.ppf(0.9999, runs, 0.1)


def test_a_claim_is_refuted_where_the_split_is_said_to_be_random():
    members = np.arange(1000)
    perfect = _outcome("perfect", np.linspace(1, 2, 1000), np.zeros(1000))
    settings = {"delta": 0.5, "level": 0.95}
    found = _bound([perfect], members, split="random", claim=(2.0, 1e-5), **settings)
    assert (found.claimed, found.delta) == (2.0, 1e-5)
    assert found.refutes
    assert found.needed is not None
    assert 0.9 < found.needed < 1.0
    assert not _bound([perfect], members, split="unknown", claim=(2.0, 1e-5), **settings).refutes
    # 100 right answers prove no epsilon of 6, and the report says that nothing could have.
    assert _bound([perfect], members, split="random", claim=(6.0, 1e-5), **settings).needed is None
    told = epsilon_bound([perfect], members, split="random", claim=(6.0, 1.0), **settings)
    assert isinstance(told, str)
    assert "implies nothing" in told


@pytest.mark.long
def test_the_share_that_is_needed_refutes_with_the_power_that_is_said():
    bound = _bound(
        [_outcome("p", np.linspace(1, 2, 1000), np.zeros(1000))],
        np.arange(1000),
        delta=1e-5,
        level=0.95,
        split="random",
        claim=(1.0, 1e-5),
    )
    assert bound.needed is not None and bound.claimed is not None
    draw = np.random.default_rng(5)
    right = draw.binomial(bound.guessed, bound.needed, size=2000)
    counts = np.unique(right)
    bounds = [one_run(Guesses(bound.pairs, bound.guessed, int(v)), bound.delta, 0.95) for v in counts]
    power = np.isin(right, counts[np.array(bounds) > bound.claimed]).mean()
    assert power == pytest.approx(0.8, abs=0.04)


def test_few_pairs_give_a_reason_and_no_number():
    few = _outcome("a", np.ones(9), np.zeros(9))
    found = epsilon_bound([few], np.arange(9), delta=1e-5, level=0.95, split="random")
    assert found == "a bound needs at least 10 pairs of a member and a non-member, got 9"
    assert epsilon_bound([], np.arange(9), delta=1e-5, level=0.95, split="random") == "no attack ran"


def test_exposure_names_members_by_the_rate_at_which_they_are_found():
    # Members 0 to 99, of which the first ten stand above all others; non-members 100 to 199.
    values = np.concatenate([np.arange(300, 290, -1), np.arange(90) * 2, np.arange(100) * 2 + 1])
    found = exposed(values)
    assert found.ids == tuple(range(10)) and found.nobody == ""
    assert found.labels == (0, 1) * 5 and found.above == (0.0,) * 10
    assert set(found.classes) == {0, 1}


def exposed(values, members=100, most=12):
    ids = torch.arange(len(values))
    one = AttackOutcome(name="a", scores=MembershipScores(ids=ids, scores=torch.tensor(values).double(), exact=False))
    return exposure(one, np.arange(members), {i: i % 2 for i in range(len(values))}, most=most)


def test_members_who_share_a_score_with_as_many_others_are_not_named():
    tie = np.concatenate([np.full(30, 5.0), np.zeros(70), np.full(40, 5.0), np.zeros(60)])
    found = exposed(tie)
    assert found.ids == () and found.nobody.startswith("nobody stands out: 30 members share the highest score, and 40")
    # Whom a tie would cut in two is not named, and those above it are.
    above = np.concatenate([np.arange(109, 100, -1), np.full(50, 5.0), np.zeros(41), np.zeros(100)])
    assert exposed(above).ids == tuple(range(9))


@pytest.mark.long
def test_somebody_is_named_by_chance_in_few_audits():
    draw = np.random.default_rng(0)
    named = sum(bool(exposed(draw.normal(size=200)).ids) for _ in range(300))
    assert named <= stats.binom.ppf(0.9999, 300, 0.01)
    assert "nobody stands out: of the 12 highest scores" in exposed(draw.normal(size=200)).nobody


def test_a_bound_that_refutes_is_the_verdict():
    bound = EpsilonBound(
        value=2.5, ceiling=2.5, attack="a", pairs=600, guessed=60, correct=60, looks=1, level=0.95, delta=1e-5,
        split="random", claimed=2.0,
    )  # fmt: skip
    found = verdict([], bound, NO_SHIFT)
    assert found.word == "claim refuted"
    assert "a was right in 60 of 60 answers" in found.sentence


def test_a_level_is_never_rounded_up():
    settings: Any = {"value": 1.5, "ceiling": 2.5, "attack": "a", "pairs": 600, "guessed": 60, "correct": 57}
    for level, shown in ((0.95, "95%"), (0.975, "97.5%"), (0.9999, "99.99%")):
        bound = EpsilonBound(**settings, looks=1, level=level, delta=1e-5, split="random")
        assert f"{shown} confidence" in verdict([], bound, NO_SHIFT).sentence


def test_right_answers_to_pairs_are_evidence_of_a_leak_by_themselves():
    settings: Any = {"value": 1.5, "ceiling": 2.5, "attack": "a", "pairs": 600, "guessed": 60, "correct": 57}
    bound = EpsilonBound(**settings, looks=1, level=0.95, delta=1e-5, split="random")
    found = verdict([], bound, NO_SHIFT)
    assert found.word == "leaks"
    assert "an epsilon of at least 1.50" in found.sentence
    unknown = EpsilonBound(**settings, looks=1, level=0.95, delta=1e-5, split="unknown")
    # Of an unknown split it is as good as any score that tells members from non-members, and no epsilon.
    found = verdict([], unknown, NO_SHIFT)
    assert found.word == "leaks"
    assert "right in 57 of 60" in found.sentence
    assert "epsilon" not in found.sentence
    shift = Shift(p_value=1e-4, auc=0.8, members=400, non_members=400, detectable=0.6)
    assert verdict([], unknown, shift).word == "cannot be told"


def test_what_a_claim_allows_is_no_alarm():
    draw = np.random.default_rng(6)
    outcomes = [_outcome("sees", draw.normal(0.5, 1.0, size=600), draw.normal(size=600))]
    most = allowed_by(StatedClaim(epsilon=1.0).trade_off)
    assert 0.65 < most["auc"] < 0.8
    by = [one for one in (strongest(outcomes, metric, most[metric]) for metric in COMPARED) if one is not None]
    assert by[0].found
    assert verdict(by, "none", NO_SHIFT).word == "within the claim"
    # A claim that allows less excuses nothing.
    by = [one for one in (strongest(outcomes, metric, 0.51) for metric in COMPARED) if one is not None]
    assert verdict(by, "none", NO_SHIFT).word == "leaks"
