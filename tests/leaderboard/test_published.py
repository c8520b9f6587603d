"""The committed board: its folders are without faults, small, and those that its README names."""

import re
import zlib
from pathlib import Path

import pytest

from leakbench.audit.cli.app import main
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.checks.check import examine
from leakbench.leaderboard.records.folder import folders_below
from leakbench.leaderboard.records.manifest import read_manifests
from leakbench.leaderboard.records.record import read_all

FOLDER = Path(__file__).parents[2] / "leaderboard" / "published"
FOLDERS = folders_below(FOLDER)
COLUMNS = ("folder", "command", "records", "code", "computed", "controls", "arrays left out")


def described():
    """Rows of the README's table, by folder."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    start = rows.index(list(COLUMNS)) + 2
    table = rows[start : start + next(i for i, row in enumerate(rows[start:]) if len(row) != len(COLUMNS))]
    return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in table}


def test_the_folder_holds_suites_alone_and_the_readme_names_each():
    assert FOLDERS and FOLDERS != [FOLDER]
    assert [folder.name for folder in FOLDERS] == sorted(described())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_published_suite_has_flags_at_most_and_is_as_described(folder):
    checked = examine(folder, failed_control="flagged")
    assert not [fault for fault in checked.faults if fault.severity == "refused"]
    row, records = described()[folder.name], read_all(folder)
    assert int(row["records"]) == len(records)
    assert row["arrays left out"] == str(sum(len(listed.arrays) for listed in checked.left_out.values()))
    assert {(record.provenance.commit or "")[:12] for record in records} == {row["code"]}
    manifests = read_manifests(folder / "records")
    assert {manifest.suite for manifest in manifests} == {folder.name}
    assert row["command"] in {" ".join(manifest.command) for manifest in manifests}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["computed"])
    board = Board.from_folder(folder)
    assert row["controls"] == ("held" if board.trustworthy else "failed" if board.controls else "none")
    assert not board.gaps


def test_the_repository_stays_small():
    files = [path for folder in FOLDERS for path in folder.rglob("*") if path.is_file()]
    assert sum(len(zlib.compress(path.read_bytes())) for path in files) < 25_000_000
    assert max(path.stat().st_size for path in files) <= 2 * 2**20


@pytest.mark.slow
def test_the_command_accepts_the_whole_folder_against_the_suites_of_this_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["leaderboard", "check", str(FOLDER), "--verify", "--with-failed-controls"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert len([line for line in printed.splitlines() if re.search(r": \d+ records, \d+ manifests, ", line)]) == len(
        FOLDERS
    )
