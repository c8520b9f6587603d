"""Reports of audits: a file that does not fit is refused in one sentence, which names the file and the field."""

import json
import math
from dataclasses import FrozenInstanceError

import pytest

from leakbench.leaderboard.records.audit_findings import AuditVerdict, EpsilonBound, SmallestLeak
from leakbench.leaderboard.records.record import RecordError
from leakbench.leaderboard.records.update_report import (
    GuessComparison,
    ReconstructedInputs,
    RecoveredLabels,
    UpdateAttack,
    UpdateReport,
)
from leakbench.leaderboard.records.validation import build, json_values

from ...parameters import subtests

UPDATE = {
    "schema": "leakbench-update/4",
    "verdict": {"word": "something recovered", "sentence": "Look.", "tone": "warn"},
    "model": {"file": "m.safetensors", "sha256": "0", "architecture": "mlp"},
    "update": {
        "file": "u.safetensors", "sha256": "1", "batch_size": 1, "lr": None,
        "convention": {"words": "a gradient", "factor": 1.0, "weight_decay": 0.0, "ambiguous": "", "unreadable": ""},
        "lacking": [], "training_mode": False, "clip_norm": None, "noise_multiplier": 0.0,
    },
    "data": {"public": {"source": "p.npz", "sha256": "2", "n": 3}},
    "input_shape": [1, 2, 2], "input_range": [0.0, 1.0], "classes": 2, "parameters": 8, "seed": 0,
    "attacks": [
        {"name": "dlg", "settings": {"steps": 3}, "kind": "reconstruction", "why_not": "dlg does not apply"},
        {"name": "label_recovery", "settings": {}, "kind": "labels", "why_not": "", "labels": {"1": 1}, "status": "ok"},
        {
            "name": "r_gap", "settings": {}, "kind": "reconstruction", "why_not": "", "images": 1, "labels": [1],
            "status": "ok", "certified": None, "proved": None, "objective": 0.0, "residual_ratio": None,
            "expected_error": None, "beside_guesses": None,
        },
        {
            "name": "others", "settings": {}, "kind": "membership", "why_not": "", "false_discovery_rate": 0.05,
            "candidates": [{"name": "a", "p_value": 0.5, "q_value": 0.5, "shown": False}],
        },
    ],
    "notes": [], "ranks": "an unknown layer", "not_tested": [], "command": [], "device": "cpu",
    "provenance": {
        "version": "0", "commit": None, "dirty": None, "source": "0" * 64, "versions": {}, "third_party": {},
        "tuning": None,
    },
    "files": {},
}  # fmt: skip


def changed(path, value):
    told = json.loads(json.dumps(UPDATE))
    *steps, last = path
    place = told
    for step in steps:
        place = place[step]
    place[last] = value
    return json.dumps(told)


def test_each_result_of_an_attack_has_its_own_type():
    report = UpdateReport.from_json(json.dumps(UPDATE), source="update.json")
    kinds = [type(attack) for attack in report.attacks[:3]]
    assert kinds == [UpdateAttack, RecoveredLabels, ReconstructedInputs]
    assert report.to_dict() == UPDATE
    assert json.loads(report.to_json()) == UPDATE


