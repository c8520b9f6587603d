"""The report of an audit: its numbers are the document's, its words are escaped, and files of another are refused."""

import copy
import json
import re

import numpy as np
import pandas as pd
import pytest

from leakbench.leaderboard.page.checkpoint import build_report
from leakbench.leaderboard.records.files import digest_of_bytes
from leakbench.leaderboard.records.record import RecordError

from ...parameters import subtests

EVIL = '"><script>alert(1)</script>'


def _metric(value, low=None, high=None, n=40, reason=None):
    return {"value": value, "low": low, "high": high, "n": n, "better": "lower", "reason": reason, "detail": {}}


SOURCE = {"source": "m.npz", "sha256": "2" * 64, "n": 20, "notes": []}

# Without the keys that later versions of the schema have: the page reads it.
DOCUMENT = {
    "schema": "leakbench-audit/1",
    "verdict": {"word": "leaks", "sentence": f"This model leaks. {EVIL}"},
    "groups": {
        "members": 20, "non_members": 20, "population": 0, "input_shape": [1, 2, 2], "input_range": [0.0, 1.0],
        "classes": 2, "split": "unknown",
    },
    "accuracy": {"members": _metric(0.95, 0.7, 1.0), "non_members": _metric(0.8, 0.5, 0.9)},
    "attacks": [
        {
            "name": "loss_threshold", "settings": {}, "requires": {"access": "BLACK_BOX", "knows": [], "controls": []},
            "metrics": {
                "auc": _metric(0.637, 0.512, 0.743),
                "tpr_at_1pct_fpr": _metric(None, reason="too few non-members"),
                "advantage": _metric(0.211, -0.1, 0.5),
            },
            "why_not": "", "failed": False, "seconds": 0.2,
        },
        {
            "name": "lira", "settings": {}, "requires": {"access": "BLACK_BOX", "knows": ["SHADOWS"], "controls": []},
            "metrics": {}, "why_not": "lira needs shadow models",
            "failed": False, "seconds": 0.0,
        },
    ],
    "strongest": [
        {
            "metric": "auc", "attack": "loss_threshold", "value": 0.611, "low": 0.4, "high": 0.8, "n": 20,
            "of_all": False, "chance": 0.5, "allowed": None, "found": False,
        }
    ],
    "epsilon": {"why_not": "a bound needs at least 10 pairs"},
    "shift": {
        "shift_p_value": 0.4, "shift_auc": 0.51, "shift_detectable_auc": 0.6, "shift_by": "labels",
        "shift_examples": 40, "found": False,
    },
    "exposure": {
        "attack": "loss_threshold",
        "examples": [{"id": 5, "name": EVIL, "label": 1, "score": 0.1, "false_positive_rate": 0.0}],
        "classes": {"0": _metric(0.6, 0.5, 0.7), "1": _metric(None, reason="one kind only")},
    },
    "gradients": {
        "ranks": [
            {
                "layer": 2, "words": "3 (Linear)", "unknowns": 9, "outputs": 2, "rank_outputs": 2, "gradients": 6,
                "rank_gradients": 4, "rank": 6, "condition": None, "deficit": 3, "virtual": 0, "index": 3,
            }
        ],
        "attacks": [
            {"name": "bias_division", "settings": {}, "psnr": [120.0], "why_not": "", "seconds": 0.1},
            {"name": "r_gap", "settings": {}, "psnr": [], "why_not": "r_gap does not apply: it said", "seconds": 0.0},
        ],
    },
    "settings": {"delta": 1e-5, "level": 0.95, "seed": 0},
    "claim": None,
    "provenance": {
        "version": "0", "commit": None, "dirty": None, "source": "0" * 64, "versions": {"torch": "2"},
        "third_party": {}, "tuning": None,
    },
    "device": "cpu",
    "model": {
        "file": "net.safetensors", "sha256": "1" * 64, "kind": "safetensors", "architecture": "mlp", "parameters": 9,
        "notes": [],
    },
    "data": {
        "name": "m.npz", "members": SOURCE, "non_members": SOURCE, "preprocess": {"mean": [0.0], "std": [1.0]},
    },
    "preflight": {"findings": [], "numbers": {}},
    "smallest_leak": {
        "members": 20, "non_members": 20, "auc": 0.9, "tpr_at_1pct_fpr": None, "tpr_at_0.1pct_fpr": None, "pairs": 20,
        "epsilon_ceiling": None,
    },
    "rules": [], "not_tested": [], "command": [],
}  # fmt: skip

BOUND = {
    "value": 1.5, "ceiling": 2.5, "attack": "loss_threshold", "pairs": 400, "guessed": 40, "correct": 39, "looks": 2,
    "level": 0.95, "delta": 1e-5, "split": "random", "claimed": 2.0, "needed": 0.98, "refutes": False,
}  # fmt: skip


def _folder(path, **changes):
    draw = np.random.default_rng(0)
    path.mkdir(exist_ok=True)
    pd.DataFrame(
        {"id": range(40), "member": np.arange(40) < 20, "label": 0, "score_loss_threshold": draw.normal(size=40)}
    ).to_parquet(path / "scores.parquet")
    kinds = ["exposed", "shared", "found bias_division"]
    values = [[0.0, 0.5, 1.0, 0.2]] * 3
    pd.DataFrame({"kind": kinds, "place": [5, 0, 0], "values": values}).to_parquet(path / "pictures.parquet")
    files = {name: digest_of_bytes((path / name).read_bytes()) for name in ("scores.parquet", "pictures.parquet")}
    told = copy.deepcopy(DOCUMENT) | {"files": files} | changes
    (path / "audit.json").write_text(json.dumps(told))
    return path


