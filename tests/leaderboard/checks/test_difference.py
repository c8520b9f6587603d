"""Two folders of records against each other: what was added, removed and changed, by rows, cells and metrics."""

import json
import shutil

import pytest

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.checks.difference import Differences, diff
from leakbench.leaderboard.checks.report import WIDTH, diff_lines
from leakbench.leaderboard.records.validation import RecordError

OK = {"kind": "membership", "defense": "dp_sgd", "control": None, "seed": 0}
NAME = "tiny: dp_sgd x likelihood_ratio, seed 0"


def shifted(by, **more):
    def change(data):
        auc = data["metrics"]["auc"]
        for key in ("value", "low", "high"):
            auc[key] = min(1.0, auc[key] + by)
        data.update(more)

    return change


def cells(before, after) -> Differences:
    difference = diff(before, after).cells
    assert difference is not None
    return difference


def test_a_folder_equals_itself_and_a_copy_that_took_longer(clean, tampered):
    tampered.edit(tampered.first(**OK), lambda data: data.update(seconds=1e6, device="another"))
    for other in (clean, clean / "records", tampered.out):
        difference = diff(clean, other)
        assert difference.equal and not difference.cells and diff_lines(difference) == ["no difference"]
    assert difference.cells is not None and difference.cells.same == len(list((clean / "records").glob("*.json")))


def test_a_changed_metric_has_both_values_the_difference_and_whether_intervals_are_disjoint(clean, tampered):
    path = tampered.first(**OK)
    before = json.loads(path.read_text())["metrics"]["auc"]
    assert before["high"] - before["low"] < 0.2, "the interval must be narrow for the shifts below"
    for by, disjoint in ((0.01, False), (-0.3, True)):
        tampered.edit(path, shifted(by))
        after = json.loads(path.read_text())["metrics"]["auc"]
        (change,) = cells(clean, tampered.out).changed
        (number,) = change.numbers
        assert change.name == NAME and not change.fields and number.name == "auc"
        assert number.before == (before["value"], before["low"], before["high"])
        assert number.after == (after["value"], after["low"], after["high"])
        assert number.difference == pytest.approx(after["value"] - before["value"]) and number.disjoint == disjoint


def test_claims_flags_status_and_code_are_named_by_field(clean, tampered):
    def change(data):
        data["claim"]["delta"] = 1e-6
        data["flags"] = ["diverged"]
        data["provenance"]["versions"]["numpy"] = "0.1"
        data["provenance"]["source"] = "e" * 64

    tampered.edit(tampered.first(**OK), change)
    (changed,) = cells(clean, tampered.out).changed
    assert changed.fields["claim.delta"] == (1e-5, 1e-6) and changed.fields["flags"][1] == ["diverged"]
    assert changed.fields["provenance.numpy"][1] == "0.1" and changed.fields["provenance.source"][1] == "e" * 12
    assert not changed.numbers


def test_added_and_removed_cells_are_named_and_the_other_way_round(clean, tampered):
    tampered.forget(tampered.first(**OK))
    gone, come = cells(clean, tampered.out), cells(tampered.out, clean)
    assert gone.removed == come.added == (NAME,) and gone.added == come.removed == ()
    assert not diff(clean, tampered.out).equal and not diff(tampered.out, clean).equal
    for path in tampered.named(defense="dp_sgd", control=None):
        tampered.forget(path)
    assert diff(clean, tampered.out).rows.removed == ("tiny: dp_sgd",)


def test_a_changed_setting_is_a_field_and_no_other_cell(clean, tampered):
    def change(data):
        data["task"]["lr"] = 9.0

    for path in tampered.named(defense="dp_sgd", control=None, kind="utility", seed=0):
        tampered.edit(path, change)
        tampered.manifest.unlink()
    difference = cells(clean, tampered.out)
    (changed,) = difference.changed
    assert changed.fields == {"task.lr": (2.0, 9.0)} and not difference.added and not difference.removed


def test_drift_is_over_all_cells_that_have_the_metric(clean, tampered):
    paths = tampered.named(kind="membership")
    for path, by in zip(paths[:2], (0.02, -0.05), strict=True):
        tampered.edit(path, shifted(by))
    auc = next(drift for drift in diff(clean, tampered.out).drift if drift.name == "auc")
    moved = [
        json.loads(path.read_text())["metrics"]["auc"]["value"]
        - json.loads((clean / "records" / path.name).read_text())["metrics"]["auc"]["value"]
        for path in paths
    ]
    assert (auc.compared, auc.changed) == (len(paths), sum(move != 0 for move in moved))
    assert auc.mean == pytest.approx(sum(moved) / len(moved)) and abs(auc.largest) == max(map(abs, moved))


def test_boards_are_compared_by_their_rows(clean, tampered, tmp_path):
    tampered.edit(tampered.first(**OK), shifted(0.05))
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, folder in zip(files, (clean, tampered.out), strict=True):
        file.write_text(json.dumps(Board.from_folder(folder).to_dict()))
    difference = diff(*files)
    assert difference.cells is None and [change.name for change in difference.rows.changed] == ["tiny: dp_sgd"]
    assert diff(clean, tampered.out).rows == difference.rows == diff(clean, files[1]).rows
    assert diff(files[0], clean).equal
    files[0].write_text("[]")
    with pytest.raises(RecordError, match="is no board"):
        diff(*files)


def test_lines_fit_a_terminal_and_json_is_json(clean, tampered):
    tampered.edit(tampered.first(**OK), shifted(0.05, flags=["diverged"]))
    shutil.copy(tampered.first(**OK), tampered.out / "away.json")
    difference = diff(clean, tampered.out)
    lines = diff_lines(difference)
    assert max(map(len, lines)) <= WIDTH and any("-> " in line and "auc: " in line for line in lines)
    assert json.loads(json.dumps(difference.to_dict(), allow_nan=False))["equal"] is False
