"""The numbers of an attack submission: the rival is chosen without the scores on which both are compared."""

from pathlib import Path
from statistics import fmean

import pytest
from scipy import stats

from leakbench.leaderboard.submissions.attack_cells import attack_cells, attack_table
from leakbench.leaderboard.submissions.check import CheckedSubmission

from ..conftest import metric, record
from .declarations import declaration

METHOD = {"file": "mine.py", "function": "by_loss", "sha256": "1" * 64}
NAME = "mine.py:by_loss"


def halves(value, calibration, report):
    detail = {"calibration_value": calibration, "report_value": report, "report_low": report - 0.05}
    detail |= {"report_high": report + 0.05, "calibration_low": calibration - 0.05}
    return metric(
        value, 0.05, detail=detail | {"calibration_high": calibration + 0.05, "calibration_n": 50, "report_n": 50}
    )


def checked(*records, kind="attack"):
    declared = declaration(kind=kind, method=METHOD if kind != "run" else None)
    return CheckedSubmission("bob/0", Path("nowhere"), declared, "0" * 32, tuple(records), ())


def made(attack, numbers, **fields):
    return [record(seed=seed, attack=attack, metrics={"auc": number}, **fields) for seed, number in enumerate(numbers)]


def test_the_rival_is_chosen_on_one_half_and_both_are_compared_on_the_other_paired_over_seeds():
    own = [0.62, 0.66, 0.61]
    strong = [0.70, 0.71, 0.74]
    records = made(NAME, [halves(0.6, 0.55, value) for value in own])
    records += made("strong", [halves(0.7, 0.9, value) for value in strong])
    # Larger on the half of the report and on all candidates, so a choice by either would take it.
    records += made("lucky", [halves(0.95, 0.5, 0.99) for _ in own])
    (cell,) = [cell for cell in attack_cells(checked(*records)) if cell.metric == "auc"]
    assert (cell.other.attack, cell.others, cell.chosen_on) == ("strong", 2, "calibration half")
    assert cell.own.value == pytest.approx(0.6)
    assert cell.own_compared.value == pytest.approx(fmean(own)) and cell.other.value == pytest.approx(fmean(strong))
    differences = [a - b for a, b in zip(own, strong, strict=True)]
    expected = stats.t.interval(0.95, 2, fmean(differences), stats.sem(differences))
    assert cell.difference.value == pytest.approx(fmean(differences))
    assert cell.difference.ends == pytest.approx(expected)
    words = attack_table("bob/0", [cell])
    assert "strong of 2" in words and "chosen on one half" in words and "-0.087 [" in words


def test_without_halves_the_choice_is_by_the_numbers_shown_and_is_said_to_favour_the_rival():
    records = made(NAME, [metric(0.6, 0.05)] * 2) + made("a", [metric(0.7, 0.05)] * 2)
    cells = attack_cells(checked(*records, *made("b", [metric(0.65, 0.05)] * 2)))
    (cell,) = [cell for cell in cells if cell.metric == "auc"]
    assert (cell.other.attack, cell.chosen_on) == ("a", "the same scores")
    assert cell.difference.ends is None and "equal over seeds" in str(cell.difference.reason)
    assert "favours the other attack" in attack_table("bob/0", cells)


def test_one_seed_has_no_paired_interval_and_a_rival_with_fewer_seeds_is_no_rival():
    records = made(NAME, [metric(0.6, 0.05)] * 2) + made("short", [metric(0.99, 0.001)])
    records += made("whole", [metric(0.65, 0.05), metric(0.7, 0.05)])
    (cell,) = [cell for cell in attack_cells(checked(*records)) if cell.metric == "auc"]
    assert (cell.other.attack, cell.others, cell.on_fewer_seeds) == ("whole", 1, 1)
    assert "whole; 1 on fewer seeds left out" in attack_table("bob/0", [cell])
    single = attack_cells(checked(*made(NAME, [metric(0.6, 0.05)]), *made("whole", [metric(0.65, 0.05)])))
    assert "one seed" in str(single[0].difference.reason) and "one seed" in attack_table("bob/0", single)


def test_an_attack_that_does_not_apply_is_shown_with_its_reason_and_one_without_a_rival_with_none():
    skipped = record(attack=NAME, status="skipped", reason=f"{NAME} does not apply: no logits in /home/bob/x.py")
    cells = attack_cells(checked(skipped, *made("whole", [metric(0.65, 0.05)])))
    assert cells[0].own.value is None and "does not apply: no logits in x.py" in str(cells[0].own.reason)
    (alone,) = [c for c in attack_cells(checked(*made(NAME, [metric(0.6, 0.05)]))) if c.metric == "auc"]
    assert alone.other.value is None and alone.difference.value is None and alone.others == 0


def test_other_submissions_have_no_such_table():
    assert attack_cells(checked(*made(NAME, [metric(0.6, 0.05)]), kind="run")) == ()
