"""ROC curves of a page: what is drawn is the scores' own curve, beside the one that the claim allows."""

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

    def make(shift=1.0, allowed=True, **fields):
        draw = np.random.default_rng(0)
        scores = np.concatenate([draw.normal(shift, size=N), draw.normal(size=N)]).round(1)
        member = np.arange(2 * N) < N
        path = tmp_path / f"{shift}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"id": np.arange(2 * N), "score": scores, "member": member}), path)
        detail = {roc_key(fpr): min(1.0, 2 * fpr) for fpr in ROC_RATES} if allowed else {}
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
    known = dict(zip(theirs[0].round(9), theirs[1], strict=True))  # of equal rates the highest
    assert 0 < fprs[0] <= 5 / N and fprs[-1] == 1.0 and (np.diff(fprs) >= 0).all()
    for fpr, tpr in zip(fprs.round(9), tprs, strict=True):
        assert tpr == pytest.approx(known[fpr])


def test_a_line_is_drawn_for_what_was_measured_and_one_for_what_is_allowed(scored, tmp_path):
    row = rows_from([scored()])
    (figure,) = roc_figures(row, tmp_path, styles({row[0].method: "dp_sgd"}), "s1")
    assert figure.specification is not None
    lines = figure.specification["datasets"]["rows"]
    assert [line["bound"] for line in lines] == [False, True]
    assert "the most allowed" in lines[1]["title"] and all("likelihood_ratio, seed 0" in one["title"] for one in lines)
    svg = picture(figure.specification)
    assert svg.count('aria-roledescription="line mark"') == 2 and svg.count('stroke-dasharray="3,4"') == 1
    row = rows_from([scored(allowed=False)])
    (figure,) = roc_figures(row, tmp_path, styles({row[0].method: "dp_sgd"}), "s1")
    assert figure.specification is not None and len(figure.specification["datasets"]["rows"]) == 1


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
