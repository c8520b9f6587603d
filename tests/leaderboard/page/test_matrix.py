"""The matrix of a page: a cell per defense and attack, whose plots are the scores' and the claim's own numbers."""

import math
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from sklearn.metrics import roc_curve

from leakbench.leaderboard.board.content import Footnotes
from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.page.drawing import SIDE
from leakbench.leaderboard.page.matrix import SEEDS, MatrixCell, matrix
from leakbench.leaderboard.page.plots import styles
from leakbench.leaderboard.page.roc import rates
from leakbench.leaderboard.records.details import ROC_RATES, roc_key
from leakbench.leaderboard.records.files import digest_of_bytes

MEMBERS, NON_MEMBERS, EPSILON = 300, 1000, 1.5


def allowed(fpr):
    """Largest true positive rate under pure differential privacy, from its definition."""
    return min(1.0, math.exp(EPSILON) * fpr, 1 - math.exp(-EPSILON) * (1 - fpr))


@pytest.fixture
def attacked(record, metric, tmp_path):
    """A membership record with its scores beside it, and its numbers by scikit-learn."""

    def make(shift=1.0, decimals=3, scores=None, **fields):
        draw = np.random.default_rng(fields.get("seed", 0))
        member = np.arange(MEMBERS + NON_MEMBERS) < MEMBERS
        if scores is None:
            scores = (draw.normal(size=len(member)) + shift * member).round(decimals)
        finite = np.nan_to_num(scores, posinf=99.0, neginf=-99.0)  # scikit-learn takes no infinite scores
        fprs, tprs, _ = roc_curve(member, finite, drop_intermediate=False)
        tpr = float(tprs[fprs <= 0.01].max())
        path = tmp_path / f"{len(list(tmp_path.glob('*.parquet')))}.parquet"
        pyarrow.parquet.write_table(
            pyarrow.table({"id": np.arange(len(member)), "score": scores, "member": member}), path
        )
        auc = metric(0.7, 0.05, n=len(member), detail={roc_key(fpr): allowed(fpr) for fpr in ROC_RATES})
        metrics = {"auc": auc, "tpr_at_1pct_fpr": metric(tpr, n=len(member), reason="exact")}
        digest = digest_of_bytes(path.read_bytes())
        return record(metrics=metrics, arrays=path.name, arrays_digest=digest, **fields)

    return make


def made(folder, *records, notes=None):
    rows = rows_from(records)
    style = styles({row.method: row.defense.name for row in rows})
    result = matrix(rows, folder, style, Footnotes() if notes is None else notes)
    assert result is not None
    return result


def curve(cell, kind, number=0, decades=3):
    """Rates of a drawn curve, back from its pixels."""
    path = re.findall(rf'class="{kind}" d="M([^"]+)"', cell.roc)[number]
    places = [tuple(map(float, place.split(","))) for place in path.split("L")]
    left, bottom = 46, 8 + SIDE
    return {10 ** (decades * ((x - left) / SIDE - 1)): 10 ** (decades * ((bottom - y) / SIDE - 1)) for x, y in places}


def at(rates, fpr):
    return next(tpr for known, tpr in rates.items() if known == pytest.approx(fpr, rel=0.005))


def test_a_cell_of_each_defense_and_attack_names_its_records(attacked, record, tmp_path):
    pairs = [("dp_sgd", "lira"), ("dp_sgd", "loss_threshold"), ("dpdr", "lira")]
    records = {pair: attacked(defense=pair[0], attack=pair[1]) for pair in pairs}
    failed = record(defense="dpdr", attack="loss_threshold", status="failed", reason="no memory")
    drawn = made(tmp_path, *records.values(), failed)
    assert drawn.attacks == ("lira", "loss_threshold")
    lines = {line.name: dict(zip(drawn.attacks, line.cells, strict=True)) for line in drawn.lines}
    for (defense, attack), own in records.items():
        cell = lines[defense][attack]
        assert isinstance(cell, MatrixCell) and cell.records == ((0, own.id),) and cell.anchor == f"cell-{own.id}"
    assert lines["dpdr"]["loss_threshold"] == ("failed", "no memory")