def test_every_number_is_the_documents(tmp_path):
    page = build_report(_folder(tmp_path / "report")).read_text()
    for number in ("0.637", "0.512 to 0.743", "0.211", "0.611", "95.0%", "80.0%", "0.600"):
        assert number in page
    assert page.count("n/a") >= 3  # TPR at both rates, and a class
    assert "too few non-members" in page
    assert "≥120.0 dB" in page
    assert "stops at layer 2" in page
    assert "r_gap does not apply" in page
    assert "less than 1 in 20" in page
    assert "No bound, for a bound needs at least 10 pairs" in page
    assert page.count("data:image/png;base64") == 3
    summary = (tmp_path / "report" / "SUMMARY.md").read_text()
    assert "| loss\\_threshold | 0.637 [0.512, 0.743] | n/a | n/a |" in summary


def test_foreign_words_are_text_and_nothing_is_fetched(tmp_path):
    page = build_report(_folder(tmp_path / "report")).read_text()
    assert "<script>alert" not in page
    assert page.count("<script") == 3  # Vega's, ours, and the specification of the ROC curves
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)
    assert "default-src 'none'" in page
    assert "<script>" not in (tmp_path / "report" / "SUMMARY.md").read_text()


def test_an_epsilon_is_named_so_only_where_the_split_was_random(tmp_path):
    page = build_report(_folder(tmp_path / "a", epsilon=BOUND)).read_text()
    assert "At least 1.50, where one record replaces another" in page
    unknown = BOUND | {"split": "unknown"}
    page = build_report(_folder(tmp_path / "b", epsilon=unknown)).read_text()
    assert "If members and non-members were exchangeable, at least 1.50" in page


def test_a_claim_says_what_would_have_refuted_it(tmp_path):
    claim = {
        "epsilon": 1.0, "delta": 1e-5, "relation": "add_remove", "sampling": "", "sample_rate": None,
        "noise_multiplier": None, "steps": None, "errors": [],
        "implies": {"epsilon": 2.0, "delta": 2e-5, "relation": "replace_one"},
    }  # fmt: skip
    page = build_report(_folder(tmp_path / "a", epsilon=BOUND, claim=claim)).read_text()
    assert "had the attack been right in 98.0% of its answers; it was in 97.5%" in page
    page = build_report(_folder(tmp_path / "b", epsilon=BOUND | {"needed": None}, claim=claim)).read_text()
    assert "so many pairs could refute nothing" in page
    page = build_report(
        _folder(tmp_path / "c", epsilon=BOUND | {"claimed": 1.0, "refutes": True}, claim=claim)
    ).read_text()
    assert "which the bound refutes" in page


def test_rules_say_which_is_broken(tmp_path):
    rules = [{"text": "auc>0.5", "broken": "auc>0.5: it is 0.512"}, {"text": "auc>0.9", "broken": None}]
    page = build_report(_folder(tmp_path / "report", rules=rules)).read_text()
    assert "broken" in page
    assert "kept" in page
    assert "auc&gt;0.5: it is 0.512" in page


def test_files_of_another_audit_are_refused(tmp_path):
    folder = _folder(tmp_path / "report")
    pd.DataFrame({"id": [1]}).to_parquet(folder / "scores.parquet")
    with pytest.raises(RecordError, match="is not the file that the audit wrote"):
        build_report(folder)
    assert not (folder / "index.html").exists()
    assert not (folder / "SUMMARY.md").exists()
    with pytest.raises(RecordError, match="schema of"):
        build_report(_folder(tmp_path / "other", schema="leakbench-audit/9"))
    (folder / "audit.json").write_text("{")
    with pytest.raises(RecordError, match="not a whole JSON document"):
        build_report(folder)
    with pytest.raises(RecordError, match=r"cannot read|no audit|audit\.json"):
        build_report(tmp_path)


@subtests("key", ["verdict", "groups", "attacks", "epsilon", "accuracy", "gradients", "provenance"])
def test_a_document_that_lacks_a_part_is_one_sentence(tmp_path, key):
    folder = _folder(tmp_path / "report")
    told = json.loads((folder / "audit.json").read_text())
    del told[key]
    (folder / "audit.json").write_text(json.dumps(told))
    with pytest.raises(RecordError, match=rf"audit\.json is no whole audit: key '{key}' is missing"):
        build_report(folder)


def test_a_command_can_be_pasted_and_a_summary_names_nobody(tmp_path):
    command = ["leakbench", "audit", "--fail-if", "auc>0.9"]
    verdict = {"word": "leaks", "sentence": "@someone https://evil.example"}
    page = build_report(_folder(tmp_path / "report", command=command, verdict=verdict)).read_text()
    assert "--fail-if &#39;auc&gt;0.9&#39;" in page
    words = (tmp_path / "report" / "SUMMARY.md").read_text()
    assert "@someone" not in words
    assert "https://" not in words


def test_inputs_that_are_no_images_have_no_pictures(tmp_path):
    groups = DOCUMENT["groups"] | {"input_shape": [4]}
    page = build_report(_folder(tmp_path / "report", groups=groups)).read_text()
    assert "data:image/png" not in page
