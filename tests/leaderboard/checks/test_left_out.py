"""Lists of left out arrays: they cover large arrays that agree with their record, with a flag, and nothing else."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.checks.check import examine
from leakbench.leaderboard.checks.difference import diff
from leakbench.leaderboard.checks.merge import merge
from leakbench.leaderboard.page.images import PictureError, pairs_of
from leakbench.leaderboard.page.roc import scores_of
from leakbench.leaderboard.page.seed_bands import read_columns
from leakbench.leaderboard.records.files import digest_of_bytes
from leakbench.leaderboard.records.folder import read_folder
from leakbench.leaderboard.records.left_out import FLAG, LEAST, REASON, SUFFIX, ArraysLeftOut, LeftOut
from leakbench.leaderboard.records.validation import RecordError

from ...parameters import subtests

OK = {"kind": "membership", "defense": "dp_sgd", "control": None, "seed": 0}
ROWS = 12_000


def problems(folder, severity="refused", **options):
    faults = examine(folder, **options).faults
    return [f"{fault.file.rpartition('/')[2]} {fault.field}: {fault.problem}" for fault in faults
            if fault.severity == severity]  # fmt: skip


def entry(path):
    """Entry of a record's arrays."""
    arrays = path.with_suffix(".parquet")
    return {"name": arrays.name, "bytes": arrays.stat().st_size, "sha256": digest_of_bytes(arrays.read_bytes())}


def write(folder, *entries, name=None):
    """Writes a list as somebody could who knows how it is named."""
    content = json.dumps({"schema": 1, "arrays": entries}, indent=1).encode() + b"\n"
    path = folder / f"{name or digest_of_bytes(content)[:16]}{SUFFIX}"
    path.write_bytes(content)
    return path


@pytest.fixture
def large(tampered):
    """The folder, with a record whose arrays are large enough, and that record's path."""
    path = tampered.first(**OK)
    table = pd.DataFrame({"id": range(ROWS), "score": np.random.default_rng(0).random(ROWS)})
    table["member"] = table["id"] % 2 == 0
    table.to_parquet(path.with_suffix(".parquet"), index=False)
    tampered.arrays(path, path.with_suffix(".parquet").read_bytes())
    tampered.edit(path, lambda data: data["metrics"]["auc"].update(n=ROWS))
    assert path.with_suffix(".parquet").stat().st_size > LEAST and not tampered.faults
    return tampered, path


@pytest.fixture
def published(large):
    """The same without these arrays, which a list names."""
    tampered, path = large
    listed = write(tampered.folder, entry(path))
    path.with_suffix(".parquet").unlink()
    return tampered, path, listed


def test_a_listed_record_is_flagged_and_keeps_its_numbers(published):
    tampered, path, _ = published
    assert not problems(tampered.out)
    (flagged,) = problems(tampered.out, "flagged")
    assert flagged.startswith(f"{path.name} arrays: {REASON}") and "cannot be computed again here" in flagged
    (record,) = [record for record in read_folder(tampered.out).records if record.id == path.stem]
    assert record.status == "ok" and record.metrics["auc"].value is not None and FLAG in record.flags
    rows = {row.label: row for row in Board.from_folder(tampered.out).rows}
    assert [label for label, row in rows.items() if FLAG in row.flags] == ["dp_sgd"] and rows["dp_sgd"].rank == 1


def test_a_submission_may_leave_nothing_out(published):
    tampered, path, _ = published
    (refused,) = problems(tampered.out, left_out="refused")
    assert refused.startswith(path.name) and REASON in refused


def test_a_record_that_is_to_be_verified_has_no_numbers_without_its_arrays(published):
    tampered, path, _ = published
    records = {record.id: record for record in read_folder(tampered.out, lambda record, folder: "").records}
    assert records[path.stem].status == "failed" and REASON in (records[path.stem].reason or "")
    assert sum(record.status == "ok" for record in records.values()) == len(records) - 1


def test_without_its_list_it_is_refused_and_has_no_numbers_as_before(published):
    tampered, path, listed = published
    listed.unlink()
    assert problems(tampered.out) == [f"{path.name} arrays: its arrays {path.stem}.parquet are not beside it"]
    assert {r.id: r.status for r in read_folder(tampered.out).records}[path.stem] == "failed"


def test_pictures_curves_and_bands_are_not_available_with_that_reason(published):
    tampered, path, _ = published
    folder = read_folder(tampered.out)
    (record,) = [record for record in folder.records if record.id == path.stem]
    for read in (scores_of, pairs_of, lambda record, place: read_columns(record, place, ["score"])):
        with pytest.raises((RecordError, PictureError), match=REASON):
            read(record, folder.path)