def test_attacks_of_one_name_are_columns_by_the_settings_in_which_they_differ(attacked, tmp_path):
    records = [attacked(attack="lira", attack_settings={"online": online, "shadows": 4}) for online in (True, False)]
    assert made(tmp_path, *records).attacks == ("lira (online=true)", "lira (online=false)")


@pytest.mark.parametrize("decimals", [3, 0])
def test_the_curve_passes_through_the_records_own_tpr(attacked, tmp_path, decimals):
    own = attacked(decimals=decimals)  # at 0 decimals, most scores are tied
    (cell,) = made(tmp_path, own).cells
    assert at(curve(cell, "seed"), 0.01) == pytest.approx(own.metrics["tpr_at_1pct_fpr"].value, rel=0.01)
    assert cell.tpr.order == own.metrics["tpr_at_1pct_fpr"].value


def test_the_bound_is_the_claims_at_every_rate_of_the_axes(attacked, tmp_path):
    (cell,) = made(tmp_path, attacked()).cells
    rates = curve(cell, "allowed")
    shown = [fpr for fpr in ROC_RATES if fpr >= 1e-3]
    assert len(rates) == len(shown)
    for fpr in shown:
        assert at(rates, fpr) == pytest.approx(allowed(fpr), rel=0.01)


def test_a_perfect_attack_is_a_line_at_the_top_although_it_has_no_false_positive(attacked, tmp_path):
    scores = np.repeat([1.0, 0.0], [MEMBERS, NON_MEMBERS])
    (cell,) = made(tmp_path, attacked(scores=scores)).cells
    rates = curve(cell, "seed")
    assert min(rates) == pytest.approx(1 / NON_MEMBERS, rel=0.01) and min(rates.values()) == pytest.approx(1.0)


def test_thinning_keeps_each_false_positive_at_the_left_end_and_the_rates_asked_for():
    draw = np.random.default_rng(0)
    scores, members = draw.normal(size=20_000), np.arange(20_000) < 10_000
    fprs, tprs = rates(scores, members, points=40, kept=(0.01, 0.1))
    assert len(fprs) <= 42 and {1e-4, 2e-4, 3e-4, 0.01, 0.1, 1.0} <= set(fprs.round(9))
    theirs = roc_curve(members, scores, drop_intermediate=False)
    for fpr, tpr in zip(fprs, tprs, strict=True):
        assert tpr == pytest.approx(theirs[1][theirs[0] <= fpr + 1e-12].max())


@pytest.mark.parametrize("scores", [None, np.repeat([np.inf, -1.0, -np.inf], [100, 1000, 200]), np.zeros(1300)])
def test_the_counts_of_a_histogram_sum_to_its_candidates(attacked, tmp_path, scores):
    (cell,) = made(tmp_path, attacked(scores=scores)).cells
    for group, size in (("members", MEMBERS), ("non-members", NON_MEMBERS)):
        counts = re.search(rf' data-{group}="([\d,]+)"', str(cell.scores))
        assert counts is not None and sum(map(int, counts[1].split(","))) == size


def test_each_seed_has_a_curve_up_to_a_limit_which_is_said(attacked, tmp_path):
    (cell,) = made(tmp_path, *(attacked(seed=seed) for seed in range(SEEDS + 2))).cells
    assert cell.roc is not None and cell.roc.count('class="seed"') == SEEDS
    assert any("2 more are in the arrays" in remark for remark in cell.remarks)
    assert cell.count == f"{SEEDS + 2} seeds of 1300"


def test_scores_that_cannot_be_read_leave_the_numbers_and_the_reason(attacked, record, tmp_path):
    own = attacked()
    (tmp_path / own.arrays).write_bytes(b"no table")
    (cell,) = made(tmp_path, own).cells
    assert cell.roc is None and cell.scores is None and cell.auc.text == "0.700"
    assert cell.remarks == ("Seed 0 is not drawn: its scores cannot be read.",)
    (bare,) = made(tmp_path, record()).cells
    assert bare.remarks == ("Seed 0 is not drawn: no scores lie beside its record.",)


def test_without_a_membership_attack_there_is_no_matrix(record, tmp_path):
    rows = rows_from([record("utility")])
    assert matrix(rows, tmp_path, styles({rows[0].method: "dp_sgd"}), Footnotes()) is None
