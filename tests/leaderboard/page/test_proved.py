"""Proved bounds against claims: one scale, a lane for each, the claim for the bound's own relation."""

import html
import re

import pytest

from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.page.plots import styles
from leakbench.leaderboard.page.proved import MOST, proved_figures


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


def lanes(figure):
    """Words, end of the claim's bar and place of the mark (per cent of the track), numbers in words, of each lane."""
    lane = (
        r'<div class="lane( above)?" title="([^"]+)">.*?class="held( open)?" style="width:([\d.]+)%">.*?'
        r'class="at" style="left:([\d.]+)%">.*?class="said">(.*?)</span>'
    )
    drawn = re.findall(lane, str(figure.drawing))
    return [
        (words, float(bar), float(mark), html.unescape(re.sub("<[^>]+>", "", said)))
        for _, words, _, bar, mark, said in drawn
    ]


def test_bounds_and_claims_are_on_one_scale_and_a_bound_at_its_claim_ends_its_bar(proof):
    (figure,) = drawn(proof(4.0, 4.0), proof(1.5, 6.0, defense="dpdr"))
    (_, four, at_four, _), (_, six, at_one_and_a_half, _) = lanes(figure)
    assert four == at_four and six == pytest.approx(1.5 * four, abs=0.02)
    assert six == pytest.approx(100 / 1.06, abs=0.01) and at_one_and_a_half == pytest.approx(six / 4, abs=0.01)
    ticks = dict(re.findall(r'<i style="left:([\d.]+)%">(\d+)</i>', str(figure.drawing)))
    assert {float(place): int(tick) / 6 * six for place, tick in ticks.items()} == pytest.approx(
        {float(place): float(place) for place in ticks}, abs=0.02
    )


def test_many_bounds_at_zero_have_a_lane_with_words_each(proof):
    rows = [proof(0.0, 6.6, defense="dp_sgd", defense_settings={"clip_norm": float(i)}) for i in range(1, 9)]
    (figure,) = drawn(*rows)
    assert len(lanes(figure)) == 8 and {said for *_, said in lanes(figure)} == {"≥ 0.00 of 6.60"}
    assert len({words.partition(":")[0] for words, *_ in lanes(figure)}) == 8


def test_a_bound_above_its_claim_is_beyond_its_bar_and_named_in_words(proof):
    (figure,) = drawn(proof(4.0, 3.0), proof(2.0, 3.0, defense="dpdr"))
    marked = {
        words.partition(":")[0]: (mark > bar, "above its claim" in said) for words, bar, mark, said in lanes(figure)
    }
    assert marked == {"dp_sgd": (True, True), "dpdr": (False, False)}


def test_beyond_the_largest_number_of_lanes_the_rest_is_counted_and_in_the_table(proof):
    settings = [{"clip_norm": float(i)} for i in range(1, MOST + 3)]
    (figure,) = drawn(*(proof(0.5, 3.0, defense_settings=each) for each in settings))
    assert len(lanes(figure)) == MOST and len(figure.numbers) == MOST + 2
    assert f"Drawn are the first {MOST} of {MOST + 2}, in the order of the board." in figure.caption


def test_the_claim_is_the_one_for_the_relation_of_the_bound(proof):
    (figure,) = drawn(proof(0.5, 5.7))  # the record's own claim, to add or remove, is 3
    ((words, *_),) = lanes(figure)
    assert words.endswith("claimed ε 5.70 for replace one") and "1 seed of 400" in words
    kind = "pairs of members and non-members"
    numbers = ("dp_sgd", "likelihood_ratio", kind, "5.70", "replace_one", "0.50", "1 seed of 400")
    assert figure.numbers == (numbers,)


def test_without_a_finite_claim_the_bar_has_no_end(proof, claim):
    (figure,) = drawn(proof(2.0, 3.0), proof(2.0, None, defense="sgd", claim=claim(None)))
    at = {words.partition(":")[0]: (bar, mark, said) for words, bar, mark, said in lanes(figure)}
    assert at["sgd"][0] == 100 > at["dp_sgd"][0] and at["sgd"][1] == at["dp_sgd"][1]
    assert at["sgd"][2] == "≥ 2.00 of ∞" and ">∞</i>" in str(figure.drawing)
    (finite,) = drawn(proof(2.0, 3.0))
    assert "∞" not in str(finite.drawing)


def test_kinds_of_bounds_differ_by_their_marks_and_in_words(proof):
    (figure,) = drawn(proof(1.0, 3.0), proof(2.0, 3.0, "canary_epsilon", attack="canary_score"))
    marks = re.findall(r'<small>([^/]*)</small>.*?class="at".*?<path class="mark( hollow)?"', str(figure.drawing))
    assert {(words.split(", ")[1], bool(hollow)) for words, hollow in marks} == {
        ("pairs", False),
        ("canaries", True),
    }


def test_seeds_count_as_their_least_bound_and_missing_ones_are_said(proof):
    (figure,) = drawn(proof(1.0, 3.0), proof(0.25, 3.0, seed=1), proof(None, 3.0, defense="dpdr"))
    assert [line[5:] for line in figure.numbers] == [("0.25", "2 seeds of 400")]
    assert "Not shown: likelihood_ratio on 1 row, few pairs." in figure.caption
    (absent,) = drawn(proof(None, 3.0))
    assert absent.drawing is None and absent.caption == ("Not shown: likelihood_ratio on 1 row, few pairs.",)


def test_a_seed_without_a_bound_is_none_of_those_behind_it(proof):
    (figure,) = drawn(proof(1.0, 3.0), proof(0.25, 3.0, seed=1), proof(None, 3.0, seed=2))
    assert [line[5:] for line in figure.numbers] == [("0.25", "2 seeds of 400")]


def test_a_bound_is_rounded_down_in_lane_tooltip_and_table(proof):
    (figure,) = drawn(proof(5.7956, 8.0))
    ((words, _, _, said),) = lanes(figure)
    assert said == "≥ 5.79 of 8.00" and "ε at least 5.79" in words
    assert [line[5] for line in figure.numbers] == ["5.79"]


def test_there_is_no_plot_without_such_a_metric_and_none_of_negative_controls(proof, record):
    assert drawn(record()) == [] and drawn(proof(1.0, 3.0, control="negative")) == []


def test_words_of_records_are_escaped(proof):
    (figure,) = drawn(proof(1.0, 3.0, defense="<q>x</q>"))
    assert "<q>" not in str(figure.drawing) and "&lt;q&gt;x" in str(figure.drawing)
