"""ROC curves of a page: what is drawn is the scores' own curve, beside the one that the claim allows."""

import math

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from sklearn.metrics import roc_curve

from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.page.build import build
from leakbench.leaderboard.page.plots import picture, styles
from leakbench.leaderboard.page.roc import measured, roc_figures
from leakbench.leaderboard.records import record as records_of
from leakbench.leaderboard.records.details import ROC_RATES, roc_key
from leakbench.leaderboard.records.files import digest_of_bytes

N = 2000


@pytest.fixture
def scored(record, metric, tmp_path):
    """A record of scores with ties, its arrays beside it."""

    def make(shift=1.0, allowed=2.0, **fields):
        draw = np.random.default_rng(0)
        scores = np.concatenate([draw.normal(shift, size=N), draw.normal(size=N)]).round(1)
        member = np.arange(2 * N) < N
        path = tmp_path / f"{shift}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"id": np.arange(2 * N), "score": scores, "member": member}), path)
        detail = {roc_key(fpr): min(1.0, allowed * fpr) for fpr in ROC_RATES} if allowed else {}
        return record(
            metrics={"auc": metric(0.76, 0.02, detail=detail)},
            arrays=path.name,
            arrays_digest=digest_of_bytes(path.read_bytes()),
            **fields,
        )

    return make


def test_the_measured_curve_is_scikit_learns(scored, tmp_path):
    fprs, tprs = measured(scored(), tmp_path)
    table = pyarrow.parquet.read_table(tmp_path / "1.0.parquet")
    theirs = roc_curve(table["member"].to_numpy(), table["score"].to_numpy(), drop_intermediate=False)
    assert fprs[0] == 1 / N and fprs[-1] == 1.0 and (np.diff(fprs) > 0).all()
    for fpr, tpr in zip(fprs, tprs, strict=True):
        assert tpr == pytest.approx(theirs[1][theirs[0] <= fpr + 1e-12].max())  # with at most that many false positives


def test_a_perfect_attack_is_a_line_at_the_top_from_one_false_positive_on(scored, tmp_path):
    fprs, tprs = measured(scored(shift=100.0), tmp_path)
    assert fprs[0] == 1 / N and len(fprs) > 50 and (tprs == 1).all()


def figure_of(*records, folder):
    """Specification of the plot of ROC curves of records of one budget, and its data."""
    rows = rows_from(records)
    (figure,) = roc_figures(rows, folder, styles({row.method: row.defense.name for row in rows}), "s1")
    assert figure.specification is not None
    return figure.specification, figure.specification["datasets"]


def test_a_line_is_drawn_for_what_was_measured_and_one_for_what_is_allowed(scored, tmp_path):
    specification, data = figure_of(scored(), folder=tmp_path)
    assert [line["bound"] for line in data["rows"]] == [False, True]
    assert "likelihood_ratio, seed 0" in data["rows"][0]["title"] and "the most allowed" in data["rows"][1]["title"]
    svg = picture(specification)
    assert svg.count('aria-roledescription="line mark"') == 2 and svg.count('stroke-dasharray="2,3"') == 1
    _, data = figure_of(scored(allowed=0), folder=tmp_path)
    assert len(data["rows"]) == 1


def test_one_line_stands_for_all_rows_to_which_claims_allow_the_same(scored, tmp_path):
    _, data = figure_of(scored(allowed=20), scored(shift=0.5, allowed=20, defense="pcdp"), folder=tmp_path)
    (bound,) = [line for line in data["rows"] if line["bound"]]
    assert bound["title"].endswith(": dp_sgd, pcdp") and bound["series"] == ""
    assert {mark["label"] for mark in data["marks"] if mark["series"] == ""} == {"allowed, ε 3.0", "chance"}


def test_lines_are_told_apart_without_colour(scored, tmp_path):
    methods = ["dp_sgd", "dpdr", "gep", "pcdp"]
    specification, data = figure_of(
        *(scored(shift=3.0 - i / 2, defense=name) for i, name in enumerate(methods)), folder=tmp_path
    )
    measured_lines = [line for line in data["rows"] if not line["bound"]]
    assert len({line["dash"] for line in measured_lines}) == len(methods)
    for line in measured_lines:
        on_it = [mark for mark in data["marks"] if mark["drawn"] and mark["series"] == line["series"]]
        assert 1 <= len(on_it) <= 4
        for mark in on_it:
            assert (mark["x"], mark["y"]) in zip(line["x"], line["y"], strict=True)
    assert {mark["label"] for mark in data["marks"] if not mark["drawn"]} >= {*methods, "chance"}
    assert 'aria-label="Symbol legend' in picture(specification)


def test_equal_lines_show_all_of_their_marks(scored, tmp_path):
    _, data = figure_of(scored(shift=1.0), scored(shift=1.0, defense="pcdp"), folder=tmp_path)
    places = [(mark["x"], mark["y"]) for mark in data["marks"] if mark["drawn"]]
    assert len(places) == len(set(places)) == 8


def test_a_label_covers_no_line_and_no_mark(scored, tmp_path):
    methods = ["dp_sgd", "dpdr", "gep", "pcdp", "psac", "random_sparsification"]
    lines = [scored(shift=3.0 - i / 2, defense=name) for i, name in enumerate(methods)]
    _, data = figure_of(*lines, folder=tmp_path)
    low, high = 1 / N, 1.0
    for narrow, width in enumerate((540, 290)):
        boxes = []
        for mark in data["marks"]:
            if mark["places"][narrow] is not None:
                dx, dy, align = mark["places"][narrow]
                across = width * math.log(mark["x"] / low) / math.log(high / low) + dx
                down = 340 * (1 - math.log(2 * mark["y"] / low) / math.log(2 * high / low)) + dy
                wide = 6 * len(mark["label"])
                left = across - wide * {"left": 0, "center": 0.5, "right": 1}[align]
                boxes.append((left, down - 6, left + wide, down + 6))
        assert len(boxes) >= 4
        for line in data["rows"]:
            for x, y in zip(line["x"], line["y"], strict=True):
                across = width * math.log(x / low) / math.log(high / low)
                down = 340 * (1 - math.log(2 * y / low) / math.log(2 * high / low))
                assert not any(a < across < c and b < down < d for a, b, c, d in boxes)
        for place, (a, b, c, d) in enumerate(boxes):
            assert not any(a < g and e < c and b < h and f < d for e, f, g, h in boxes[place + 1 :])


def test_scores_that_are_not_there_are_said_or_left_out(scored, record, tmp_path):
    row = rows_from([record()])
    assert roc_figures(row, tmp_path, styles({row[0].method: "dp_sgd"}), "s1") == []
    other = rows_from([scored(), scored(shift=0.5, defense="pcdp")])
    (tmp_path / "0.5.parquet").write_bytes(b"no table")
    (figure,) = roc_figures(other, tmp_path, styles({row.method: row.defense.name for row in other}), "s1")
    assert "Not shown: pcdp, its scores cannot be read." in figure.caption


def test_the_page_has_the_plot(scored, tmp_path):
    records_of.write(scored(), tmp_path)
    text = build(tmp_path, tmp_path / "page").read_text(encoding="utf-8")
    assert "ROC curves against what claims allow" in text and "s1-roc" in text
