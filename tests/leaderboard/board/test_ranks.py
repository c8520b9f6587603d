"""Ranks compare rows of one guarantee: equal epsilon, delta and privacy unit."""

import csv
import io

import pytest

from leakbench.leaderboard.board.table import Board

from ..conftest import complete


@pytest.fixture
def board(record, metric, claim):
    """A board of (defense, requested epsilon, claimed epsilon, AUC) with equal deltas, and a positive control."""

    def make(*rows, **changes):
        records = []
        for defense, asked, claimed, auc in rows:
            fields = {"budget": {"epsilon": asked, "delta": 1e-5}, "claim": claim(claimed), **changes.get(defense, {})}
            records.append(record(defense=defense, metrics={"auc": metric(auc, 0.01)}, **fields))
        control = record(defense="sgd", control="positive", claim=claim(None), metrics={"auc": metric(0.99, 0.005)})
        records.append(control)
        return Board.from_records(records, complete(*records))

    return make


def ranks(board):
    return {row.label: (row.rank, row.ranked_of) for row in board.rows if row.control is None}


def test_a_larger_budget_leaks_more_and_costs_no_rank(board):
    made = board(
        ("dp_sgd", 1.0, 0.999, 0.55), ("dp_sgd", 8.0, 7.99, 0.7), ("dpdr", 1.0, 1.0, 0.56), ("dpdr", 8.0, 8.0, 0.6)
    )
    assert ranks(made) == {
        "dp_sgd (epsilon=1)": (1, 2),
        "dpdr (epsilon=1)": (2, 2),
        "dpdr (epsilon=8)": (1, 2),
        "dp_sgd (epsilon=8)": (2, 2),
    }


def test_rows_without_a_proof_are_ranked_among_themselves(board):
    made = board(("dp_sgd", 3.0, 3.0, 0.7), ("clipped_sgd", 3.0, None, 0.6), ("noisy_sgd", 3.0, None, 0.65))
    assert ranks(made) == {"dp_sgd": (1, 1), "clipped_sgd": (1, 2), "noisy_sgd": (2, 2)}


def test_a_claim_above_its_request_and_another_delta_are_other_guarantees(board, claim):
    rows = ("dp_sgd", 3.0, 3.0, 0.6), ("dpdr", 3.0, 3.4, 0.55), ("gep", 3.0, 2.9, 0.5)
    made = board(*rows, dp_sgd={"claim": claim(3.0, delta=1e-6)})
    guarantees = {row.defense.name: row.guarantee for row in made.rows if row.control is None}
    assert guarantees == {
        "dp_sgd": (3.0, 1e-6, "example"), "dpdr": (3.4, 1e-5, "example"), "gep": (3.0, 1e-5, "example"),
    }  # fmt: skip
    assert set(ranks(made).values()) == {(1, 1)}


def test_every_form_of_the_board_says_among_how_many(board):
    made = board(("dp_sgd", 1.0, 1.0, 0.55), ("dpdr", 1.0, 1.0, 0.56), ("gep", 8.0, 8.0, 0.7))
    for text in (made.to_text(width=200), made.to_markdown(), made.to_latex()):
        assert "2 of 2" in text and "1 of 1" in text
        assert (
            "Ranks are among the rows of a table with the same epsilon, delta and privacy unit by the high end" in text
        )
    lines = {line["defense"]: line for line in csv.DictReader(io.StringIO(made.to_csv()))}
    assert [lines["dpdr"][name] for name in ("rank", "rank_of", "rank_among")] == [
        "2",
        "2",
        "ε 1, δ 1e-5, unit example",
    ]
    assert lines["sgd"]["rank_of"] == lines["sgd"]["rank_among"] == ""
    assert [row["rank_of"] for row in made.to_dict()["rows"]] == [2, 2, 1, None]


def test_with_one_budget_a_rank_is_a_number_alone(board):
    made = board(("dp_sgd", 1.0, 1.0, 0.55), ("dpdr", 1.0, 1.0, 0.56))
    text = made.to_text(width=200)
    assert " of 2" not in text and "Ranks are among" not in text
    assert "Ranks are by the high end of the interval of the worst AUC" in text


def test_a_degraded_attack_is_named_with_its_rows_and_is_no_flag_of_theirs(record):
    fields = {"attack": "inverting_gradients", "flags": ("degraded", "noise_matched")}
    records = [record("reconstruction", **fields), record("reconstruction", attack="r_gap")]
    made = Board.from_records(records, complete(*records))
    (row,) = made.rows
    assert row.flags == ("noise_matched",) and row.degraded == ("inverting_gradients without noise",)
    assert "Attack inverting_gradients without noise: degraded (by its own account" in made.to_text(width=200)
    assert {cell["attack"]: cell["flags"] for cell in made.to_dict()["rows"][0]["attacks"]} == {
        "inverting_gradients": ["degraded", "noise_matched"], "r_gap": [],
    }  # fmt: skip
    line = next(csv.DictReader(io.StringIO(made.to_csv())))
    assert (line["flags"], line["degraded_attacks"]) == ("noise_matched", "inverting_gradients without noise")
