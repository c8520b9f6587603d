"""Proved bounds against claims: equal scales, the claim for the bound's own relation, and infinity at the edge."""

import re

import pytest

from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.page.plots import styles
from leakbench.leaderboard.page.proved import proved_figures


@pytest.fixture
def proof(record, metric):
    """A record with a proved bound and the claim for its relation."""

    def make(value, claimed, metric_name="epsilon_lower", **fields):
        detail = {"method": "test", "relation": "replace_one", "claimed": claimed}
        bound = metric(value, n=400, reason=None if value is not None else "few pairs", detail=detail)
        kind = "canaries" if metric_name == "canary_epsilon" else "membership"
        metrics = {metric_name: bound} if kind == "canaries" else {"auc": metric(0.6, 0.1), metric_name: bound}
        return record(kind, metrics=metrics, **fields)

    return make


def drawn(*records):
    rows = rows_from(records)
    return proved_figures(rows, styles({row.method: row.defense.name for row in rows}), "s1")


def places(figure):
    """Centre of each mark, in pixels, by its words."""
    marks = re.findall(r'aria-label="([^"]+)" transform="translate\(([\d.]+),([\d.]+)\)', str(figure.drawing))
    return {words: (float(x), float(y)) for words, x, y in marks}


def test_scales_are_equal_and_a_bound_at_its_claim_is_on_the_diagonal(proof):
    (figure,) = drawn(proof(4.0, 4.0), proof(1.0, 6.0, defense="dpdr"))
    (x0, y0, x1, y1), *_ = re.findall(r'class="equal" d="M([\d.]+),([\d.]+)L([\d.]+),([\d.]+)"', str(figure.drawing))
    side = float(x1) - float(x0)
    assert side == float(y0) - float(y1)
    unit = side / (1.06 * 6.0)
    at = {words.partition(":")[0]: place for words, place in places(figure).items()}
    assert at["dp_sgd"] == pytest.approx((float(x0) + 4 * unit, float(y0) - 4 * unit), abs=0.1)
    assert at["dpdr"] == pytest.approx((float(x0) + 6 * unit, float(y0) - 1 * unit), abs=0.1)


def test_the_claim_is_the_one_for_the_relation_of_the_bound(proof):
    (figure,) = drawn(proof(0.5, 5.7))  # the record's own claim, to add or remove, is 3
    (words,) = places(figure)
    assert words.endswith("claimed ε 5.70 for replace one") and "1 seed of 400" in words
    kind = "pairs of members and non-members"
    numbers = ("dp_sgd", "likelihood_ratio", kind, "5.70", "replace_one", "0.50", "1 seed of 400")
    assert figure.numbers == (numbers,)


def test_without_a_finite_claim_a_mark_stands_at_the_right_edge_behind_a_label(proof, claim):
    (figure,) = drawn(proof(2.0, 3.0), proof(2.0, None, defense="sgd", claim=claim(None)))
    at = {words.partition(":")[0]: x for words, (x, _) in places(figure).items()}
    (end,) = re.findall(r'class="equal" d="M[\d.]+,[\d.]+L([\d.]+),', str(figure.drawing))
    assert at["dp_sgd"] < float(end) < at["sgd"] and ">∞</text>" in str(figure.drawing)
    (finite,) = drawn(proof(2.0, 3.0))
    assert "∞" not in str(finite.drawing)


def test_kinds_of_bounds_differ_by_their_marks_and_in_words(proof):
    (figure,) = drawn(proof(1.0, 3.0), proof(2.0, 3.0, "canary_epsilon", attack="canary_score"))
    marks = dict(re.findall(r'<path class="(mark[^"]*)" role="img" aria-label="([^"]+)"', str(figure.drawing)))
    by_kind = {("hollow" in classes): words for classes, words in marks.items()}
    assert "from canaries" in by_kind[True] and "from pairs" in by_kind[False]


def test_seeds_count_as_their_least_bound_and_missing_ones_are_said(proof):
    (figure,) = drawn(proof(1.0, 3.0), proof(0.25, 3.0, seed=1), proof(None, 3.0, defense="dpdr"))
    assert [line[5:] for line in figure.numbers] == [("0.25", "2 seeds of 400")]
    assert "Not shown: likelihood_ratio on 1 row, few pairs." in figure.caption
    (absent,) = drawn(proof(None, 3.0))
    assert absent.drawing is None and absent.caption == ("Not shown: likelihood_ratio on 1 row, few pairs.",)


def test_there_is_no_plot_without_such_a_metric_and_none_of_negative_controls(proof, record):
    assert drawn(record()) == [] and drawn(proof(1.0, 3.0, control="negative")) == []


def test_words_of_records_are_escaped(proof):
    (figure,) = drawn(proof(1.0, 3.0, defense="<b>x</b>"))
    assert "<b>" not in str(figure.drawing) and "&lt;b&gt;x" in str(figure.drawing)
