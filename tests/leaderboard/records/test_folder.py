"""A folder of results: arrays by their digest, requests by their cells, and no way through a symbolic link."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.metrics import METRICS, reported
from leakbench.leaderboard.records.files import WriteError, digest_of_bytes, read_bytes, sweep, write_bytes
from leakbench.leaderboard.records.folder import read_folder
from leakbench.leaderboard.records.manifest import read_manifests, write_manifest
from leakbench.leaderboard.records.record import MethodUsed, RecordError, read_all, write

from ...parameters import subtests
from ..conftest import asked_for, provenance


@pytest.fixture
def stored(record, tmp_path):
    """A record with arrays on disk, and their folder."""
    folder = tmp_path / "run" / "records"
    folder.mkdir(parents=True)
    content = b"scores"
    made = record()
    made = dataclasses.replace(made, arrays=f"{made.id}.parquet", arrays_digest=digest_of_bytes(content))
    (folder / f"{made.id}.parquet").write_bytes(content)
    write(made, folder)
    write_manifest(asked_for(made), folder)
    return made, folder


def test_a_whole_folder_is_read_with_its_request(stored):
    made, folder = stored
    found = read_folder(folder.parent)
    assert found.records == [made] and found.complete.known and found.path == folder
    assert Board.from_folder(folder.parent).rows[0].rank == 1
    assert Board.from_folder(folder).rows[0].rank == 1  # the records' folder by itself, as it may be copied


def test_to_read_a_folder_writes_no_record_anew_and_names_each_request_once(stored, monkeypatch):
    made, folder = stored
    monkeypatch.setattr(type(made), "to_json", lambda self: pytest.fail("written to be compared with its cell"))
    manifests = read_folder(folder).complete.manifests
    assert manifests is not None
    (request,) = manifests
    monkeypatch.setattr(dataclasses, "asdict", lambda *given, **options: pytest.fail("named again"))
    assert request.name == next(folder.glob("*.manifest")).name


@subtests(
    "change, why",
    [
        (lambda path: path.unlink(), "are not beside it"),
        (lambda path: path.write_bytes(b"score"), "cut or altered"),
        (lambda path: path.write_bytes(b"sc0res"), "cut or altered"),
        (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "is a symbolic link"),
    ],
)
def test_a_record_without_its_own_arrays_has_no_numbers_and_is_not_ranked(stored, change, why):
    made, folder = stored
    change(folder / made.arrays)
    (one,) = read_folder(folder).records
    assert one.status == "failed" and why in one.reason and not one.metrics
    board = Board.from_folder(folder)
    assert not board.rows and board.gaps[0].startswith("INCOMPLETE: 1 of 1 records failed")


def test_numbers_that_scores_contradict_are_gone_when_verified(stored):
    made, folder = stored
    (one,) = read_folder(folder, lambda record, place: f"its auc is not {record.id}'s").records
    assert one.status == "failed" and one.reason == f"its auc is not {made.id}'s"


@subtests(
    "field, value",
    [
        ("control", "positive"),
        ("defense", MethodUsed(name="per_layer")),
        ("attack", MethodUsed(name="likelihood_ratio", settings={"shadows": 2})),
        ("budget", {"epsilon": 1.0, "delta": 1e-5}),
        ("seed", 7),
        ("suite", "another"),
    ],
)
def test_a_record_that_differs_from_the_cell_of_its_id_is_spoiled(stored, field, value):
    made, folder = stored
    write(dataclasses.replace(made, **{field: value}), folder)
    (one,) = read_folder(folder).records
    assert one.status == "failed" and one.reason == f"its {field} is not that of its cell"
    assert getattr(one, field) == getattr(made, field)  # so that an edited control still fails as one


def test_a_run_that_is_copied_under_other_seeds_is_spoiled(record, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"scores")
    digest = digest_of_bytes(b"scores")
    for fields in ({"seed": 0}, {"seed": 1}, {"seed": 1, "kind": "utility"}, {"seed": 2, "kind": "utility"}):
        made = record(arrays_digest=digest, arrays="a.parquet", **fields)
        write(dataclasses.replace(made, arrays=f"{made.id}.parquet"), tmp_path)
        (tmp_path / f"{made.id}.parquet").write_bytes(b"scores")
    found = {(one.kind, one.seed): one.reason or "" for one in read_folder(tmp_path).records}
    assert found["membership", 0].startswith("its arrays are those of record") and "of seed 1" in found["membership", 0]
    assert "of seed 0" in found["membership", 1] and not found["utility", 1] + found["utility", 2]


def test_seeds_whose_models_answer_with_the_same_labels_are_no_copies(record, tmp_path):
    for seed in (0, 1):
        digest = digest_of_bytes(b"labels")
        made = record(seed=seed, arrays="a.parquet", arrays_digest=digest, requires={"access": "LABEL_ONLY"})
        write(dataclasses.replace(made, arrays=f"{made.id}.parquet"), tmp_path)
        (tmp_path / f"{made.id}.parquet").write_bytes(b"labels")
    assert [one.status for one in read_folder(tmp_path).records] == ["ok", "ok"]


def test_links_are_followed_neither_to_read_nor_to_write(stored, tmp_path):
    made, folder = stored
    path = folder / f"{made.id}.json"
    outside = path.rename(tmp_path / path.name)
    path.symlink_to(outside)
    with pytest.raises(RecordError, match=r"cannot read record .*: it is a symbolic link"):
        read_all(folder)
    with pytest.raises(RecordError, match=r"cannot write .*: a symbolic link is in its place"):
        write(made, folder)
    assert json.loads(outside.read_text())["id"] == made.id
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "records").symlink_to(folder)
    with pytest.raises(RecordError, match="is a symbolic link"):
        read_all(elsewhere)
    name = asked_for(made).name
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(RecordError, match="cannot read manifest"):
        read_manifests(folder)


@subtests("edit", [{"cells": []}, {"suite": "another"}, {"command": ["rm", "-rf", "."]}])
def test_an_edited_request_is_refused(stored, edit):
    _, folder = stored
    (path,) = folder.glob("*.manifest")
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | edit))
    with pytest.raises(RecordError, match=f"bad manifest {re.escape(str(path))}: it was edited"):
        read_manifests(folder)


def test_what_cannot_be_written_names_the_path_and_leaves_nothing(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=f"cannot write {re.escape(str(tmp_path))}/a: No space left on device; .* run"):
        write_bytes(tmp_path / "a", b"x")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_became_read_only_is_one_sentence_with_the_path(tmp_path, monkeypatch):
    def read_only(path, *args, **settings):
        raise OSError(30, "Read-only file system", str(path))

    (tmp_path / ".a.tmp").touch()
    for name in ("open", "unlink"):
        monkeypatch.setattr(Path, name, read_only)
    with pytest.raises(WriteError, match=f"cannot write {re.escape(str(tmp_path))}/a: Read-only file system; .* run"):
        write_bytes(tmp_path / "a", b"x")
    with pytest.raises(
        WriteError, match=f"cannot remove {re.escape(str(tmp_path / '.a.tmp'))}: Read-only file system; .* run the same"
    ):
        sweep(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes among its files")
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_and_blocks_nobody(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(RecordError, match=f"cannot read record {re.escape(str(tmp_path))}/{name}: it is no reg"):
            read_bytes(tmp_path / name, "record")


def test_a_record_nested_too_deep_is_refused_with_its_path(stored):
    made, folder = stored
    path = folder / f"{made.id}.json"
    path.write_text(path.read_text().replace('"task": {', f'"task": {{"deep": {"[" * 700 + "]" * 700},'))
    with pytest.raises(RecordError, match=f"bad record {re.escape(str(path))}: "):
        read_all(folder)


def test_what_a_kill_leaves_behind_is_swept(stored):
    made, folder = stored
    for name in (".0123.1.aa.tmp", "0123456789abcdef.parquet", "my own.parquet"):
        (folder / name).write_bytes(b"half")
    sweep(folder)
    left = {f"{made.id}.json", made.arrays, asked_for(made).name, "my own.parquet"}
    assert {path.name for path in folder.iterdir()} == left


@subtests(
    "then, said",
    [
        ({"source": "1" * 64}, "leakbench was 0.1.0, source 000000000000, is 0.1.0, source 111111111111"),
        ({"version": "0.2.0"}, "leakbench was 0.1.0, is 0.2.0"),
        ({"versions": {"torch": "2.15"}}, "torch was 2.14.1, is 2.15"),
        ({"third_party": {"attack spy": "a"}}, "the code of attack spy has changed"),
        ({"tuning": "b"}, "the points tried for its tuning have changed"),
    ],
)
def test_another_code_differs_in_words(then, said):
    assert provenance().differences(provenance(**then)) == [said]


def test_the_same_code_at_another_commit_or_with_more_packages_does_not_differ():
    more = {"torch": "2.14.1", "opacus": "1.6.0"}
    assert provenance().differences(provenance(commit="c" * 40, dirty=False, versions=more)) == []


def test_one_table_knows_every_metric():
    assert set(reported()) < set(METRICS) and "epsilon" in reported()
    for name, known in METRICS.items():
        assert known.name == name and known.least < known.most and known.label
