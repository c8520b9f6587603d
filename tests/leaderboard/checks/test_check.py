"""Hostile folders of records: each is refused or flagged by the name of its file and field, and nothing in it runs."""

import json
import os
import re
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leakbench.leaderboard.checks.check import check_folder, examine
from leakbench.leaderboard.checks.figures import figure_faults
from leakbench.leaderboard.checks.limits import LIMITS, Limits
from leakbench.leaderboard.checks.suites import KnownSuite, suite_faults
from leakbench.leaderboard.checks.text import text_faults
from leakbench.leaderboard.records.manifest import Manifest
from leakbench.leaderboard.records.record import Record
from leakbench.leaderboard.records.validation import RecordError

from ...parameters import subtests
from .conftest import Tampered

OK = {"kind": "membership", "defense": "dp_sgd", "attack": "likelihood_ratio", "control": None, "seed": 0}
ID = "f" * 32


def test_a_folder_as_a_run_wrote_it_has_no_fault(clean):
    assert check_folder(clean) == check_folder(clean / "records") == []


def test_records_of_earlier_runs_contradict_nothing():
    """Their kinds and attacks are others than those of the folder above."""
    paths = sorted((Path(__file__).parents[2] / "golden" / "records").glob("*.json"))
    assert len(paths) >= 5
    for path in paths:
        data = json.loads(path.read_text(encoding="utf-8"))
        assert figure_faults(Record.from_values(data), "") == text_faults(data, "", LIMITS) == []


def test_an_engine_may_say_why_a_faster_one_was_not_used(tampered):
    reason = "torch.func (no layerwise: no known layer holds the parameter '1.weight', which is one of a Module)"
    tampered.edit(tampered.first(**OK), lambda data: data.update(engine=reason))
    assert not tampered.faults


def test_no_folder_is_an_error_of_its_own(clean, tmp_path):
    (tmp_path / "link").symlink_to(clean)
    for path, words in ((tmp_path / "none", "there is no such directory"), (tmp_path / "link", "symbolic link")):
        with pytest.raises(RecordError, match=words):
            check_folder(path)


def set_auc(**fields):
    return lambda d: d["metrics"]["auc"].update(fields)


def table(rows, **columns):
    file = BytesIO()
    pq.write_table(pa.table(columns or {"id": np.zeros(rows, dtype=np.int64)}), file)
    return file.getvalue()


def renamed_up(tampered):
    path = tampered.first(**OK)
    tampered.edit(path, lambda d: d.update(arrays="../../etc/passwd"))


def linked(suffix):
    def change(tampered):
        path = tampered.first(**OK).with_suffix(suffix)
        path.rename(tampered.out / "away")
        path.symlink_to(tampered.out / "away")

    return change


def linked_folder(tampered):
    tampered.folder.rename(tampered.out / "away")
    tampered.folder.symlink_to(tampered.out / "away")


def pipe(tampered):
    os.mkfifo(tampered.folder / f"{ID}.json")


def sparse(tampered):
    with (tampered.folder / f"{ID}.parquet").open("wb") as file:
        file.truncate(2**40)


def parquet_bomb(tampered):
    content = table(0, id=np.zeros(100_000_000, dtype=np.int8))  # 100 million equal numbers in some kilobytes
    tampered.arrays(tampered.first(**OK), content)


def nested(tampered):
    path = tampered.first(**OK)
    path.write_text('{"a":' * 100_000)


def nested_settings(tampered):
    deep = []
    for _ in range(60):
        deep = [deep]
    tampered.edit(tampered.first(**OK), lambda d: d["attack"]["settings"].update(deep=deep))


def changed(change, **fields):
    return lambda tampered: tampered.edit(tampered.first(**(OK | fields)), change)


def asked(change):
    return lambda tampered: tampered.ask(change)


def doubled(tampered):
    tampered.copy(tampered.first(**OK), ID)


def copied_seed(tampered):
    first, second = tampered.first(**OK), tampered.first(**(OK | {"seed": 1}))
    tampered.arrays(second, first.with_suffix(".parquet").read_bytes())


