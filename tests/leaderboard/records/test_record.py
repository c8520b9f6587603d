"""A record is read back equal or not at all, and is on disk whole or not at all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakbench.leaderboard.records.details import Detail
from leakbench.leaderboard.records.record import (
    MethodUsed,
    Metric,
    Provenance,
    Record,
    RecordedClaim,
    RecordedRequirements,
    RecordError,
    Reported,
    read,
    read_all,
    write,
)
from leakbench.leaderboard.records.task import TrainingTask

from ...parameters import subtests

FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | FINITE | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


EMPTY = {"low": None, "high": None, "n": None, "better": "lower", "reason": None, "detail": {}}


def with_value(text, path, value):
    """The JSON text with the value at a dotted path replaced; Ellipsis removes it."""
    data = json.loads(text)
    *parents, last = path.split(".")
    inner = data
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(data)


@given(settings=st.dictionaries(st.text(max_size=8), PLAIN, max_size=4), value=FINITE, seconds=st.floats(0, 1e9))
def test_any_record_is_read_back_equal(settings, value, seconds):
    record = Record(
        id="0123456789abcdef", suite="s", suite_digest="d", kind="membership", seed=0, device="cpu",
        defense=MethodUsed(name="dp_sgd", settings=settings), task=settings,
        attack=MethodUsed(name="a", settings={"x": (1, 2)}),
        metrics={"m": Metric(value=value, low=value, high=value, better="lower", detail=Detail({"fp": 3}))},
        provenance=Provenance(version="1", source="0" * 64), seconds=seconds,
        requires=RecordedRequirements({"knows": ("OTHERS",)}), flags=("f",),
        claim=RecordedClaim(epsilon=None, delta=1e-5, relation="add_remove", sampling="full", accountant="PLD",
                    events=("one", "two"), reason="no noise"),
        reported=(Reported(metric="auc", value=0.5, source="Table 1"),),
    )  # fmt: skip
    assert Record.from_json(record.to_json()) == record


def test_infinite_epsilon_is_null_with_its_reason(record, claim):
    data = json.loads(record(claim=claim(None)).to_json())
    assert data["claim"]["epsilon"] is None
    assert data["claim"]["reason"] == "no noise is added"


@subtests(
    "path, value, fault",
    [
        ("seed", ..., "key 'seed' is missing"),
        ("metrics.auc.n", ..., "key 'n' is missing in metrics.auc"),
        ("colour", 1, "key 'colour' is unknown"),
        ("defense.colour", 1, "key 'colour' is unknown in defense"),
        ("schema", 1, "schema must be 2 for this version of the code, got 1; compute it again by leakbench run"),
        ("seal", ..., "it was edited after it was written"),
        ("seconds", 7.0, "it was edited after it was written; compute it again by leakbench run --recompute"),
        ("claim.epsilon", 0.5, "it was edited after it was written"),
        ("seed", "0", "seed must be an integer, got '0'"),
        ("seed", True, "seed must be an integer, got True"),
        ("seed", 0.5, "seed must be an integer, got 0.5"),
        ("seconds", None, "seconds must be a finite number, got None"),
        ("seconds", -1, "seconds must not be negative"),
        ("metrics.auc.value", "0.7", "metrics.auc.value must be a finite number, got '0.7'"),
        ("metrics.auc.value", 0.999, r"metrics.auc.value must lie in its interval \[0.6.*, 0.7.*\], got 0.999"),
        ("metrics.auc", {**EMPTY, "value": 1.5}, r"metrics.auc.value must be in \[0, 1\], got 1.5"),
        ("metrics.accuracy", {**EMPTY, "value": 0.5}, "metrics.accuracy must be in a utility record, got kind"),
        ("metrics.auc.value", None, "metrics.auc.reason must say why value is null"),
        ("metrics.auc.low", None, "metrics.auc.low and high must come together"),
        ("metrics.auc.low", 0.9, "metrics.auc.low must be at most high"),
        ("metrics.auc.better", "higher", "metrics.auc.better must be 'lower'"),
        ("metrics.auc.better", "up", "metrics.auc.better must be one of higher, lower, got 'up'"),
        ("metrics", {}, "metrics must not be empty"),
        ("metrics", [], "metrics must be an object, got"),
        ("flags", "claim_violated", "flags must be a list, got 'claim_violated'"),
        ("kind", "utility", "attack must be null in utility or federation or rounds records only"),
        ("kind", "reconstruction", "task.noise must be 'none' or 'calibrated'"),
        ("status", "failed", "reason must be given when status is 'failed'"),
        ("id", "../../etc/passwd", "id must be 16 or more hexadecimal"),
        ("arrays", "../scores.parquet", "arrays must be the name of a file"),
        ("arrays", "scores.parquet", "arrays and arrays_digest must come together"),
        ("provenance.source", "abc", "provenance.source must be a SHA-256"),
        ("provenance.dirty", True, "provenance.commit and dirty must come together"),
        ("claim.epsilon", None, "claim.reason must say why epsilon is null"),
        ("claim.delta", 1, r"claim.delta must be in \[0, 1\)"),
        ("claim.sample_rate", 2, r"claim.sample_rate must be in \(0, 1\]"),
        ("noise", "cauchy", "noise must be one of none, seeded, os, secure"),
    ],
)
def test_a_wrong_record_is_refused_in_one_sentence_that_names_file_and_fault(record, path, value, fault):
    text = with_value(record().to_json(), path, value)
    with pytest.raises(RecordError, match=f"bad record r.json: {fault}") as caught:
        Record.from_json(text, source="r.json")
    assert "\n" not in str(caught.value)


@subtests("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "1" * 5000])
def test_numbers_that_no_float_holds_are_refused(record, number):
    with pytest.raises(RecordError, match=r"finite|whole"):
        Record.from_json(record().to_json().replace('"seconds": 1.0', f'"seconds": {number}'))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_that_is_not_finite_gets_into_a_record(value, record):
    with pytest.raises(RecordError, match="value must be a finite number"):
        Metric(value=value, better="lower")
    with pytest.raises(RecordError, match=r"task\.lr must be plain JSON"):
        record(task={"lr": value})


def test_a_key_that_is_there_twice_is_refused(record):
    text = record().to_json().replace('"seed": 0,', '"seed": 0, "seed": 1,')
    with pytest.raises(RecordError, match="key 'seed' is there twice"):
        Record.from_json(text)


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_torn_file_is_never_taken_for_a_record(share):
    whole = Record(
        id="0123456789abcdef", suite="s", suite_digest="d", kind="utility", seed=0, device="cpu", task=TrainingTask({}),
        defense=MethodUsed(name="sgd"), metrics={"accuracy": Metric(value=0.5, better="higher")},
        provenance=Provenance(version="1", source="0" * 64), seconds=1.0,
    ).to_json().strip()  # fmt: skip
    with pytest.raises(RecordError, match=r"not a whole JSON document .*; delete it and run again"):
        Record.from_json(whole[: int(share * len(whole))])


def test_a_record_does_not_change_with_what_it_was_made_from(record):
    task = {"data": "digits", "layers": [1, 2]}
    made = record(task=task)
    task["layers"].append(3)
    assert made.task["layers"] == [1, 2]


def test_written_records_are_read_back_in_the_order_of_their_ids(record, tmp_path):
    records = sorted((record(seed=seed) for seed in range(5)), key=lambda r: r.id)
    for one in reversed(records):
        assert write(one, tmp_path / "out" / "records") == tmp_path / "out" / "records" / f"{one.id}.json"
    assert read_all(tmp_path / "out") == read_all(tmp_path / "out" / "records") == records


def test_a_write_that_dies_leaves_the_old_record_and_no_draft(record, tmp_path, monkeypatch):
    old = record(reason="old")
    path = write(old, tmp_path)

    def power_cut(_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        write(record(id=old.id, reason="new"), tmp_path)
    assert read(path) == old
    assert list(tmp_path.iterdir()) == [path]


def test_a_draft_left_by_a_killed_process_is_not_read(record, tmp_path):
    write(record(), tmp_path)
    (tmp_path / ".0123456789abcdef.1.aa.tmp").write_text("{")
    assert len(read_all(tmp_path)) == 1


def test_a_torn_record_in_a_directory_is_named(record, tmp_path):
    path = write(record(), tmp_path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(RecordError, match=f"bad record {re.escape(str(path))}: .*delete it and run again"):
        read_all(tmp_path)


def test_a_copy_under_another_name_is_refused(record, tmp_path):
    path = write(record(), tmp_path)
    (tmp_path / "copy.json").write_bytes(path.read_bytes())
    with pytest.raises(RecordError, match=r"copy.json: its id is"):
        read_all(tmp_path)


def test_absent_and_empty_directories_and_binary_files_are_named(tmp_path):
    with pytest.raises(RecordError, match="no such directory"):
        read_all(tmp_path / "nowhere")
    with pytest.raises(RecordError, match=r"no records in .*; run a suite"):
        read_all(tmp_path)
    with pytest.raises(RecordError, match="cannot read record"):
        read(tmp_path / "0123456789abcdef.json")
    (tmp_path / "0123456789abcdef.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match="not UTF-8"):
        read_all(tmp_path)


def test_reading_records_needs_the_standard_library_only():
    heavy = ("torch", "numpy", "scipy", "rich", "pandas")
    code = f"import sys, leakbench.leaderboard.records.record; print([name for name in {heavy} if name in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
