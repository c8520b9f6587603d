"""Rules of an audit: which side of an interval they ask for, and what breaks them."""

import pytest

from leakbench.audit.external.gate import rules
from leakbench.leaderboard.records.record import Metric

from ...parameters import subtests

AUC = Metric(value=0.62, low=0.58, high=0.66, n=400, better="lower")
FOUND = {("rmia", "auc"): AUC, ("", "auc"): Metric(value=0.6, low=0.55, high=0.65, n=200, better="lower")}


@subtests(
    ("text", "breaks"),
    [
        ("rmia:auc>0.57", True),  # the lower end is above
        ("rmia:auc>0.6", False),  # the estimate is, and the lower end is not
        ("rmia:auc.value>0.6", True),
        ("rmia:auc.high>0.65", True),
        ("rmia:auc.high > 0.67", False),
        ("auc>0.56", False),  # of the strongest attack, on the half that had no say
        ("auc>0.54", True),
        ("auc<0.7", True),
        ("auc<0.6", False),
        ("auc.low<0.6", True),
    ],
)
def test_a_rule_asks_for_the_end_that_shows_it_broken(text, breaks):
    (rule,) = rules([text], ["rmia"])
    assert (rule.broken(FOUND) is not None) == breaks


def test_a_broken_rule_says_its_number():
    (rule,) = rules(["rmia:auc>0.5"], ["rmia"])
    assert rule.broken(FOUND) == "rmia:auc>0.5: the lower end of rmia's auc is 0.58 (estimate 0.62, n 400)"


def test_what_was_not_measured_is_no_pass():
    (rule,) = rules(["tpr_at_1pct_fpr>0.9"], ["rmia"])
    assert "no attack that ran has it" in str(rule.broken(FOUND))
    unmeasured = {("", "tpr_at_1pct_fpr"): Metric(value=None, better="lower", reason="too few non-members")}
    assert "too few non-members" in str(rule.broken(unmeasured))


def test_a_proved_lower_bound_is_its_own_lower_end():
    bound = {("", "epsilon_lower"): Metric(value=2.5, n=600, better="lower", reason="it is a low end by itself")}
    proved, excluded = rules(["epsilon_lower>2", "epsilon_lower.high>9"], [])
    assert proved.broken(bound) is not None
    assert "no high end" in str(excluded.broken(bound))


@subtests("text", ["auc", "auc>", "auc>nan", "auc>=0.5", "auc=0.5", "auc>0.5>0.4", ">0.5", "auc>inf"])
def test_what_is_no_rule_is_refused(text):
    with pytest.raises(ValueError, match="--fail-if must be"):
        rules([text], ["rmia"])


def test_unknown_names_are_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'tpr_at_1pct_fpr'"):
        rules(["tpr_at_1pc_fpr>0.1"], ["rmia"])
    with pytest.raises(ValueError, match="did you mean 'rmia'"):
        rules(["rmiaa:auc>0.1"], ["rmia"])