def test_it_makes_no_difference_of_results(large, tmp_path):
    tampered, path = large
    whole = merge([tampered.out], tmp_path / "whole").folder
    write(tampered.folder, entry(path))
    path.with_suffix(".parquet").unlink()
    assert diff(whole, tampered.folder).equal


def test_merged_folders_keep_their_lists(published, tmp_path):
    tampered, _, listed = published
    merged = merge([tampered.out], tmp_path / "out")
    assert (merged.folder / "records" / listed.name).read_bytes() == listed.read_bytes()
    assert [fault.field for fault in merged.checked.faults] == ["arrays"]


HEX = "a" * 64


@subtests(
    "change, problem",
    [
        ({"sha256": HEX}, "].sha256: sha256 must be the arrays_digest of"),
        ({"bytes": LEAST}, "].bytes: arrays[0].bytes must be above 65536"),
        ({"bytes": 100}, "].bytes: arrays[0].bytes must be above 65536"),
        ({"bytes": 50 * 2**20}, f"].bytes: bytes must be at most {48 * ROWS + 16384} for a row for each of {ROWS}"),
        ({"bytes": True}, "must be an integer"),
        ({"name": f"{'b' * 32}.parquet"}, f"]: no record beside it names {'b' * 32}.parquet"),
        ({"name": f"../{'b' * 32}.parquet"}, "name must be a record's id followed by .parquet"),
        ({"name": "/etc/passwd"}, "name must be a record's id followed by .parquet"),
        ({"name": f"{'b' * 32}.parquet\n"}, "name must be a record's id followed by .parquet"),
        ({"why": "large"}, "key 'why' is unknown"),
    ],
)
def test_a_false_entry_is_refused_and_covers_nothing(published, tmp_path, change, problem):
    tampered, path, listed = published
    folder = Path(shutil.copytree(tampered.folder, tmp_path / "records"))
    (folder / listed.name).unlink()
    false = write(folder, json.loads(listed.read_text())["arrays"][0] | change)
    refused = problems(folder)
    assert any(words.startswith(false.name) and problem in words for words in refused), refused
    assert f"{path.name} arrays: its arrays {path.stem}.parquet are not beside it" in refused
    try:
        statuses = {record.id: record.status for record in read_folder(folder).records}
    except RecordError:
        return  # a list that is no list stops a board, as a bad manifest does
    assert statuses[path.stem] == "failed"


def test_arrays_below_the_limit_are_not_left_out_by_a_lie_about_their_size(tampered):
    path = tampered.first(**OK)
    write(tampered.folder, entry(path) | {"bytes": LEAST + 1})
    path.with_suffix(".parquet").unlink()
    refused = problems(tampered.out)
    assert any("bytes must be at most" in words and "for a row for each of 200 examples" in words for words in refused)
    assert f"{path.name} arrays: its arrays {path.stem}.parquet are not beside it" in refused
    assert {r.id: r.status for r in read_folder(tampered.out).records}[path.stem] == "failed"


def test_arrays_that_are_there_are_checked_whatever_a_list_says(large):
    tampered, path = large
    write(tampered.folder, entry(path))
    (flagged,) = problems(tampered.out, "flagged")
    assert "is beside its record" in flagged and not problems(tampered.out)
    arrays = path.with_suffix(".parquet")
    arrays.write_bytes(arrays.read_bytes()[:-1])
    assert any("cut or altered" in words for words in problems(tampered.out))
    assert {r.id: r.status for r in read_folder(tampered.out).records}[path.stem] == "failed"


def test_a_link_in_the_place_of_listed_arrays_is_refused_unread(published):
    tampered, path, _ = published
    path.with_suffix(".parquet").symlink_to("/etc/passwd")
    assert any("symbolic link" in words for words in problems(tampered.out))
    assert {r.id: r.status for r in read_folder(tampered.out).records}[path.stem] == "failed"


def test_a_list_is_named_by_its_content(published):
    tampered, path, listed = published
    listed.rename(listed.with_name(f"{'0' * 16}{SUFFIX}"))
    refused = problems(tampered.out)
    assert any("edited after it was written" in words for words in refused) and any(path.stem in w for w in refused)
    with pytest.raises(RecordError, match="edited after it was written"):
        read_folder(tampered.out)


def test_a_list_has_each_array_once_in_order():
    entries = [ArraysLeftOut(name=f"{digit * 16}.parquet", bytes=LEAST + 1, sha256=HEX) for digit in "ab"]
    assert LeftOut(arrays=tuple(entries)).name.endswith(SUFFIX)
    for wrong in ([], entries[::-1], [entries[0], entries[0]]):
        with pytest.raises(RecordError, match="at least one, ordered by name, each once"):
            LeftOut(arrays=tuple(wrong))