@subtests(
    "path, value, field",
    [
        (("classes",), "ten", "classes must be an integer, got 'ten'"),
        (("update", "batch_size"), 1.5, "update.batch_size must be an integer"),
        (("update", "convention", "factor"), None, "update.convention.factor must be a finite number"),
        (("data", "public", "m"), 3, "key 'm' is unknown in data.public"),
        (("attacks", 2, "images"), 2, r"attacks\[2\].labels and proved must have an entry for each of 2 images"),
        (("attacks", 1, "labels"), [1], r"attacks\[1\].labels must be an object"),
        (("attacks", 0, "why_not"), "", r"attacks\[0\].why_not must be given where there is no result"),
        (("attacks", 3, "shown"), 1, r"key 'shown' is unknown in attacks\[3\]"),
        (("input_range",), [0.0], "input_range must have 2 entries"),
        (("ranks",), 3, "ranks must be a string or a list, got 3"),
        (("verdict", "word"), "fine", "verdict.word must be one of"),
        (("verdict", "tone"), "good", "verdict.tone must be 'warn', which follows from its neighbors, got 'good'"),
        (("provenance", "source"), "", "provenance.source must be a SHA-256"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_file_and_field(path, value, field):
    with pytest.raises(RecordError, match=f"^here/update.json is no whole audit: {field}"):
        UpdateReport.from_json(changed(path, value), source="here/update.json")


@subtests("text", ["{", '{"schema": NaN}', '{"schema": 1, "schema": 1}', "[]", "[" * 100_000])
def test_a_text_that_is_no_report_is_refused_by_its_file(text):
    with pytest.raises(RecordError, match=r"update\.json"):
        UpdateReport.from_json(text, source="update.json")


def test_keys_that_older_files_lack_have_defaults():
    told = json.loads(json.dumps(UPDATE))
    del told["update"]["lacking"], told["update"]["training_mode"], told["verdict"]["tone"]
    del told["attacks"][2]["expected_error"]
    assert UpdateReport.from_json(json.dumps(told), source="update.json").to_dict() == UPDATE


def test_a_report_is_frozen_and_equal_to_its_copy():
    report = UpdateReport.from_json(json.dumps(UPDATE), source="update.json")
    with pytest.raises(FrozenInstanceError):
        report.seed = 1  # pyright: ignore[reportAttributeAccessIssue] -- on purpose
    assert UpdateReport.from_json(report.to_json(), source="update.json") == report


def test_what_follows_from_a_bound_is_written_and_not_asked():
    bound = EpsilonBound(
        value=2, ceiling=3.0, attack="a", pairs=40, guessed=4, correct=4, looks=1, level=0.975, delta=1e-5,
        split="random", claimed=1.0,
    )  # fmt: skip
    written = json_values(bound)
    assert list(written)[-3:] == ["relation", "method", "refutes"]
    assert written["refutes"] is True and bound.percent == "97.5%" and bound.share == 1.0
    assert build(EpsilonBound, written) == bound
    with pytest.raises(RecordError, match="refutes must be True, which follows"):
        build(EpsilonBound, written | {"refutes": False})


def test_a_key_that_is_no_python_name_has_a_field():
    sizes = {"members": 1, "non_members": 1, "auc": 0.9, "tpr_at_1pct_fpr": None, "tpr_at_0.1pct_fpr": 0.2}
    sizes |= {"pairs": 1, "epsilon_ceiling": None, "attacks": 2}
    assert build(SmallestLeak, sizes).tpr_at_01pct_fpr == 0.2
    assert json_values(build(SmallestLeak, sizes)) == sizes
    with pytest.raises(RecordError, match=r"key 'tpr_at_0\.1pct_fpr' is missing"):
        build(SmallestLeak, {key: value for key, value in sizes.items() if "0.1" not in key})


@subtests(
    "word, weak, tone, headline",
    [
        ("no leak found", "", "good", "no leak found"),
        ("no leak found", "3 of 10 attacks", "neutral", "no leak found by 3 of 10 attacks"),
        ("claim refuted", "", "bad", "claim refuted"),
        ("cannot be told", "", "warn", "cannot be told"),
    ],
)
def test_a_verdict_by_weak_attacks_is_not_green(word, weak, tone, headline):
    verdict = AuditVerdict(word=word, sentence="So.", weak=weak)
    assert (verdict.tone, verdict.headline) == (tone, headline)
    with pytest.raises(RecordError, match="word must be one of"):
        AuditVerdict(word="fine", sentence="So.")  # pyright: ignore[reportArgumentType] -- on purpose


def test_a_number_that_is_not_finite_is_refused_where_it_is_made():
    with pytest.raises(RecordError, match="unexplained must be a finite number, got nan"):
        GuessComparison(unexplained=math.nan, guessed=0.2, guesses=9, public=True, better=True)
