"""Records whose numbers, flags or knowledge their scores and the rest of them do not support."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leakbench.audit.run import verify
from leakbench.audit.run.claims import multiplier_fault
from leakbench.audit.run.verify import contradiction
from leakbench.audit.scoring import membership
from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.record import Metric, Record, RecordError

from ...parameters import subtests
from ..conftest import INVERSION, SHARE, SUITE
from .runs import run

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


@subtests(
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


@subtests(
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
    high = forged(record, "epsilon_lower", claimed=100.0)
    assert "its claim allows an epsilon of" in contradiction(high, folder)
    # A bound above the claim, as if its scores gave it.
    refuted = forged(record, "epsilon_lower", value_at_verdict=10 * record.claim.epsilon)
    monkeypatch.setattr(membership, "again", lambda record, table: dict(refuted.metrics))
    assert "and it is not flagged" in contradiction(refuted, folder)
    assert contradiction(replace(refuted, flags=("claim_violated",)), folder) == ""
    for change in ({"claimed": 1e6}, {"claimed": None}):
        assert contradiction(forged(refuted, "epsilon_lower", **change), folder)


@subtests("key", ["claimed", "value_at_verdict"])
def test_what_a_claim_is_judged_by_is_not_removed(shelf, key):
    folder, record, _ = shelf
    bound = record.metrics["epsilon_lower"]
    cut = replace(bound, detail={name: value for name, value in bound.detail.items() if name != key})
    said = contradiction(replace(record, metrics=record.metrics | {"epsilon_lower": cut}), folder)
    assert said == f"its epsilon_lower has no {key}, by which its claim is judged"


def test_a_bound_is_not_removed_whole(shelf):
    folder, record, _ = shelf
    metrics = {name: metric for name, metric in record.metrics.items() if name != "epsilon_lower"}
    assert contradiction(replace(record, metrics=metrics), folder).startswith("it has no epsilon_lower, and its scores")


def test_a_record_without_a_budget_is_scored_again_without_a_delta(shelf, monkeypatch):
    folder, record, _ = shelf
    bare = replace(record, budget={})
    monkeypatch.setattr(verify, "claim_fault", lambda record: "")  # which no budget bounds
    assert contradiction(bare, folder) == ""
    assert "the report_value of its auc" in contradiction(forged(bare, "auc", report_value=0.9), folder)


def claimed(record: Record, **change: Any) -> Record:
    assert record.claim is not None
    return replace(record, claim=replace(record.claim, **change))


def test_a_claim_has_to_follow_from_steps_noise_and_budget(shelf):
    folder, record, _ = shelf
    claim, noise = record.claim, record.noise_multiplier
    assert claim is not None and claim.epsilon is not None and noise is not None
    smaller = contradiction(claimed(record, epsilon=claim.epsilon / 10), folder)
    assert re.fullmatch(r"its epsilon [0-9.]+ does not follow from its steps, which prove [0-9.]+", smaller)
    # More noise than there was proves the smaller epsilon, and is not what the budget was calibrated to.
    louder = replace(claimed(record, epsilon=claim.epsilon / 2), noise_multiplier=20 * noise)
    assert "is not that of its budget" in contradiction(louder, folder)
    assert "its delta 1e-12 is not that of its budget" in contradiction(claimed(record, delta=1e-12), folder)
    assert "no noise multiplier" in contradiction(replace(record, noise_multiplier=None), folder)
    assert contradiction(claimed(record, epsilon=2 * claim.epsilon), folder) == ""  # it claims less
    for task in (record.task | {"steps": 0}, {k: v for k, v in record.task.items() if k != "trained_on"}):
        said = contradiction(replace(claimed(record, epsilon=claim.epsilon / 10), task=task), folder)
        assert "its steps cannot be counted" in said or "does not follow from its steps" in said


@pytest.mark.long
def test_a_claim_of_batches_of_fixed_size_follows_from_the_event_that_amplifies_them(tmp_path):
    text = re.sub(r"batch = (\d+)", r'batch = \1, sampling = "fixed"', SUITE, count=1)
    records = [one for one in run(text, tmp_path) if one.defense.name == "dp_sgd" and one.claim is not None]
    record = next(one for one in records if one.attack and one.attack.name == "loss_threshold")
    claim, folder = record.claim, tmp_path / "records"
    assert claim is not None and claim.epsilon is not None and claim.relation == "replace_one"
    assert [contradiction(one, folder) for one in records] == [""] * len(records)
    assert "does not follow from its steps" in contradiction(claimed(record, epsilon=0.9 * claim.epsilon), folder)
    for relation in ("add_remove", "zero_out"):
        assert "and its steps prove one of 'replace_one'" in contradiction(claimed(record, relation=relation), folder)
    # Noise that Poisson samples of that size would need.
    quiet = replace(record, noise_multiplier=(record.noise_multiplier or 0.0) / 2)
    assert "does not follow from its steps" in contradiction(quiet, folder)


@pytest.mark.long
def test_a_claim_of_a_nominal_size_follows_from_its_rate_and_steps(tmp_path):
    text = re.sub(r"batch = (\d+)", r"batch = \1, nominal_size = 1400", SUITE, count=1)
    record = next(one for one in run(text, tmp_path) if one.defense.name == "dp_sgd" and one.kind == "membership")
    claim, folder = record.claim, tmp_path / "records"
    assert claim is not None and claim.epsilon is not None and claim.relation == "add_remove"
    assert (record.task["sample_rate"], record.task["steps"], record.task["nominal_size"]) == (0.05, 20, 1400)
    assert not any("number of examples is public" in sentence for sentence in claim.assumes)
    assert contradiction(record, folder) == ""
    assert "does not follow from its steps" in contradiction(claimed(record, epsilon=0.9 * claim.epsilon), folder)
    run(text, tmp_path)  # kept, as it follows from what is asked for


@pytest.mark.long
@pytest.mark.parametrize(("defense", "local"), [("blt", ""), ("dp_sgd", ", local = { batch = 2, epochs = 2 }")])
def test_the_claim_of_a_share_follows_from_the_steps_that_its_client_shares(tmp_path, defense, local):
    share = SHARE.replace("step = 1", f'step = 2, batch = 4, noise = ["calibrated"]{local}')
    text = SUITE.replace('{ name = "likelihood_ratio" }, { name = "loss_threshold" }', INVERSION)
    text = text.replace('{ name = "sgd" }, { name = "dp_sgd" }', f'{{ name = "{defense}" }}')
    record = next(record for record in run(text + share, tmp_path) if record.kind == "reconstruction")
    assert record.claim is not None and record.claim.epsilon is not None
    folder = tmp_path / "records"
    assert contradiction(record, folder) == ""
    run(text + share, tmp_path)  # kept, as it follows from what is asked for
    less = contradiction(claimed(record, epsilon=0.9 * record.claim.epsilon), folder)
    assert "does not follow from its steps" in less
    bare = {key: value for key, value in record.task.items() if key != "step"}
    assert "its steps cannot be counted" in contradiction(replace(record, task=bare), folder)


@subtests(
    ("change", "words"),
    [
        (
            {"relation": "replace_one"},
            "the relation of its claim is 'replace_one', and its steps prove one of 'add_rem",
        ),
        ({"unit": "client"}, "the unit of its claim is 'client'"),
        ({"sampling": "full"}, "the sampling of its claim is 'full'"),
        ({"epsilon_rdp": 0.0}, "its epsilon by RDP is 0, and its steps give"),
    ],
)
def test_what_a_claim_says_beside_its_epsilon_follows_from_its_steps(shelf, change, words):
    folder, record, _ = shelf
    assert words in contradiction(claimed(record, **change), folder)


@subtests("name", ["DP_SGD", "dp_sgd ", "dp-sgd", "dp_sgd\u200b"])
def test_the_claim_of_a_defense_that_nobody_knows_is_not_verified(shelf, name):
    folder, record, _ = shelf
    other = replace(record, defense=replace(record.defense, name=name))
    assert "is none that is known here" in contradiction(other, folder)


@subtests(
    "budget",
    [
        {"noise_multiplier": 1.0, "delta": 1e-5},
        {"advantage": 0.9, "delta": 1e-5},
        {"tpr": 0.5, "fpr": 0.01, "delta": 1e-5},
        {"delta": 1e-5},
    ],
)
def test_noise_that_is_not_what_a_budget_gives_is_no_proof(shelf, budget):
    folder, record, _ = shelf
    assert record.noise_multiplier is not None and record.claim is not None
    louder = replace(record, noise_multiplier=20 * record.noise_multiplier, budget=budget)
    assert "its budget" in contradiction(louder, folder)


@subtests(
    "broken",
    [
        {"noise_multiplier": 1e-300},
        {"budget": {"delta": None, "epsilon": 3.0}},
        {"budget": {"delta": 1e-5, "epsilon": "8"}},
        {"steps": 0},
        {"steps": "4"},
        {"steps": 0.9},
        {"steps": 10**7},
        {"sample_rate": 2.0},
    ],
)
def test_whatever_is_written_into_a_record_ends_in_a_sentence(shelf, broken):
    folder, record, _ = shelf
    task = record.task | {key: value for key, value in broken.items() if key in record.task}
    fields = {key: value for key, value in broken.items() if key not in record.task}
    try:
        said = contradiction(replace(record, task=task, **fields), folder)
    except RecordError as error:  # of another type
        said = str(error)
    assert said and "\n" not in said


def test_no_setting_of_a_method_takes_the_place_of_the_budget(shelf):
    folder, record, _ = shelf
    assert record.noise_multiplier is not None
    own = replace(record.defense, settings=record.defense.settings | {"noise_multiplier": record.noise_multiplier})
    assert "unknown setting 'noise_multiplier'" in contradiction(replace(record, defense=own), folder)


def test_noise_of_a_share_is_that_of_its_training(tmp_path):
    text = SUITE.replace('{ name = "sgd" }, ', "").replace('{ name = "likelihood_ratio" }', INVERSION)
    records = run(text + SHARE, tmp_path)
    share = next(one for one in records if one.kind == "reconstruction" and one.noise_multiplier)
    assert [multiplier_fault(one, records) for one in records] == [""] * len(records)
    louder = replace(share, noise_multiplier=20 * (share.noise_multiplier or 0.0))
    assert "is not that of its training" in multiplier_fault(louder, records)
    assert multiplier_fault(louder, [share]) == ""  # nothing was trained beside it


def test_the_claim_of_a_defense_that_is_given_by_its_path_is_not_looked_at(shelf):
    folder, record, _ = shelf
    assert record.claim is not None and record.claim.epsilon is not None
    own = replace(claimed(record, epsilon=record.claim.epsilon / 10), defense=replace(record.defense, name="m.py:own"))
    assert contradiction(own, folder) == ""


@pytest.mark.parametrize("written_without", [True, False])
def test_what_an_extra_would_have_measured_is_no_contradiction(shelf, monkeypatch, written_without):
    """It is null with its reason, where a record was written or where it is verified."""
    folder, record, _ = shelf
    assert set(verify.OF_EXTRAS) <= set(METRICS)
    monkeypatch.setattr(verify, "OF_EXTRAS", ("advantage",))  # as if an attack on membership needed a package
    number = record.metrics["advantage"]
    missing = "SSIM needs torchmetrics, which is not installed: pip install 'leakbench[images]'"
    absent = Metric(value=None, n=number.n, better=number.better, reason=missing)
    own = membership.again

    def verdict(said: Metric, again: Metric) -> str:
        monkeypatch.setattr(membership, "again", lambda *asked: own(*asked) | {"advantage": again})
        return contradiction(replace(record, metrics=record.metrics | {"advantage": said}), folder)

    pair = (absent, number) if written_without else (number, absent)
    assert verdict(*pair) == ""
    unexplained = tuple(m if m is number else replace(m, reason="images are too small") for m in pair)
    assert "its advantage is" in verdict(*unexplained)


@pytest.mark.long
def test_arrays_of_very_many_rows_are_no_scores(shelf, tmp_path):
    _, record, _ = shelf
    rows = pa.table({name: pa.array(np.zeros(10**6)) for name in ("id", "score", "member")})
    with pq.ParquetWriter(tmp_path / str(record.arrays), rows.schema, compression="zstd") as file:
        for _ in range(50):
            file.write_table(rows)
    said = contradiction(record, tmp_path)
    assert "cannot be scored: a Parquet file of" in said and "declares 150000000 values" in said