def removed_control(tampered):
    for path in tampered.named(control="positive", kind="membership"):
        path.unlink()
        path.with_suffix(".parquet").unlink()


def forgotten_control(tampered, roles=("positive",)):
    for path in [path for role in roles for path in tampered.named(control=role)]:
        tampered.forget(path)


def forgotten_controls(tampered):
    forgotten_control(tampered, ("positive", "negative"))


def failed_control(tampered):
    for path in tampered.named(control="positive", kind="membership"):
        tampered.edit(path, set_auc(value=0.5, low=0.45, high=0.55))


def removed_cell(tampered):
    path = tampered.first(**OK)
    path.unlink()
    path.with_suffix(".parquet").unlink()


def unasked_cell(tampered):
    path = tampered.first(**OK)
    tampered.ask(lambda d: d.update(cells=[cell for cell in d["cells"] if cell["id"] != path.stem]))


def skipped_cell(tampered):
    change = {"status": "skipped", "reason": "no time", "metrics": {}, "arrays": None, "arrays_digest": None}
    path = tampered.edit(tampered.first(**OK), lambda d: d.update(change))
    path.with_suffix(".parquet").unlink()


def other_rows(tampered):
    tampered.arrays(tampered.first(**OK), table(7))


def swapped(tampered):
    first, second = tampered.first(**OK), tampered.first(**(OK | {"control": "positive", "defense": "sgd"}))
    shutil.copy(second.with_suffix(".parquet"), first.with_suffix(".parquet"))


def hidden_bound(data):
    data["metrics"].pop("epsilon_lower")


def proved_above(data):
    data["metrics"]["auc"]["detail"].pop("shift_p_value", None)
    detail = {"value_at_verdict": 9.0, "claimed": 4.0, "method": "one_run", "relation": "replace_one"}
    bound = {"value": 9.5, "low": None, "high": None, "n": 200, "better": "lower", "reason": None, "detail": detail}
    data["metrics"]["epsilon_lower"] = bound


def wrong_share(data):
    accuracy = data["metrics"]["accuracy"]
    accuracy.update(value=0.97, low=0.95, high=0.99)


