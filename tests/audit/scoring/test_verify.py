"""Records whose numbers, flags or knowledge their scores and the rest of them do not support."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audit.scoring.verify import contradiction
from leaderboard.records.record import Record

from ..conftest import SUITE
from ..run.runs import run

Shelf = tuple[Path, Record, Record]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Shelf:
    """A folder, and records of an attack on answers and of an informed one."""
    folder = tmp_path_factory.mktemp("results")
    found = {r.attack.name: r for r in run(SUITE, folder) if r.attack and r.defense.name == "dp_sgd"}
    return folder / "records", found["loss_threshold"], found["likelihood_ratio"]


def forged(record: Record, name: str, **detail: Any) -> Record:
    metric = record.metrics[name]
    return replace(record, metrics=record.metrics | {name: replace(metric, detail=metric.detail | detail)})


def test_records_as_they_were_written_contradict_nothing(shelf):
    folder, plain, informed = shelf
    assert contradiction(plain, folder) == contradiction(informed, folder) == ""


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        # What a board chooses the strongest attack by, and what it shows of that one.
        ("auc", {"calibration_value": 0.01}),
        ("auc", {"report_value": 0.51, "report_low": 0.5, "report_high": 0.52}),
        ("tpr_at_1pct_fpr", {"fp": 0}),
        ("advantage", {"report_value": -1.0}),
        # What a verdict on the claim rests on.
        ("epsilon_lower", {"value_at_verdict": 9.0}),
        ("epsilon_lower", {"correct": 0}),
        ("epsilon_lower", {"ceiling": 99.0}),
    ],
)
def test_what_a_detail_counts_is_counted_again(shelf, name, detail):
    folder, record, _ = shelf
    said = contradiction(forged(record, name, **detail), folder)
    key, value = next(iter(detail.items()))
    assert said.startswith("the ") and f"of its {name} is" in said and (key in said or str(value) not in said)


def test_a_number_that_older_records_lack_is_not_missed(shelf):
    folder, record, _ = shelf
    auc = record.metrics["auc"]
    older = replace(auc, detail={key: value for key, value in auc.detail.items() if "report" not in key})
    assert contradiction(replace(record, metrics=record.metrics | {"auc": older}), folder) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"flags": ("participation_known",)}, "against its access, BLACK_BOX"),
        ({"flags": ("distribution_shift",)}, "against its p-value"),
        ({"requires": {"access": "BLACK_BOX", "knows": ["OTHERS"], "controls": []}}, "loss_threshold is given"),
        ({"requires": {"access": "UPDATE", "knows": [], "controls": []}}, "its epsilon_lower is none"),
    ],
)
def test_a_bound_is_not_left_out_by_a_flag_that_the_rest_of_the_record_contradicts(shelf, change, words):
    folder, record, _ = shelf
    hidden = replace(record.metrics["epsilon_lower"], value=None, reason="the attack was told", detail={})
    made = replace(record, metrics=record.metrics | {"epsilon_lower": hidden}, **change)
    assert words in contradiction(made, folder)


def test_a_refuted_claim_is_flagged_and_no_claim_of_replacement_is_below_that_of_removal(shelf, monkeypatch):
    folder, record, _ = shelf
    assert record.claim is not None and record.claim.epsilon is not None
    low = forged(record, "epsilon_lower", claimed=record.claim.epsilon / 2)
    assert "in the place of another it says" in contradiction(low, folder)
    # A bound above the claim, as if its scores gave it.
    refuted = forged(record, "epsilon_lower", value_at_verdict=10 * record.claim.epsilon)
    monkeypatch.setattr("audit.scoring.verify._alike", lambda a, b: True)
    assert "and it is not flagged" in contradiction(refuted, folder)
    assert contradiction(replace(refuted, flags=("claim_violated",)), folder) == ""


def test_a_record_without_a_budget_is_scored_again_without_a_delta(shelf):
    folder, record, _ = shelf
    bare = replace(record, budget={})
    assert contradiction(bare, folder) == ""
    assert "the report_value of its auc" in contradiction(forged(bare, "auc", report_value=0.9), folder)
