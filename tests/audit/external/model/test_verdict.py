"""The verdict where numbers decide nothing: scores the wrong way around, few candidates, a bound above a claim."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from leakbench.attacks.core import MembershipScores
from leakbench.audit.external.model.attacks import AttackOutcome
from leakbench.audit.external.model.findings import COMPARED, epsilon_bound, strongest
from leakbench.audit.external.model.verdict import backwards, right_answers, verdict, why_tied
from leakbench.audit.scoring import membership
from leakbench.audit.scoring.score import score
from leakbench.audit.scoring.shift import Shift
from leakbench.audit.scoring.truth import GroundTruth
from leakbench.leaderboard.records.audit_findings import AuditVerdict, EpsilonBound, Strongest

NO_SHIFT = Shift(p_value=0.5, auc=0.5, members=100, non_members=100, detectable=0.6)


def _scores(members, non_members):
    values = torch.tensor(np.concatenate([members, non_members]))
    return MembershipScores(ids=torch.arange(len(values)), scores=values, exact=False)


def _outcome(name, members, non_members):
    scores = _scores(members, non_members)
    truth = GroundTruth(members=scores.ids[: len(members)], candidates=scores.ids)
    return AttackOutcome(name=name, scores=scores, metrics=score(scores, truth))


def _told(*outcomes, detectable=0.6) -> AuditVerdict:
    by = [one for one in (strongest(outcomes, metric) for metric in COMPARED) if one is not None]
    members = np.arange(int(outcomes[0].metrics["auc"].detail["members"] or 0))
    bound = epsilon_bound(outcomes, members, delta=1e-5, level=0.95, split="unknown")
    return verdict(by, bound, NO_SHIFT, (), detectable, backwards(outcomes, members, detectable))


def test_scores_that_are_smaller_for_members_are_not_called_no_leak():
    draw = np.random.default_rng(0)
    found = _told(_outcome("loss", draw.normal(-2.0, size=300), draw.normal(size=300)))
    assert found.word == "cannot be told"
    assert "loss has an AUC of 0.0" in found.sentence
    # What is right as often as it is wrong is turned around by nobody, and a leak stays one beside such scores.
    blind = _outcome("blind", draw.normal(size=300), draw.normal(size=300))
    assert _told(blind).word == "no leak found"
    sees = _outcome("sees", draw.normal(2.0, size=300), draw.normal(size=300))
    assert _told(sees, _outcome("loss", draw.normal(-2.0, size=300), draw.normal(size=300))).word == "leaks"


def test_answers_to_pairs_that_are_wrong_are_told_where_the_auc_is_not():
    draw = np.random.default_rng(1)
    members, others = draw.normal(size=500), draw.normal(size=500)
    members[:40] -= 100
    found = _told(_outcome("a", members, others), detectable=0.7)
    assert found.word == "cannot be told"
    assert "a was wrong in" in found.sentence


@pytest.mark.long
def test_chance_is_called_the_wrong_way_around_in_few_audits(monkeypatch):
    monkeypatch.setattr(membership, "FPRS", {})  # an AUC and pairs decide it, and intervals of rates take most time
    draw, called, runs = np.random.default_rng(2), 0, 150
    for _ in range(runs):
        outcomes = [_outcome(f"a{i}", draw.normal(size=120), draw.normal(size=120)) for i in range(3)]
        called += bool(backwards(outcomes, np.arange(120), float(outcomes[0].metrics["auc"].detail["detectable"] or 1)))
    assert called <= stats.binom.ppf(0.9999, runs, 0.02)


def test_a_large_number_of_few_candidates_is_neither_a_leak_nor_none():
    draw = np.random.default_rng(3)
    found = _told(_outcome("a", draw.normal(5.0, size=12), draw.normal(size=12)), detectable=0.986)
    assert found.word == "cannot be told"
    assert "few candidates" in found.sentence
    # Of several attacks without halves the best proves nothing; it excludes nothing either.
    best = Strongest(metric="auc", attack="a", value=0.7, low=0.6, high=0.8, n=20, of_all=True, chance=0.5)
    assert verdict([best], "none", NO_SHIFT, (), 0.9).word == "cannot be told"
    assert verdict([replace(best, low=0.4)], "none", NO_SHIFT, (), 0.9).word == "no leak found"


@pytest.mark.parametrize(("value", "word"), [(1.5, "leaks"), (0.9, "within the claim")])
def test_right_answers_beyond_a_claim_are_not_within_it(value, word):
    """Of a split that nobody calls random they refute nothing, and are no sign that the claim holds."""
    bound = EpsilonBound(
        value=value, ceiling=2.5, attack="a", pairs=150, guessed=15, correct=15, looks=1, level=0.95, delta=1e-5,
        split="unknown", claimed=1.0,
    )  # fmt: skip
    draw = np.random.default_rng(4)
    blind = strongest([_outcome("a", draw.normal(size=150), draw.normal(size=150))], "auc", 0.6)
    assert blind is not None and not blind.found
    assert verdict([blind], bound, NO_SHIFT).word == word
    assert verdict([blind], replace(bound, split="random", claimed=2.0), NO_SHIFT).word == "within the claim"


@pytest.mark.parametrize(("delta", "level"), [(0.5, 0.95), (1e-5, 0.999999)])
def test_no_delta_and_no_level_hides_that_pairs_are_answered_rightly(delta, level):
    """A delta that a claim of epsilon 10 implies for replacement, and a level that nothing reaches."""
    draw = np.random.default_rng(5)
    members, others = draw.normal(size=800), draw.normal(size=800)
    members[:60] += 100
    outcomes, ids = [_outcome("a", members, others)], np.arange(800)
    bound = epsilon_bound(outcomes, ids, delta=delta, level=level, split="random")
    assert isinstance(bound, EpsilonBound) and bound.value < 0.5
    auc = strongest(outcomes, "auc", 0.999)
    assert auc is not None and not auc.found
    found = verdict([replace(auc, allowed=None)], bound, NO_SHIFT, (), 0.9, "", right_answers(outcomes, ids))
    assert found.word == "leaks"
    assert "of 80 answers" in found.sentence
    # What decided goes first, and an average that misses it is explained.
    assert found.sentence.startswith("This model leaks who was trained on: a was right in ")
    assert (found.by, found.how) == ("a", "pairs") and "An AUC is an average over all candidates" in found.sentence
    # Of a claim that implies nothing of replacement no answers go beyond it.
    large = verdict([auc], "the claim implies nothing", NO_SHIFT, (), 0.9, "", right_answers(outcomes, ids))
    assert large.word == "within the claim"


def test_what_weak_attacks_have_not_found_is_no_good_news():
    draw = np.random.default_rng(8)
    by = [strongest([_outcome("a", draw.normal(size=150), draw.normal(size=150))], "auc")]
    strong = verdict([one for one in by if one], "none", NO_SHIFT, (), 0.9)
    assert (strong.word, strong.tone, strong.headline) == ("no leak found", "good", "no leak found")
    weak = verdict([one for one in by if one], "none", NO_SHIFT, (), 0.9, weak="3 of 10 attacks")
    assert (weak.word, weak.tone) == ("no leak found", "neutral")
    assert weak.headline == "no leak found by 3 of 10 attacks" and "none of them with shadow models" in weak.sentence


def test_scores_that_tie_could_show_nothing_and_are_not_called_no_leak():
    few = np.zeros(300)
    few[:4] = 1.0
    outcomes = [_outcome("a", few, np.zeros(300))]
    said = why_tied(outcomes, 300, 0.6)
    assert "no attack that ran could have an AUC above 0.507, and a leak shows from 0.600" in said
    found = verdict([one for one in [strongest(outcomes, "auc")] if one], "none", NO_SHIFT, (), 0.6, tied=said)
    assert (found.word, found.tone, found.sentence) == ("cannot be told", "warn", said)
    # One attack whose scores differ could have shown it, and of half of equal scores an AUC of 0.6 can come.
    draw = np.random.default_rng(9)
    assert why_tied([*outcomes, _outcome("b", draw.normal(size=300), draw.normal(size=300))], 300, 0.6) == ""
    assert why_tied([_outcome("a", np.arange(300) % 2.0, (np.arange(300) % 3 > 0) * 1.0)], 300, 0.6) == ""
    # Two scores that could tell all from all are enough.
    assert why_tied([_outcome("a", np.ones(300), np.zeros(300))], 300, 0.999) == ""


def test_a_claim_that_something_else_refutes_is_not_said_to_be_refuted_by_pairs():
    bound = EpsilonBound(
        value=0.5, ceiling=2.5, attack="a", pairs=150, guessed=15, correct=14, looks=1, level=0.95, delta=1e-5,
        split="random", claimed=1.0,
    )  # fmt: skip
    found = verdict([], bound, NO_SHIFT, ["the transcript has too little noise"])
    assert (found.word, found.by, found.how) == ("claim refuted", "", "")
    found = verdict([], replace(bound, value=1.5), NO_SHIFT)
    assert (found.word, found.by, found.how) == ("claim refuted", "a", "pairs")


@pytest.mark.long
def test_answers_by_chance_are_called_a_leak_in_few_audits():
    draw, called, runs = np.random.default_rng(6), 0, 150
    for _ in range(runs):
        scores = [_scores(draw.normal(size=200), draw.normal(size=200)) for _ in range(3)]
        outcomes = [AttackOutcome(name=f"a{i}", scores=one) for i, one in enumerate(scores)]
        found = right_answers(outcomes, np.arange(200))
        called += isinstance(found, EpsilonBound) and found.value > 0
    assert called <= stats.binom.ppf(0.9999, runs, 0.05)