FLAGGED = ("a path of a machine", "a changed suite", "no control requested")
# Name of the manipulation: function, end of the file's name, beginning of the field, words of the problem.
HOSTILE = {
    "traversal in the name of arrays": (renamed_up, ".json", "arrays", "name of a file beside"),
    "a linked record": (linked(".json"), ".json", "", "symbolic link"),
    "linked arrays": (linked(".parquet"), ".parquet", "", "symbolic link"),
    "a linked folder of records": (linked_folder, "records", "", "symbolic link"),
    "a pipe": (pipe, f"{ID}.json", "", "no regular file"),
    "a file of a terabyte": (sparse, f"{ID}.parquet", "", "at most 268435456 bytes"),
    "arrays that decode to billions": (parquet_bomb, ".parquet", "", "rows"),
    "a hundred thousand brackets": (nested, ".json", "", "not a whole JSON document"),
    "sixty brackets in a setting": (nested_settings, ".json", "attack.settings.deep", "at most 32 deep"),
    "an edit": (
        lambda t: t.edit(t.first(**OK), set_auc(value=0.5, low=0.4, high=0.6), sealed=False),
        ".json",
        "seal",
        "edited after it was written",
    ),
    "a cut record": (
        lambda t: t.first(**OK).write_bytes(t.first(**OK).read_bytes()[:-30]),
        ".json",
        "",
        "not a whole JSON",
    ),
    "NaN": (
        lambda t: t.first(**OK).write_text(t.first(**OK).read_text().replace('"seconds": ', '"seconds": NaN, "x": ')),
        ".json",
        "",
        "finite, got NaN",
    ),
    "infinity by an exponent": (
        lambda t: t.first(**OK).write_text(re.sub(r'"seconds": [\d.]+', '"seconds": 1e999', t.first(**OK).read_text())),
        ".json",
        "seconds",
        "finite",
    ),
    "a value outside of its interval": (
        changed(set_auc(value=0.4, low=0.45, high=0.5)),
        ".json",
        "metrics.auc.value",
        "in its interval",
    ),
    "a reversed interval": (changed(set_auc(low=0.9, high=0.1)), ".json", "metrics.auc.low", "at most high"),
    "a percentage": (changed(set_auc(value=51.0, low=49.0, high=53.0)), ".json", "metrics.auc.value", "in [0, 1]"),
    "an interval beyond the metric's range": (
        changed(set_auc(value=0.9, low=0.8, high=1.5)),
        ".json",
        "metrics.auc.high",
        "range of auc",
    ),
    "a number in quotes": (changed(set_auc(value="0.5")), ".json", "metrics.auc.value", "finite number"),
    "a metric turned around": (changed(set_auc(better="higher")), ".json", "metrics.auc.better", "must be 'lower'"),
    "a value of nobody": (changed(set_auc(n=0)), ".json", "metrics.auc.n", "of 0 examples"),
    "a half outside of its interval": (
        changed(lambda d: d["metrics"]["auc"]["detail"].update(report_value=0.1, report_low=0.4, report_high=0.6)),
        ".json",
        "metrics.auc.detail.report_value",
        "in its interval",
    ),
    "an accuracy that its count contradicts": (
        changed(wrong_share, kind="utility", attack=None),
        ".json",
        "metrics.accuracy.value",
        "correct / n",
    ),
    "a hidden bound": (changed(hidden_bound), ".json", "metrics.epsilon_lower", "beside auc"),
    "a bound above the claim": (changed(proved_above), ".json", "metrics.epsilon_lower.value", "claim_violated"),
    "a smaller claim": (changed(lambda d: d["claim"].update(delta=1e-9)), ".json", "claim.delta", "of the budget"),
    "a claim above its budget": (
        changed(lambda d: d["claim"].update(epsilon=4.0)),
        ".json",
        "claim.epsilon",
        "above the budget",
    ),
    "a claim without noise": (
        changed(lambda d: d.update(noise_multiplier=0.0)),
        ".json",
        "claim.epsilon",
        "needs noise",
    ),
    "another privacy unit": (
        changed(lambda d: d["claim"].update(unit="client")),
        ".json",
        "claim.unit",
        "one for all records",
    ),
    "no privacy unit": (
        changed(lambda d: d["claim"].update(unit="batch")),
        ".json",
        "claim.unit",
        "example, record or client",
    ),
    "a flag against its p-value": (
        changed(lambda d: d["flags"].append("distribution_shift")),
        ".json",
        "flags",
        "p is",
    ),
    "another budget than its cell's": (
        changed(lambda d: d["budget"].update(epsilon=8.0)),
        ".json",
        "budget",
        "not that of the cell",
    ),
    "another seed than its cell's": (changed(lambda d: d.update(seed=7)), ".json", "seed", "not that of the cell"),
    "a stronger training than its cell's": (
        changed(lambda d: d["task"].update(epochs=60)),
        ".json",
        "task.epochs",
        "not that of the cell",
    ),
    "a cell recorded twice": (doubled, f"{ID}.json", "", "recorded again in records/"),
    "one seed's scores as another's": (copied_seed, ".json", "arrays_digest", "of seed"),
    "a removed control": (removed_control, ".manifest", "cells", "positive control"),
    "a control removed with its request": (forgotten_control, ".manifest", "controls", "no positive control"),
    "no control requested": (forgotten_controls, ".manifest", "controls", "requests no controls"),
    "a control that shows nothing": (failed_control, ".manifest", "controls", "AUC above 0.5"),
    "a removed cell": (removed_cell, ".manifest", "cells", "has no record"),
    "a cell that nobody asked for": (unasked_cell, ".json", "id", "no manifest requests it"),
    "a skipped attack": (skipped_cell, ".json", "status", "does not skip"),
    "no manifest": (lambda t: t.manifest.unlink(), "records", "", "no manifest"),
    "an edited manifest": (
        lambda t: t.manifest.write_text(t.manifest.read_text().replace("dp_sgd", "dp_abc")),
        ".manifest",
        "",
        "edited after",
    ),
    "a manifest of no cells": (asked(lambda d: d.update(cells=[])), ".manifest", "cells", "must have cells"),
    "no arrays": (lambda t: t.first(**OK).with_suffix(".parquet").unlink(), ".json", "arrays", "not beside it"),
    "arrays of nobody": (
        lambda t: (t.folder / f"{ID}.parquet").write_bytes(table(3)),
        f"{ID}.parquet",
        "",
        "no record",
    ),
    "arrays of another record": (swapped, ".parquet", "arrays_digest", "cut or altered"),
    "arrays that are no Parquet": (
        lambda t: t.arrays(t.first(**OK), b"PAR1 no PAR1"),
        ".parquet",
        "",
        "no Parquet file",
    ),
    "arrays of seven examples": (other_rows, ".parquet", "rows", "it has 7 rows"),
    "arrays of another name": (
        changed(lambda d: d.update(arrays=None, arrays_digest=None)),
        ".json",
        "arrays",
        "got null",
    ),
    "another name": (lambda t: t.first(**OK).rename(t.folder / f"{ID}.json"), f"{ID}.json", "id", "name must be"),
    "a script in a name": (
        changed(lambda d: d["defense"].update(name="<script>alert(1)</script>")),
        ".json",
        "defense.name",
        "without markup",
    ),
    "a script in a reason": (
        changed(lambda d: d["claim"].update(reason="<img src=x onerror=alert(1)>")),
        ".json",
        "claim.reason",
        "without markup",
    ),
    "a link in a flag": (
        changed(lambda d: d["flags"].append("[x](javascript:alert(1))")),
        ".json",
        "flags[",
        "without markup",
    ),
    "text read backwards": (
        changed(lambda d: d["claim"].update(accountant="PLD\u202e3.0")),
        ".json",
        "claim.accountant",
        "right-to-left override",
    ),
    "a terminal's escape": (changed(lambda d: d.update(engine="auto\x1b[2J")), ".json", "engine", "printable"),
    "a name in letters of another alphabet": (
        changed(lambda d: d["defense"].update(name="\u0501p_sgd")),
        ".json",
        "defense.name",
        "ASCII letters",
    ),
    "an engine in letters of another alphabet": (
        changed(lambda d: d.update(engine="l\u0430yerwise (no reason)")),
        ".json",
        "engine",
        "ASCII letters",
    ),
    "a metric's name that is a sentence": (
        changed(lambda d: d["metrics"].update({"Leaks nothing!": d["metrics"]["auc"]})),
        ".json",
        "metrics.Leaks nothing!",
        "ASCII letters",
    ),
    "a bound without what judges it": (
        changed(lambda d: (proved_above(d), d["metrics"]["epsilon_lower"]["detail"].pop("claimed"))),
        ".json",
        "metrics.epsilon_lower.detail",
        "claimed must be beside",
    ),
    "a name that leads up": (
        changed(lambda d: d["attack"].update(name="../../evil.py:f")),
        ".json",
        "attack.name",
        "without '..'",
    ),
    "a path of a machine": (
        changed(lambda d: d["claim"].update(reason="see /home/me/run/log.txt")),
        ".json",
        "claim.reason",
        "path of the machine",
    ),
    "a changed suite": (
        changed(lambda d: d.update(changes=["task.epochs 6 -> 60"])),
        ".manifest",
        "changes",
        "task.epochs 6 -> 60",
    ),
    "a paper's figure of a changed suite": (
        changed(lambda d: d.update(changes=["a"], reported=[{"metric": "accuracy", "value": 1, "source": "p"}])),
        ".json",
        "reported",
        "unchanged suite",
    ),
    "a schema of the future": (
        changed(lambda d: d.update(schema=3) or d["provenance"].update(version="9.1.0")),
        ".json",
        "schema",
        "install leakbench 9.1.0",
    ),
    "an integer that no other reader keeps": (changed(lambda d: d.update(seed=2**64)), ".json", "seed", "below 2**63"),
    "a key twice": (
        lambda t: t.first(**OK).write_text(t.first(**OK).read_text().replace('"seconds"', '"seed": 0, "seconds"')),
        ".json",
        "seed",
        "there twice",
    ),
    "an unknown key": (changed(lambda d: d.update(bonus=1)), ".json", "bonus", "is unknown"),
    "a folder among records": (lambda t: (t.folder / "more").mkdir(), "more", "", "it is a folder"),
    "a program among records": (
        lambda t: (t.folder / "conftest.py").write_text("exit()"),
        "conftest.py",
        "",
        "no record (.json)",
    ),
    "a name with an escape": (
        lambda t: (t.folder / "a\x1b[2Jb.json").write_text("{}"),
        "a\\u001b[2Jb.json",
        "",
        "its name must be",
    ),
}


