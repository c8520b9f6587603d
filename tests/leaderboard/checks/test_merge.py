"""Folders merged into one: copies byte for byte, whole or not at all, and never a choice between two results."""

import hashlib
import json
import shutil

import pytest

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.checks.merge import MergeError, merge
from leakbench.leaderboard.records.validation import RecordError

from .conftest import Tampered

OK = {"kind": "membership", "defense": "dp_sgd", "control": None, "seed": 0}


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "records").iterdir()}


@pytest.fixture
def halves(clean, tmp_path):
    """The run on two machines: each has the request and one of its seeds, and both have the arrays of a cell."""
    folders = [Tampered(clean, tmp_path / name) for name in ("a", "b")]
    for folder, seed in zip(folders, (0, 1), strict=True):
        for path in folder.named(seed=seed):
            path.unlink()
            path.with_suffix(".parquet").unlink(missing_ok=True)
    return [folder.out for folder in folders]


def test_parts_of_a_run_become_the_run(halves, clean, tmp_path):
    merged = merge(halves, tmp_path / "out")
    assert contents(merged.folder) == contents(clean)
    assert merged.copies == 1  # the manifest
    assert Board.from_folder(merged.folder).to_dict() == Board.from_folder(clean).to_dict()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out"]


def test_the_same_run_twice_is_one(clean, tmp_path):
    merged = merge([clean, clean / "records", clean], tmp_path / "out")
    assert contents(merged.folder) == contents(clean) and merged.copies == 2 * len(contents(clean))


def test_two_records_of_a_cell_are_a_conflict_by_both_names_and_nothing_is_written(clean, tampered, tmp_path):
    path = tampered.edit(tampered.first(**OK), lambda data: data.update(seconds=9.0))
    with pytest.raises(MergeError) as caught:
        merge([clean, tampered.out], tmp_path / "out")
    (fault,) = caught.value.faults
    assert fault.file == str(path) and str(clean / "records" / path.name) in fault.problem
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_one_cell_under_two_ids_is_a_conflict_by_both_names(clean, tampered, tmp_path):
    path = tampered.first(**OK)
    twin = tampered.copy(path, "f" * 32)
    with pytest.raises(MergeError) as caught:
        merge([tampered.out, clean], tmp_path / "out")
    named = {fault.file: fault.problem for fault in caught.value.faults if "recorded again" in fault.problem}
    assert named.keys() == {str(path), str(twin)}


def test_a_fault_of_any_folder_refuses_the_whole(clean, tampered, tmp_path):
    def auc(data):
        data["metrics"]["auc"].update(value=0.1, low=0.4, high=0.6)

    path = tampered.edit(tampered.first(**OK), auc)
    (clean_copy := tmp_path / "clean").mkdir()
    shutil.copytree(clean / "records", clean_copy / "records")
    (clean_copy / "records" / path.name).unlink()
    (clean_copy / "records" / path.with_suffix(".parquet").name).unlink()
    with pytest.raises(MergeError, match="value must lie in its interval") as caught:
        merge([clean_copy, tampered.out], tmp_path / "out")
    assert str(path) in {fault.file for fault in caught.value.faults} and not (tmp_path / "out").exists()


def test_links_are_refused_before_anything_is_read(clean, tampered, tmp_path):
    path = tampered.first(**OK)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(MergeError, match="symbolic link"):
        merge([clean, tampered.out], tmp_path / "out")


def test_an_existing_folder_is_not_merged_into(clean, tmp_path):
    (tmp_path / "out").mkdir()
    assert merge([clean], tmp_path / "out").folder.is_dir()  # an empty one is as good as none
    before = contents(tmp_path / "out")
    with pytest.raises(RecordError, match="must be a new or empty folder"):
        merge([clean], tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="must be a new or empty folder"):
        merge([clean], tmp_path / "link")
    assert contents(tmp_path / "out") == before


def test_a_cell_that_no_folder_has_is_missing_from_the_whole(halves, tmp_path):
    with pytest.raises(MergeError, match="has no record") as caught:
        merge(halves[:1], tmp_path / "out")
    assert json.dumps([fault.to_dict() for fault in caught.value.faults])
