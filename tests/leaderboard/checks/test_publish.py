"""Publication: byte for byte without large arrays, by suite, whole or not at all; the same again changes nothing."""

import hashlib
import json
import shutil

import pytest

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.checks import publish as publishing
from leakbench.leaderboard.checks.check import check_folder, examine
from leakbench.leaderboard.checks.publish import PublishError, publish
from leakbench.leaderboard.records.folder import folders_below
from leakbench.leaderboard.records.left_out import LEAST, SUFFIX
from leakbench.leaderboard.records.validation import RecordError

from ...parameters import subtests
from .conftest import Tampered
from .test_left_out import OK, large  # noqa: F401 -- a fixture


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_run_is_published_byte_for_byte_in_the_folder_of_its_suite(clean, tmp_path):
    (suite,) = publish([clean], tmp_path / "out")
    kept = {name: digest for name, digest in contents(clean).items() if name.startswith("records/")}
    assert (suite.suite, suite.state, suite.left_out, suite.records) == ("tiny", "new", 0, 16)
    assert contents(tmp_path / "out") == {f"tiny/{name}": digest for name, digest in kept.items()}
    assert suite.bytes == sum(path.stat().st_size for path in (clean / "records").iterdir())
    assert not check_folder(suite.folder)
    assert Board.from_folder(suite.folder).to_dict() == Board.from_folder(clean).to_dict()


def test_large_arrays_are_left_out_and_listed(large, tmp_path):  # noqa: F811 -- the fixture
    tampered, path = large
    (suite,) = publish([tampered.out], tmp_path / "out", most=LEAST)
    assert suite.left_out == 1 and not (suite.folder / "records" / f"{path.stem}.parquet").exists()
    assert [fault.severity for fault in check_folder(suite.folder)] == ["flagged"]
    (whole,) = publish([tampered.out], tmp_path / "whole")
    assert whole.left_out == 0 and not check_folder(whole.folder)
    # What was published can be published again, without the arrays that it lacks.
    (again,) = publish([suite.folder], tmp_path / "again")
    assert contents(again.folder) == contents(suite.folder)


def test_smaller_arrays_must_be_published(clean, tmp_path):
    with pytest.raises(ValueError, match=f"arrays of up to {LEAST} bytes must lie beside their records"):
        publish([clean], tmp_path / "out", most=LEAST - 1)


