"""A stranger's afternoon in small: a defense by file is drafted, run, checked, signed, verified, and tampered with."""

import dataclasses
import hashlib
import json
import shlex

import pytest

from leakbench.audit.cli.submit import rules_of
from leakbench.audit.submission.suites import facts
from leakbench.leaderboard.board.identity import row_id
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.checks.suites import KnownSuite, suite_faults
from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.records.manifest import read_manifests
from leakbench.leaderboard.records.record import read
from leakbench.leaderboard.site.cite import records_digest
from leakbench.leaderboard.site.site import Guide, Site, SiteRow
from leakbench.leaderboard.site.submissions import read_submissions, submission_page
from leakbench.leaderboard.submissions.declaration import read_declaration
from leakbench.leaderboard.submissions.rows import beside
from leakbench.leaderboard.submissions.signature import can_sign
from tests.leaderboard.submissions.test_signature import make_key

from .conftest import METHOD, fill, run_command
from .test_hostile import edited, removed


def document(capsys, *arguments):
    code, out, _ = run_command(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_a_draft_prints_the_seeds_and_the_command_and_says_what_to_fill_in(tiny_suite, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(METHOD)
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    entry = '{ name = "mine.py:half_dp", clip_norm = 2.0 }'
    arguments = ("submit", "all", "--new", "--handle", "ada", "--suite", "tiny", "--defense", entry)
    code, drafted = document(capsys, *arguments)
    assert code == 0 and len(drafted["seeds"]) == 2 and not (tmp_path / "canary").exists()
    words = shlex.split(drafted["command"])
    assert words[words.index("--add-defense") + 1] == entry and words[-2:] == ["--out", "."]
    code, out, _ = run_command(capsys, "submit", drafted["folder"], "--check")
    assert code == 3 and out.count("must be filled in") == 5
    code, _, error = run_command(capsys, *arguments)
    assert code == 2 and "is there already" in error


def test_a_submission_counts_and_its_row_stands_beside_the_published_ones(tree, submission, capsys, tmp_path):
    code, checked = document(capsys, "submit", submission, "--check", "--board", tree / "ada")
    (entry,) = checked["submissions"]
    assert code == 0 and entry["counts"] and entry["faults"] == []
    assert not entry["tier"]["recomputed"]
    assert any(row["defense"]["name"] == "ada/half_dp.py:half_dp" for row in checked["board"]["rows"])
    assert {line["verdict"] for line in checked["drift"]} == {"agrees"}  # with itself
    assert not (tmp_path / "canary").exists()


@pytest.mark.long
def test_a_bad_submission_beside_it_is_set_aside_by_name(tree, submission, capsys):
    (tree / "eve" / "0").mkdir(parents=True)
    code, checked = document(capsys, "submit", tree, "--check")
    by_path = {entry["path"]: entry for entry in checked["submissions"]}
    assert code == 3 and by_path[f"ada/{submission.name}"]["counts"] and not by_path["eve/0"]["counts"]
    assert any(row["defense"]["name"] == "ada/half_dp.py:half_dp" for row in checked["board"]["rows"])


@pytest.mark.long
def test_verification_asks_before_it_runs_a_strangers_code(submission, capsys, tmp_path):
    code, _, error = run_command(capsys, "verify", submission, "--verifier", "grace")
    assert code == 2 and "--run-their-code" in error and not (tmp_path / "canary").exists()
    code, _, error = run_command(capsys, "verify", submission, "--verifier", "ada", "--run-their-code")
    assert code == 2 and "somebody else" in error


@pytest.mark.long
def test_two_cells_are_verified_and_a_tampered_record_is_then_refused(tree, submission, capsys, tmp_path):
    arguments = ("--verifier", "grace", "--cells", 2, "--fresh", 2, "--salt", "s", "--jobs", 1, "--run-their-code")
    signing = ()
    if can_sign():
        key = make_key(tmp_path / "grace")
        (tree / "verifiers").write_text(f"grace {key.with_suffix('.pub').read_text()}")
        signing = ("--sign", key)
    code, verified = document(capsys, "verify", submission, *arguments, *signing)
    stamp = verified["content"]
    assert code == 0 and verified["holds"] and (tmp_path / "canary").exists()
    same = [line for line in stamp["comparisons"] if line["seeds"] == "same"]
    assert {line["verdict"] for line in same} == {"identical"}  # on the same machine
    assert {line["metric"] for line in stamp["comparisons"] if line["seeds"] == "fresh"} == {"accuracy", "auc"}
    assert set(stamp["fresh"]).isdisjoint({read(path).seed for path in (submission / "records").glob("*.json")})
    assert str(tmp_path) not in json.dumps(stamp)
    code, checked = document(capsys, "submit", submission, "--check")
    tier = checked["submissions"][0]["tier"]
    assert code == 0 and tier["recomputed"] == bool(signing) and tier["tier"] == "unverified parts"

    record = next(iter((submission / "records").glob("*.json")))
    record.write_text(record.read_text().replace('"seconds": ', '"seconds": 1'))
    code, checked = document(capsys, "submit", submission, "--check")
    entry = checked["submissions"][0]
    assert code == 3 and any(record.name in fault["file"] for fault in entry["faults"])
    assert not entry["tier"]["recomputed"]
    code, _, error = run_command(capsys, "verify", submission, *arguments)
    assert code == 3 and "is set aside" in error


@pytest.mark.long
@pytest.mark.skipif(not can_sign(), reason="needs ssh-keygen, of OpenSSH")
def test_a_signed_submission_counts_and_one_signed_by_another_key_does_not(tree, submission, capsys, tmp_path):
    ada, eve = make_key(tmp_path / "ada_key"), make_key(tmp_path / "eve_key")
    (tree / "ada" / "allowed_signers").write_text(f"ada {ada.with_suffix('.pub').read_text()}")
    code, out, _ = run_command(capsys, "submit", submission, "--check")
    assert code == 3 and "SIGNATURE: must be there" in out
    code, out, _ = run_command(capsys, "submit", submission, "--sign", ada, "--check")
    assert code == 0, out
    code, out, _ = run_command(capsys, "submit", submission, "--sign", eve, "--check")
    assert code == 3 and "SIGNATURE: must be a signature of this content by a key of ada" in out


ATTACK = '''"""Loss threshold under another name."""

import os
from pathlib import Path

import torch

from leakbench.attacks.core import Access, MembershipScores, ModelAccess, attack, granted
from leakbench.attacks.core.membership.query_scores import answers

if "CANARY" in os.environ:
    Path(os.environ["CANARY"]).write_text("this file was run")


@attack(access=Access.BLACK_BOX)
def by_loss(target: ModelAccess, generator: torch.Generator) -> MembershipScores:
    """Scores a candidate by its loss."""
    candidates = granted(target.candidates)
    scores = answers(target, candidates, 1024).gather(1, candidates.labels[:, None])[:, 0]
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False, dependence="per_model")
'''


@pytest.mark.long
@pytest.mark.parametrize("kind", ["attack", "run"])
def test_attacks_and_plain_runs_are_submitted_and_verified_alike(tiny_suite, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ATTACK)
    method = ("--attack", "mine.py:by_loss") if kind == "attack" else ()
    # Seeds follow from the handle, and with 200 candidates some seeds lose a control by chance: these hold theirs.
    handle = {"attack": "mallory", "run": "eve"}[kind]
    _, drafted = document(capsys, "submit", "all", "--new", "--handle", handle, "--suite", "tiny", *method)
    folder = tmp_path / drafted["folder"]
    fill(folder)
    monkeypatch.chdir(folder)
    words = shlex.split(drafted["command"].partition("&& leakbench ")[2])
    code, out, _ = run_command(capsys, *words, "--jobs", 1)
    assert code == 0, out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    code, checked = document(capsys, "submit", folder, "--check")
    own = checked["attacks"].get(f"{handle}/{folder.name}", [])
    assert {cell["other"]["attack"] for cell in own} == ({"likelihood_ratio"} if kind == "attack" else set())
    assert code == 0, checked["submissions"][0]["faults"]
    assert not (tmp_path / "canary").exists()
    agreed = ("--run-their-code",) if kind == "attack" else ()
    code, verified = document(
        capsys, "verify", folder, "--verifier", "grace", "--cells", 3, "--fresh", 0, "--jobs", 1, *agreed
    )
    assert code == 0 and verified["holds"]


def test_a_cell_that_the_submission_skips_and_its_code_runs_is_found_by_verification(tree, submission, capsys):
    """A check cannot know what a stranger's code requests; the cell has no number that could be drawn."""
    own = edited(submission, lambda cell: cell.defense.name == "half_dp.py:half_dp" and cell.attack, skip="it cannot")
    removed(submission, own)
    arguments = ("--verifier", "grace", "--cells", 1, "--fresh", 0, "--jobs", 1, "--run-their-code")
    code, verified = document(capsys, "verify", submission, *arguments)
    lines = [line for line in verified["content"]["comparisons"] if line["metric"] == "request"]
    assert code == 1 and not verified["holds"] and {line["cell"] for line in lines} == set(own)
    assert all("skips this cell, and the code does not: it cannot" in line["reason"] for line in lines)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (METHOD.replace("def half_dp", "def other"), "must define the function half_dp; it has other"),
        ("", "must define the function half_dp; it has none"),
        ("def half_dp(:\n", "must be a Python file: invalid syntax (line 1)"),
    ],
    ids=["another name", "empty", "no Python"],
)
def test_a_file_without_the_function_gets_no_draft(tiny_suite, tmp_path, monkeypatch, capsys, content, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(content)
    arguments = ("submit", "all", "--new", "--handle", "ada", "--suite", "tiny", "--defense", "mine.py:half_dp")
    code, _, error = run_command(capsys, *arguments)
    assert code == 2 and sentence in error and not (tmp_path / "all").exists()


@pytest.mark.long
def test_a_draft_prints_a_trial_of_the_method_that_the_command_can_run(tiny_suite, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(METHOD)
    arguments = ("submit", "all", "--new", "--handle", "ada", "--suite", "tiny", "--defense", "mine.py:half_dp")
    _, drafted = document(capsys, *arguments)
    words = shlex.split(drafted["trial"])
    monkeypatch.chdir(words[1])
    code, _, error = run_command(capsys, *words[4:], "--jobs", 1)
    assert code == 0, error
    (trial,) = tmp_path.glob("trial-*")
    assert trial.name == f"trial-{words[1].split('/')[-1][:8]}", (
        "a draft anew must not meet the records of the last one"
    )
    assert {read(path).defense.name for path in (trial / "records").glob("*.json")} == {
        "sgd",
        "mine.py:half_dp",
    }


def test_a_handles_folder_and_a_missing_board_are_named(tree, submission, capsys):
    code, _, error = run_command(capsys, "submit", tree / "ada", "--check")
    assert code == 2 and "the folder of a handle; take the folder above" in error
    code, _, error = run_command(capsys, "submit", submission, "--check", "--board", tree / "nowhere")
    assert code == 2 and "--board must be a folder of published records" in error


ENTROPY = '''"""Entropy of predictions."""

from leakbench.attacks.core import Access, MembershipScores, ModelAccess, attack


@attack(access=Access.BLACK_BOX)
def entropy(target: ModelAccess, generator) -> MembershipScores:
    """Scores a candidate by the negative entropy of its prediction."""
    candidates = target.candidates
    shares = target.logits(candidates.inputs).double().softmax(dim=1)
    scores = (shares * shares.clamp_min(1e-12).log()).sum(dim=1)
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False)
'''


@pytest.mark.long
def test_an_attack_on_a_zoo_keeps_the_seeds_of_its_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ENTROPY)
    arguments = ("submit", "all", "--new", "--handle", "ada", "--suite", "zoo_small")
    code, out, _ = run_command(capsys, *arguments, "--attack", "mine.py:entropy")
    assert code == 0 and "the only ones of its zoo: 0, 1, 2" in out
    (folder,) = (tmp_path / "all" / "ada").iterdir()
    fill(folder)
    suite = facts(read_declaration(folder))
    assert suite.seeds == (0, 1, 2) and suite.cells and not suite.unplanned
    code, _, error = run_command(capsys, *arguments, "--defense", "mine.py:entropy")
    assert code == 2 and "a defense must be submitted to a suite that trains" in error


def test_cells_of_an_added_method_are_no_forged_cells_of_the_suite(submission):
    (manifest,) = read_manifests(submission / "records")
    cells = [cell for cell in manifest.cells if cell.defense.name != "half_dp.py:half_dp"]
    suite = KnownSuite(digest=manifest.suite_digest, cells=cells)
    (fault,) = suite_faults({"file": manifest}, (), {"file": suite})
    assert fault.severity == "flagged" and "cells are of half_dp.py:half_dp, which the command added" in fault.problem
    forged = dataclasses.replace(manifest, command=("leakbench", "run", "tiny"))
    assert {fault.severity for fault in suite_faults({"file": forged}, (), {"file": suite})} == {"refused"}


def test_folders_without_a_record_are_not_merged(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, _, error = run_command(capsys, "leaderboard", "merge", tmp_path / "empty", "--out", tmp_path / "out")
    assert code == 3 and f"there is no record in {tmp_path / 'empty'}" in error


def test_a_site_has_the_submission_that_counts_with_its_page_and_names_the_bad_one(tree, submission, tmp_path):
    (tree / "eve" / "0").mkdir(parents=True)
    read_back = read_submissions(tree, rules_of())
    (shown,) = read_back.submissions
    assert shown.handle == "ada" and list(read_back.refused) == ["eve/0"]
    assert "SUBMISSION.toml" in read_back.refused["eve/0"] and not (tmp_path / "canary").exists()
    board = beside(None, read_back.named)
    rows = tuple(
        SiteRow(id=row_id(row), row=row, tier=shown.tier, submission=read_back.owner(row)) for row in board.rows
    )
    assert all(row.submission is shown and row.row.defense.name.startswith("ada/") for row in rows)
    site = Site(
        board=board, rows=rows, folders=read_back.folders, guide=Guide(), publication=Publication(),
        submissions=read_back.submissions, refused=read_back.refused,
    )  # fmt: skip
    text = submission_page(site, shown)
    for words in ("Unverified parts:", "Ada, Example University", "ada/half_<wbr>dp.py:half_<wbr>dp", "def half_dp"):
        assert words in text
    # A citation pins the files: their seals, although the rows' records have the handle in their names.
    (own,) = [row for row in rows if row.row.defense.name == "ada/half_dp.py:half_dp" and row.row.control is None]
    files = [json.loads(path.read_text()) for path in (submission / "records").glob("*.json")]
    seals = sorted(
        f"{r['id']} {r['seal']}\n" for r in files if r["defense"]["name"] == "half_dp.py:half_dp" and not r["control"]
    )
    assert records_digest(own) == hashlib.sha256("".join(seals).encode()).hexdigest()

    method = submission / "half_dp.py"
    method.write_bytes(method.read_bytes() + b"# another")  # the next check refuses it
    assert "it has changed since the check" in submission_page(site, shown)


def test_no_submission_takes_the_ranks_of_the_published_rows(tree, submission):
    published = Board.from_folder(submission / "records")
    read_back = read_submissions(tree, rules_of())
    both = beside(published, read_back.named)
    ranks = {row.label: row.rank for row in both.rows}
    assert all(ranks[row.label] == row.rank for row in published.rows)
    assert any(row.rank for row in both.rows if row.defense.name == "ada/half_dp.py:half_dp")