@pytest.mark.long
@subtests("name", HOSTILE)
def test_a_hostile_folder_is_named_by_file_and_field(clean, tmp_path, name):
    change, suffix, field, words = HOSTILE[name]
    tampered = Tampered(clean, tmp_path / "run")
    change(tampered)
    faults = tampered.faults
    hits = [f for f in faults if f.file.endswith(suffix) and f.field.startswith(field) and words in f.problem]
    assert hits, [str(fault) for fault in faults]
    assert {fault.severity for fault in hits} == {"flagged" if name in FLAGGED else "refused"}
    assert not any(str(tmp_path) in f"{fault}" or not f"{fault}".isprintable() for fault in faults)


def test_a_bad_file_stops_no_other(tampered):
    paths = sorted(tampered.folder.glob("*.json"))
    paths[0].write_text("{")
    paths[1].write_bytes(b"\xff")
    paths[2].unlink()
    files = {fault.file for fault in tampered.faults}
    assert {f"records/{path.name}" for path in paths[:2]} <= files
    assert len(examine(tampered.out).records) == len(paths) - 3


def test_both_records_of_a_cell_are_named(tampered):
    first = tampered.first(**OK)
    tampered.copy(first, ID)
    twice = {fault.file: fault.problem for fault in tampered.faults if "recorded again" in fault.problem}
    assert twice.keys() == {f"records/{first.name}", f"records/{ID}.json"}
    assert first.name in twice[f"records/{ID}.json"]