def test_the_same_again_changes_nothing(clean, tmp_path):
    publish([clean], tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    (suite,) = publish([clean / "records"], tmp_path / "out")
    assert suite.state == "unchanged" and not suite.changes
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_another_run_of_a_suite_replaces_it_and_the_change_is_named(clean, tampered, tmp_path):
    publish([clean], tmp_path / "out")
    tampered.edit(
        tampered.first(**OK), lambda data: (data.update(seconds=9.0), data["provenance"].update(commit="f" * 40))
    )
    for path in tampered.named(seed=1):
        tampered.forget(path)
    (suite,) = publish([tampered.out], tmp_path / "out")
    assert suite.state == "replaced" and suite.changes.startswith("records and searches: 0 added, 8 removed, 1 changed")
    assert "f" * 12 in suite.changes
    assert contents(suite.folder) == contents(tampered.out)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny"]


def test_searches_are_published_without_the_points_that_they_tried(tampered, tmp_path):
    searches = tampered.out / "tuning"
    (searches / "points").mkdir(parents=True)
    (searches / f"{'c' * 32}.json").write_text('{"best": 1.0}')
    (searches / "points" / f"{'d' * 32}.json").write_text("{}")
    (tampered.out / "artifacts").mkdir()
    (suite,) = publish([tampered.out], tmp_path / "out")
    assert [path.relative_to(suite.folder).as_posix() for path in (suite.folder / "tuning").rglob("*")] == [
        f"tuning/{'c' * 32}.json"
    ]
    assert sorted(path.name for path in suite.folder.iterdir()) == ["records", "tuning"]


@subtests(
    "change, problem",
    [
        (lambda t: t.first(**OK).with_suffix(".parquet").unlink(), "are not beside it"),
        (lambda t: t.edit(t.first(**OK), lambda d: d.update(seed=7), sealed=False), "edited after it was written"),
        (lambda t: t.ask(lambda d: d.update(command=["leakbench", "run", "/home/me/tiny.toml"])), "holds a path"),
        (lambda t: t.edit(t.first(**OK), lambda d: d.update(reason="in /home/me/data")), "holds a path"),
        (lambda t: _search(t, '{"data": "/home/me/data"}'), "holds a path"),
        (lambda t: _search(t, '{"data": '), "not a whole JSON document"),
    ],
)
def test_a_fault_or_a_path_of_a_machine_publishes_nothing_of_any_suite(clean, tmp_path, change, problem):
    tampered = Tampered(clean, tmp_path / "run")
    change(tampered)
    with pytest.raises(PublishError) as caught:
        publish([tampered.out], tmp_path / "out")
    assert any(problem in fault.problem for fault in caught.value.faults if fault.severity == "refused")
    assert not (tmp_path / "out").exists()


def _search(tampered, text):
    (tampered.out / "tuning").mkdir()
    (tampered.out / "tuning" / f"{'c' * 32}.json").write_text(text)


def test_a_failed_control_is_published_only_if_the_publisher_says_so(tampered, tmp_path):
    for path in tampered.named(control="positive", kind="membership"):
        tampered.edit(path, lambda data: data["metrics"]["auc"].update(value=0.5, low=0.4, high=0.6))
    with pytest.raises(PublishError, match="it must show"):
        publish([tampered.out], tmp_path / "out")
    (suite,) = publish([tampered.out], tmp_path / "out", failed_control="flagged")
    assert any(fault.field == "controls" and fault.severity == "flagged" for fault in suite.faults)
    assert examine(suite.folder).refused and not examine(suite.folder, failed_control="flagged").refused


def test_the_name_of_a_folder_is_that_of_a_suite_and_leads_nowhere(tampered, tmp_path):
    tampered.ask(lambda data: data.update(suite="tiny/suite"))
    for path in tampered.named():
        tampered.edit(path, lambda data: data.update(suite="tiny/suite"))
    with pytest.raises(RecordError, match="must be of a-z, 0-9, _ and - to be a folder's, got 'tiny/suite'"):
        publish([tampered.out], tmp_path / "out")


def test_two_runs_of_a_suite_at_once_are_refused(clean, tmp_path):
    with pytest.raises(RecordError, match="suite tiny are given twice"):
        publish([clean, clean], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_not_replaced(clean, tmp_path):
    (tmp_path / "out" / "tiny").mkdir(parents=True)
    (tmp_path / "out" / "tiny" / "notes.txt").write_text("mine")
    with pytest.raises(RecordError, match=r"must have records and tuning alone, and has notes\.txt"):
        publish([clean], tmp_path / "out")
    assert contents(tmp_path / "out").keys() == {"tiny/notes.txt"}


def test_what_was_published_stays_if_its_successor_cannot_take_its_place(clean, tampered, tmp_path, monkeypatch):
    publish([clean], tmp_path / "out")
    before = contents(tmp_path / "out")
    tampered.edit(tampered.first(**OK), lambda data: data.update(seconds=9.0))
    rename = type(tmp_path).rename

    def failing(path, target):
        if path.name.endswith(".tmp") and target.name == "tiny" and (path / "records").is_dir() and not done:
            done.append(path)
            raise OSError("no room")
        return rename(path, target)

    done = []
    monkeypatch.setattr(type(tmp_path), "rename", failing)
    with pytest.raises(OSError, match="no room"):
        publish([tampered.out], tmp_path / "out")
    assert contents(tmp_path / "out") == before and len(done) == 1


def test_a_folder_of_published_suites_stands_for_its_suites_and_no_other_folder_does(clean, tmp_path):
    out = tmp_path / "out"
    (suite,) = publish([clean], out)
    (out / "README.md").write_text("what these are")
    assert folders_below(out) == [suite.folder] and folders_below(suite.folder) == [suite.folder]
    assert folders_below(clean) == [clean] and folders_below(clean / "records") == [clean / "records"]
    assert folders_below(tmp_path / "absent") == [tmp_path / "absent"]
    (out / "other.json").write_text("{}")
    assert folders_below(out) == [out]
    (out / "other.json").unlink()
    shutil.copytree(suite.folder, out / ".draft.tmp")
    assert folders_below(out) == [out]
    problems = {fault.file: fault.problem for fault in examine(out).faults}
    assert "draft of an interrupted run; remove it" in problems[".draft.tmp"]
    assert "move what lies beside the suites" in problems[suite.folder.name]  # and not: remove the suite
    shutil.rmtree(out / ".draft.tmp")
    (out / "link").symlink_to(suite.folder)
    assert folders_below(out) == [out]


def test_the_list_of_a_published_folder_is_json(large, tmp_path):  # noqa: F811 -- the fixture
    tampered, path = large
    (suite,) = publish([tampered.out], tmp_path / "out", most=LEAST)
    (listed,) = (suite.folder / "records").glob(f"*{SUFFIX}")
    (arrays,) = json.loads(listed.read_text())["arrays"]
    assert arrays["name"] == f"{path.stem}.parquet" and arrays["bytes"] > LEAST
    assert publishing.MOST == 2 * 2**20
