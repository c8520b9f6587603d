"""Hostile submissions: each is refused or flagged by name, and no code of a submission is run by a check."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from leakbench.audit.cli.submit import rules_of
from leakbench.audit.run.claims import multiplier_fault
from leakbench.audit.submission.suites import single_file
from leakbench.defenses.core.privacy.accounting import Gaussian, pld_in_time
from leakbench.leaderboard.board.controls import ControlResult
from leakbench.leaderboard.checks import check as checks
from leakbench.leaderboard.records.fields import Reported
from leakbench.leaderboard.records.files import digest_of_bytes
from leakbench.leaderboard.records.manifest import read_manifests, write_manifest
from leakbench.leaderboard.records.record import read, read_all, write
from leakbench.leaderboard.submissions.check import VERIFIERS, check_tree
from leakbench.leaderboard.submissions.declaration import NAME, read_declaration
from leakbench.leaderboard.submissions.identity import request_digest, results_digest
from leakbench.leaderboard.submissions.rows import rows_beside
from leakbench.leaderboard.submissions.signature import OF_STAMP, can_sign, sign
from leakbench.leaderboard.submissions.stamp import NAME as STAMP
from leakbench.leaderboard.submissions.stamp import SIGNATURE, CellComparison, Stamp, read_stamp, write_stamp
from leakbench.leaderboard.submissions.tiers import IN_PROCESS, tier_of
from tests.leaderboard.submissions.test_signature import make_key

from ...parameters import long_but

METHOD = "half_dp.py:half_dp"


@pytest.fixture
def check(tree, tmp_path):
    """Checks the tree: path -> faults as text, with their severity; nothing of it may be run."""

    def run():
        submissions, others = check_tree(tree, rules_of())
        assert not (tmp_path / "canary").exists(), "a check ran the code of a submission"
        faults = {entry.path: [f"{fault.severity}: {fault}" for fault in entry.faults] for entry in submissions}
        return faults | {"others": [f"{fault.severity}: {fault}" for fault in others]}

    return run


def replaced(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def only(faults, submission):
    return faults[f"{submission.parent.name}/{submission.name}"]


def test_an_honest_submission_has_no_fault(check, submission):
    assert only(check(), submission) == []


def moved(submission, handle):
    """Copies a submission to another handle, with its declaration in that name, in the folder of its digest."""
    target = submission.parents[1] / handle / "new"
    shutil.copytree(submission, target)
    replaced(target / NAME, 'handle = "ada"', f'handle = "{handle}"')
    return target.rename(target.with_name(request_digest(read_declaration(target))))


def test_a_copy_under_another_handle_has_the_wrong_seeds_and_names_the_original(check, submission):
    copy = moved(submission, "eve")
    faults = check()
    assert any("seed: must follow from the digest" in text for text in only(faults, copy))
    assert any("refused" in text and "seed" in text for text in only(faults, copy))
    assert any(f"also that of ada/{submission.name}" in text for text in only(faults, copy))
    assert not any(text.startswith("refused") for text in only(faults, submission))  # nobody can knock out the original


def test_a_copy_whose_seeds_were_forged_and_sealed_again_is_named_with_the_original(check, submission):
    copy = moved(submission, "eve")
    for record in read_all(copy):
        path = copy / "records" / f"{record.id}.json"
        write(dataclasses.replace(record, seed=record.seed + 1), path.parent)
    assert any("table of membership scores is also that of ada/" in text for text in only(check(), copy))


@pytest.mark.parametrize("handle", ["-rf", "Ada", "a b", "a" * 50])
def test_a_bad_handle_is_refused_by_name(check, tree, submission, handle):
    (submission.parent).rename(tree / handle)
    assert any("must be a handle" in text for text in check()["others"])


def test_a_declaration_of_another_handle_than_its_folder_is_refused(check, tree, submission):
    (tree / "eve").mkdir()
    copy = tree / "eve" / submission.name
    shutil.copytree(submission, copy)
    assert any("handle: must be the name of the folder above, eve" in text for text in only(check(), copy))


@pytest.mark.parametrize("file", ["../half_dp.py", "/etc/hosts", "records/../half_dp.py"])
def test_a_path_out_of_the_folder_is_refused(check, submission, file):
    replaced(submission / NAME, 'file = "half_dp.py"', f'file = "{file}"')
    (text,) = only(check(), submission)
    assert text.startswith("refused") and "method.file" in text


@pytest.mark.parametrize("name", ["half_dp.py", NAME, "records", "SIGNATURE", STAMP, "records/x.json"])
def test_links_are_refused_by_name_and_not_followed(check, submission, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("secret words")
    place = submission / name
    if place.is_dir():
        place.rename(tmp_path / "elsewhere")
        secret = tmp_path / "elsewhere"
    place.unlink(missing_ok=True)
    place.symlink_to(secret)
    faults = only(check(), submission)
    assert any(name in text and "symbolic link" in text for text in faults)
    assert not any("secret words" in text for text in faults)


def test_a_pipe_and_a_link_in_place_of_a_submission_are_refused(check, tree, submission):
    os.mkfifo(submission / "SIGNATURE")
    (tree / "ada" / "linked").symlink_to(submission)
    (tree / "mallory").symlink_to("/etc")
    faults = check()
    assert any("no regular file" in text for text in only(faults, submission))
    assert any("ada/linked" in text for text in faults["others"])
    assert any("mallory" in text for text in faults["others"])


def test_a_method_file_that_differs_from_the_one_that_ran_is_refused(check, submission):
    file = submission / "half_dp.py"
    file.write_text(file.read_text() + "\n# an afterthought\n")
    faults = only(check(), submission)
    assert any("method.sha256: must be that of half_dp.py" in text for text in faults)
    assert any(f"third_party.defense {METHOD}: was computed by another file" in text for text in faults)


def test_a_method_file_that_was_declared_anew_has_another_digest_and_other_seeds(check, submission):
    file = submission / "half_dp.py"
    old = digest_of_bytes(file.read_bytes())
    file.write_text(file.read_text() + "\n# an afterthought\n")
    replaced(submission / NAME, old, digest_of_bytes(file.read_bytes()))
    faults = only(check(), submission)
    assert any("must be named by the digest of its request" in text for text in faults)
    assert any("seed: must follow" in text for text in faults) and any("was computed by another" in t for t in faults)


def test_a_missing_method_file_and_code_beside_it_are_refused(check, submission):
    (submission / "half_dp.py").rename(submission / "helper.py")
    faults = only(check(), submission)
    assert any("method.file: must lie beside" in text for text in faults)
    assert any("helper.py: must be one of" in text for text in faults)


def test_a_method_of_two_files_is_refused(check, submission):
    (submission / "helper.py").write_text("x = 1\n")
    replaced(submission / "half_dp.py", "import os\n", "import os\nimport helper\n")
    assert any("must be the method's only file, and it imports helper.py" in text for text in only(check(), submission))


def test_a_file_that_no_parser_can_read_is_a_fault(check, submission):
    (submission / "half_dp.py").write_text("x = " + "(" * 5000 + ")" * 5000)
    assert any("half_dp.py" in text for text in only(check(), submission))


def resealed(submission, change):
    """Changes every record by a function, seals it again, and returns the changed ids."""
    ids = []
    for record in read_all(submission):
        changed = change(record)
        if changed is not None:
            write(changed, submission / "records")
            ids.append(record.id)
    assert ids
    return ids


def test_third_party_code_that_is_not_declared_is_refused(check, submission):
    def change(record):
        extra = {"attack other.py:f": "a" * 64}
        return dataclasses.replace(record, provenance=dataclasses.replace(record.provenance, third_party=extra))

    resealed(submission, change)
    faults = only(check(), submission)
    assert any("attack other.py:f: is code of a third party that the declaration does not name" in t for t in faults)
    assert any("has no digest of the code that computed it" in text for text in faults)


def test_chosen_seeds_are_refused(check, submission):
    resealed(submission, lambda record: dataclasses.replace(record, seed=7))
    assert any("seed: must follow from the digest of the request" in text for text in only(check(), submission))


def test_a_forged_figure_that_was_sealed_again_contradicts_its_scores(check, submission):
    def change(record):
        if record.kind != "utility":
            return None
        better = dataclasses.replace(record.metrics["accuracy"], value=0.999, low=0.99, high=1.0)
        return dataclasses.replace(record, metrics=record.metrics | {"accuracy": better})

    resealed(submission, change)
    assert any("accuracy" in text and text.startswith("refused") for text in only(check(), submission))


def test_a_paper_s_figure_that_the_suite_does_not_state_is_refused(check, submission):
    figure = Reported(metric="accuracy", value=0.5, source="Somebody 2024, Table 1")
    resealed(submission, lambda r: dataclasses.replace(r, reported=(figure,)) if r.kind == "utility" else None)
    assert any("reported: a paper's figure must be" in t and t.startswith("refused") for t in only(check(), submission))


def test_a_record_that_was_edited_or_is_of_a_future_schema_is_refused(check, submission):
    first, second = sorted((submission / "records").glob("*.json"))[:2]
    replaced(first, '"seconds": ', '"seconds": 1')
    content = json.loads(second.read_text())
    second.write_text(json.dumps(content | {"schema": 99}))
    faults = only(check(), submission)
    assert any(first.name in text for text in faults)
    assert any(second.name in text and "schema" in text for text in faults)


@pytest.mark.parametrize("control", [None, "positive", "negative"])
def test_a_cell_that_was_removed_from_records_and_request_is_named(check, submission, control):
    """The plan of the suite is made again, so that a manifest without the cell does not hide it."""
    records = submission / "records"
    (manifest,) = read_manifests(records)
    cell = next(
        c for c in manifest.cells if c.control == control and c.kind == "membership" and "half" not in c.defense.name
    )
    for path in records.glob(f"{cell.id}.*"):
        path.unlink()
    (records / manifest.name).unlink()
    write_manifest(dataclasses.replace(manifest, cells=tuple(c for c in manifest.cells if c != cell)), records)
    assert any(
        f"cell {cell.id} of the suite" in text and "was not requested" in text for text in only(check(), submission)
    )


def test_a_cell_of_its_own_method_that_was_removed_is_named(check, submission):
    records = submission / "records"
    (manifest,) = read_manifests(records)
    cell = next(c for c in manifest.cells if c.defense.name == METHOD and c.attack is not None)
    for path in records.glob(f"{cell.id}.*"):
        path.unlink()
    (records / manifest.name).unlink()
    write_manifest(dataclasses.replace(manifest, cells=tuple(c for c in manifest.cells if c != cell)), records)
    faults = only(check(), submission)
    assert any("the method lacks a cell that the suite's defenses have" in text for text in faults)


def test_a_request_of_another_command_is_refused(check, submission):
    records = submission / "records"
    (manifest,) = read_manifests(records)
    (records / manifest.name).unlink()
    write_manifest(dataclasses.replace(manifest, command=(*manifest.command, "--set", "task.epochs=100")), records)
    assert any("task.epochs=100" in text and "command" in text for text in only(check(), submission))


def test_another_suite_digest_is_refused_because_it_would_draw_other_seeds(check, submission):
    declared = read_declaration(submission).suite_digest
    replaced(submission / NAME, declared, "5" * 64)
    assert any("suite_digest: must be that of the suite as it is here" in text for text in only(check(), submission))


def test_unknown_suites_are_refused(check, submission):
    replaced(submission / NAME, 'suite = "tiny"', 'suite = "other"')
    assert any("no suite" in text for text in only(check(), submission))


# Stamps.


def stamped(submission, verifier="grace", **changes):
    """Writes a stamp that says that a cell was computed again, without any computation."""
    record = read_all(submission)[0]
    content = {
        "request": submission.name,
        "declaration": digest_of_bytes((submission / NAME).read_bytes()),
        "results": results_digest(submission),
        "verifier": verifier,
        "date": "2026-11-28",
        "machine": "cpu (x86_64)",
        "code": record.provenance,
        "salt": "s",
        "drawn": 1,
        "cells": (record.id,),
        "comparisons": (
            CellComparison(
                cell=record.id, words="x", seeds="same", metric="accuracy", reported=0.5, again=0.5,
                verdict="identical", main=True, reason="equal",
            ),
        ),
    }  # fmt: skip
    return write_stamp(Stamp(**(content | changes)), submission)


def trusted(tree, tmp_path, name="grace"):
    """Makes a key that the board trusts."""
    key = make_key(tmp_path / f"key_{name}")
    (tree / VERIFIERS).write_text(f"{name} {key.with_suffix('.pub').read_text()}")
    return key


def tier(tree):
    (entry,) = (checked for checked in check_tree(tree, rules_of())[0] if checked.path.startswith("ada/"))
    assert entry.tier is not None
    return entry.tier


def test_a_stamp_that_its_submitter_wrote_is_ignored_by_name(check, tree, submission):
    stamped(submission)
    assert not tier(tree).recomputed and "nobody vouches" in tier(tree).reason
    assert any("VERIFIED.json: is ignored" in text for text in only(check(), submission))


needs_ssh = pytest.mark.skipif(not can_sign(), reason="needs ssh-keygen, of OpenSSH")


@pytest.mark.long
@needs_ssh
def test_a_stamp_counts_if_a_trusted_verifier_signed_it(tree, submission, tmp_path):
    path = stamped(submission)
    key = trusted(tree, tmp_path)
    assert "must be there" in tier(tree).reason
    sign(path.read_bytes(), make_key(tmp_path / "eve"), submission / SIGNATURE, OF_STAMP)
    assert not tier(tree).recomputed and "by a key of grace" in tier(tree).reason
    sign(path.read_bytes(), key, submission / SIGNATURE, "leakbench")  # for another purpose
    assert not tier(tree).recomputed
    sign(path.read_bytes(), key, submission / SIGNATURE, OF_STAMP)
    assert tier(tree).recomputed


@needs_ssh
@pytest.mark.parametrize(
    "damage", long_but(["record", "removed"], ["record", "arrays", "declaration", "stamp", "removed"])
)
def test_a_stamp_is_no_evidence_after_any_change(tree, submission, tmp_path, damage):
    key = trusted(tree, tmp_path)
    path = stamped(submission)
    sign(path.read_bytes(), key, submission / SIGNATURE, OF_STAMP)
    assert tier(tree).recomputed
    first = sorted((submission / "records").glob("*.json"))[0]
    if damage == "record":
        write(dataclasses.replace(read(first), seconds=1.0), first.parent)
    elif damage == "arrays":
        first.with_suffix(".parquet").write_bytes(first.with_suffix(".parquet").read_bytes() + b" ")
    elif damage == "declaration":
        replaced(submission / NAME, "2 cores", "4 cores")
    elif damage == "stamp":
        replaced(path, "cpu (x86_64)", "cpu (arm64)")
    else:
        first.unlink()
    assert not tier(tree).recomputed and "ignored" in tier(tree).reason


@needs_ssh
def test_a_stamp_copied_from_another_submission_and_a_submitters_own_are_ignored(tree, submission, tmp_path):
    key = trusted(tree, tmp_path)
    path = stamped(submission, request="0" * 32)
    sign(path.read_bytes(), key, submission / SIGNATURE, OF_STAMP)
    assert "it is about another request: it was copied" in tier(tree).reason
    key = trusted(tree, tmp_path, "ada")
    path = stamped(submission, verifier="ada")
    sign(path.read_bytes(), key, submission / SIGNATURE, OF_STAMP)
    assert "is the submitter" in tier(tree).reason and not tier(tree).recomputed


@needs_ssh
def test_a_stamp_with_a_number_that_differs_verifies_nothing_and_says_so(check, tree, submission, tmp_path):
    key = trusted(tree, tmp_path)
    path = stamped(submission)
    stamp = read_stamp(submission)
    assert stamp is not None
    differing = dataclasses.replace(stamp.comparisons[0], verdict="differs")
    path = write_stamp(dataclasses.replace(stamp, comparisons=(differing,)), submission)
    sign(path.read_bytes(), key, submission / SIGNATURE, OF_STAMP)
    assert not tier(tree).recomputed and "do not agree" in tier(tree).reason
    assert any("computed again, it differs" in text for text in only(check(), submission))


@pytest.mark.parametrize(
    "content", long_but(["[" * 100_000], ["{", "[]", '{"schema": 2}', "[" * 100_000, '{"schema": 1, "x": NaN}'])
)
def test_a_file_that_is_no_stamp_is_ignored_by_name(check, tree, submission, content):
    Path(submission, STAMP).write_text(content)
    assert any("VERIFIED.json: is ignored: must be a stamp" in text for text in only(check(), submission))
    assert not tier(tree).recomputed


def test_unverified_parts_are_the_tier_whatever_the_stamp(tree, submission):
    resealed(submission, lambda record: dataclasses.replace(record, flags=(*record.flags, "unverified_bound")))
    stamped(submission)
    assert tier(tree).tier == "unverified parts" and "assumes: bound, file that runs in" in tier(tree).reason


def test_a_defense_by_file_is_never_verified_because_its_code_could_change_what_is_measured(tree, submission):
    """Its records have no flag, and could have lost one."""
    assert tier(tree).tier == "unverified parts" and "process of the training" in tier(tree).reason
    stamped(submission)
    stamp = read_stamp(submission)
    assert tier_of((), stamp).tier == "verified" and tier_of([IN_PROCESS], stamp).tier == "unverified parts"


# Requests that were edited, with new names and seals.


def edited(submission, own, **changes):
    """Changes the requests of cells, and returns their ids; records are left."""
    records = submission / "records"
    (manifest,) = read_manifests(records)
    (records / manifest.name).unlink()
    ids = [cell.id for cell in manifest.cells if own(cell)]
    cells = [dataclasses.replace(cell, **changes) if cell.id in ids else cell for cell in manifest.cells]
    write_manifest(dataclasses.replace(manifest, cells=tuple(cells)), records)
    assert ids
    return ids


def removed(submission, ids):
    for path in [path for name in ids for path in (submission / "records").glob(f"{name}.*")]:
        path.unlink()


def test_a_control_that_the_request_skips_is_refused(check, submission):
    removed(submission, edited(submission, lambda c: c.control == "positive" and c.attack is not None, skip="x"))
    assert any("was skipped, and runs here" in t and t.startswith("refused") for t in only(check(), submission))


def test_a_cell_of_the_suite_with_another_content_under_its_id_is_refused(check, submission):
    edited(submission, lambda c: c.control == "positive", control=None)
    assert any("was requested as another cell" in text for text in only(check(), submission))


def test_an_attack_that_the_request_skips_on_its_own_method_is_flagged_and_has_no_rank(check, tree, submission):
    removed(submission, edited(submission, lambda c: c.defense.name == METHOD and c.attack is not None, skip="no"))
    faults = only(check(), submission)
    assert any(
        text.startswith("flagged") and "is skipped, and the suite's methods are measured" in text for text in faults
    )
    (row,) = own_rows(tree)
    assert row["rank"] is None and row["rank_reason"]


@pytest.mark.parametrize(
    "changes", [{"training": {"private": 999}}, {"training": {"epochs": 50}}, {"control": "public_only"}]
)
def test_a_method_with_another_task_than_the_suite_is_refused(check, submission, changes):
    edited(submission, lambda c: c.defense.name == METHOD, **changes)
    assert any(
        "than the suite or the declaration" in text and text.startswith("refused") for text in only(check(), submission)
    )


def test_a_seed_that_is_said_to_have_failed_is_refused(check, submission):
    ids = []

    def change(record):
        if ids or record.defense.name != METHOD or record.kind != "membership":
            return None
        ids.append(record.id)
        return dataclasses.replace(
            record, status="failed", reason="out of memory", metrics={}, arrays=None, arrays_digest=None
        )

    resealed(submission, change)
    (submission / "records" / f"{ids[0]}.parquet").unlink()
    assert any("must have no failed cell" in text for text in only(check(), submission))


def own_rows(tree):
    checked, _ = check_tree(tree, rules_of())
    board = rows_beside([entry for entry in checked if entry.counts], None).board
    assert board is not None
    return [row for row in board["rows"] if METHOD in row["defense"]["name"]]


@pytest.mark.long
def test_a_control_that_fails_is_flagged_and_its_rows_have_no_rank(check, tree, submission, monkeypatch):
    """Its seeds follow from its digest, so that it could not be measured again."""
    assert all(row["rank"] is not None for row in own_rows(tree))
    result = ControlResult(name="tiny: sgd", expected="AUC above 0.5", measured="AUC 0.5 [0.4, 0.6]", ok=False)
    monkeypatch.setattr(checks, "check_controls", lambda rows, records: (result,))
    assert any(
        text.startswith("flagged") and "it must show AUC above 0.5" in text for text in only(check(), submission)
    )
    for row in own_rows(tree):
        assert row["rank"] is None and "a control of its submission failed" in row["rank_reason"]
    lost = dataclasses.replace(result, measured="nothing: every cell was skipped")
    monkeypatch.setattr(checks, "check_controls", lambda rows, records: (lost,))
    assert any(text.startswith("refused") and "shows nothing" in text for text in only(check(), submission))


def test_a_figure_that_no_paper_of_the_suite_has_is_refused(check, submission):
    figure = Reported(metric="accuracy", value=0.2, source="a famous paper, Table 1")
    resealed(submission, lambda record: dataclasses.replace(record, reported=(figure,)))
    assert any("a paper's figure must be one that the suite states" in text for text in only(check(), submission))


def test_a_number_that_contradicts_the_records_beside_it_is_refused(tree, submission):
    assert rules_of().beside is multiplier_fault
    rules = dataclasses.replace(rules_of(), beside=lambda record, others: "it differs" * (record.kind == "utility"))
    (checked,) = check_tree(tree, rules)[0]
    assert not checked.counts and {fault.field for fault in checked.faults} == {"noise_multiplier"}


def test_two_requests_of_a_handle_are_two_rows(tree, submission):
    """A byte more in the file draws other seeds; averaged in a row, the better seeds would flatter both."""
    checked, _ = check_tree(tree, rules_of())
    other = [dataclasses.replace(record, id=record.id[::-1], seed=record.seed + 1) for record in checked[0].records]
    twin = dataclasses.replace(checked[0], path="ada/0123456789", digest="0123456789", records=tuple(other))
    board = rows_beside([checked[0], twin], None).board
    assert board is not None
    names = {row["defense"]["name"] for row in board["rows"] if METHOD in row["defense"]["name"]}
    assert names == {f"ada/{submission.name[:8]}/{METHOD}", f"ada/01234567/{METHOD}"}


# Code that reads otherwise than it runs.

HIDDEN = {
    "utf7": b"# coding: utf-7\n# a comment +AAo-import os\n",
    "carriage return": b"# a comment\rimport os\n",
    "bidirectional": "x = 1  # a\u202e comment\n".encode(),
    "latin-1": b"# coding: latin-1\nx = 1\n",
}


@pytest.mark.parametrize("content", HIDDEN.values(), ids=HIDDEN)
def test_a_file_that_hides_code_from_its_reader_is_refused(check, submission, content):
    file = submission / "half_dp.py"
    file.write_bytes(content + file.read_bytes())
    faults = only(check(), submission)
    assert any("half_dp.py: must be in UTF-8" in t or "must be without invisible characters" in t for t in faults)


@pytest.mark.parametrize(
    "line",
    ["import " + "a." * 200_000 + "b", "from " + "." * 500 + "x import y", "import " + "a" * 300],
    ids=["many parts", "many dots", "a long name"],
)
def test_an_import_that_no_file_system_has_costs_nothing(check, submission, line):
    """The first took all memory, the others ended the check of all submissions."""
    (submission / "half_dp.py").write_text(line + "\n")
    assert single_file(submission / "half_dp.py") == (
        "must have names of at most 100 parts with dots" if "." in line else ""
    )
    assert any("method.sha256: must be" in text for text in only(check(), submission))


def test_a_submission_that_no_rule_foresaw_is_refused_by_name_beside_the_others(tree, submission):
    def fails(path):
        raise IndexError("list index out of range")

    copy = moved(submission, "eve")
    rules = dataclasses.replace(rules_of(), single_file=lambda path: fails(path) if "eve" in str(path) else "")
    by_path = {entry.path: entry for entry in check_tree(tree, rules)[0]}
    assert by_path[f"ada/{submission.name}"].counts and not by_path[f"eve/{copy.name}"].counts
    assert "cannot be checked: IndexError" in str(by_path[f"eve/{copy.name}"].faults[0])


@pytest.mark.parametrize("name", ["dp_accounting.py", "socket.py", "torch.py"])
def test_a_file_with_the_name_of_a_module_is_refused(tmp_path, name):
    (tmp_path / name).write_text("x = 1\n")
    assert "must have a name of its own" in single_file(tmp_path / name)


@pytest.mark.long
def test_the_accountant_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "dp_accounting.py").write_text("raise SystemExit('hijacked')\n")
    monkeypatch.chdir(tmp_path)
    events = (Gaussian(sample_rate=0.1, noise_multiplier=1.0, count=10),)
    answer = pld_in_time(events, 1e-5, 1e-3, 300.0)
    assert answer is not None and answer.epsilon == pytest.approx(2.85, abs=0.01)
