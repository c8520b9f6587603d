"""What rules see: the strongest attack by any metric, no epsilon of a split that nobody calls random, and no doubt."""

from typing import Any

import numpy as np
import pytest
import torch

from leakbench.attacks.core import MembershipScores
from leakbench.audit.external.gate import rules
from leakbench.audit.external.model.attacks import AttackOutcome
from leakbench.audit.external.model.findings import strongest
from leakbench.audit.external.rule_numbers import judged, numbers_of_rules, unless_proved
from leakbench.audit.scoring.score import score
from leakbench.audit.scoring.shift import Shift
from leakbench.audit.scoring.truth import GroundTruth
from leakbench.leaderboard.records.audit_findings import AuditVerdict

NO_SHIFT = Shift(p_value=0.5, auc=0.5, members=100, non_members=100, detectable=0.6)
SHIFT = Shift(p_value=1e-4, auc=0.8, members=400, non_members=400, detectable=0.6)
LEAKS = AuditVerdict(word="leaks", sentence="It does.")


@pytest.fixture(scope="module")
def outcomes():
    draw, found = np.random.default_rng(0), []
    for name, shift in (("blind", 0.0), ("sees", 4.0)):
        values, ids = torch.tensor(draw.normal(size=4000)), torch.arange(4000)
        values[:2000] += shift
        scores = MembershipScores(ids=ids, scores=values, exact=False)
        truth = GroundTruth(members=ids[:2000], candidates=ids)
        found.append(AttackOutcome(name=name, scores=scores, metrics=score(scores, truth, delta=1e-5)))
    return found


def _broken(outcomes, text, verdict=LEAKS) -> Any:
    by = [one for one in (strongest(outcomes, "auc"),) if one is not None]
    asked = rules([text], ["blind", "sees"])
    return judged(asked, numbers_of_rules(outcomes, by, {}), verdict)[0].broken


@pytest.mark.parametrize(("split", "shift"), [("unknown", NO_SHIFT), ("random", SHIFT)])
def test_an_epsilon_of_one_attack_is_left_out_where_the_split_was_not_random(outcomes, split, shift):
    there = unless_proved(outcomes, split, shift)
    metric = there[1].metrics["epsilon_lower"]
    assert metric.value is None and metric.reason
    # A rule about it is not kept in silence.
    assert "was not measured" in _broken(there, "blind:epsilon_lower>1")
    assert "was not measured" in _broken(there, "sees:epsilon_lower>1")
    assert there[1].metrics["auc"] == outcomes[1].metrics["auc"]


def test_of_a_random_split_the_epsilon_of_an_attack_is_there(outcomes):
    there = unless_proved(outcomes, "random", NO_SHIFT)
    assert _broken(there, "blind:epsilon_lower>1") is None
    assert "lower end of sees's epsilon_lower" in _broken(there, "sees:epsilon_lower>1")


@pytest.mark.parametrize("metric", ["auc", "tpr_at_0.1pct_fpr", "advantage", "balanced_accuracy"])
def test_a_rule_without_an_attack_asks_the_strongest_by_any_metric(outcomes, metric):
    # The estimate: of so few a TPR at 0.1 % has no lower end above 0.
    assert f"the estimate of {metric} is" in _broken(outcomes, f"{metric}.value>0.5")
    assert _broken(outcomes, f"{metric}.value>0.9999") is None


def test_what_no_attack_could_measure_breaks_its_rule_with_the_reason():
    values, ids = torch.tensor(np.random.default_rng(1).normal(size=60)), torch.arange(60)
    truth = GroundTruth(members=ids[:30], candidates=ids)
    scores = MembershipScores(ids=ids, scores=values, exact=False)
    few = [AttackOutcome(name="blind", scores=scores, metrics=score(scores, truth))]
    assert "at least 100 non-members, got 30 members and 30 non-members" in _broken(few, "tpr_at_1pct_fpr>0.5")


def test_an_audit_that_cannot_tell_keeps_no_rule(outcomes):
    doubt = AuditVerdict(word="cannot be told", sentence="Nothing is known.")
    assert _broken(outcomes, "blind:auc>0.9") is None
    assert _broken(outcomes, "blind:auc>0.9", doubt) == "blind:auc>0.9: no rule is kept by an audit that cannot tell"
    assert "the lower end of auc is" in _broken(outcomes, "auc>0.9", doubt)