def test_recomputation_is_of_measured_records_alone_and_its_sentence_is_the_fault(tampered):
    recomputed = []

    def recompute(record, folder):
        recomputed.append(record)
        return "its auc is 0.9" if record.kind == "membership" else ""

    faults = check_folder(tampered.out, recompute)
    assert {record.status for record in recomputed} == {"ok"} and len(recomputed) == len(tampered.named(status="ok"))
    assert {(fault.field, fault.problem) for fault in faults} == {("metrics.auc", "its auc is 0.9")}


def test_limits_refuse_files_unread(clean):
    largest = max(path.stat().st_size for path in (clean / "records").glob("*.json"))
    assert examine(clean, limits=Limits(record=largest)).faults == []
    assert any("at most" in fault.problem for fault in examine(clean, limits=Limits(record=largest - 1)).faults)
    assert any("holds more" in fault.problem for fault in examine(clean, limits=Limits(files=5)).faults)
    assert any("together" in fault.problem for fault in examine(clean, limits=Limits(documents=largest)).faults)


def test_nothing_in_a_folder_is_imported_or_run(tampered, tmp_path):
    mark = tmp_path / "ran"
    method = tmp_path / "method.py"
    method.write_text(f"open({str(mark)!r}, 'w')\ndef f(**settings): ...\n")
    tampered.edit(tampered.first(**OK), lambda d: d["defense"].update(name=f"{method}:f"))
    assert tampered.faults and not mark.exists()
    assert json.loads(json.dumps([fault.to_dict() for fault in tampered.faults]))


@pytest.mark.parametrize("word", ["[" * 5000, "{ name = " + "[" * 5000, "{" + "a." * 900 + "a = 1}", "x" * 100_000])
def test_a_command_of_a_stranger_that_no_parser_reads_adds_the_method_of_that_name(word):
    manifest = Manifest(suite="s", suite_digest="0" * 64, command=("leakbench", "run", "--add-attack", word), cells=())
    assert list(suite_faults({"a.manifest": manifest}, [], {"a.manifest": KnownSuite(digest="0" * 64)})) == []
