"""Sentence on public data alone: a cell is above, below or undecided by the records' intervals, seed by seed."""

import json

import pytest

from leakbench.leaderboard.board.public_only import public_comparisons, public_sentences
from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.board.table import Board


@pytest.fixture
def accuracies(record, metric, claim):
    """Records of a defense: an accuracy and half an interval for each seed."""

    def make(defense, values, half=0.02, epsilon=3.0, **fields):
        return [
            record(
                "utility", defense=defense, seed=seed, claim=claim(epsilon, unit=fields.pop("unit", "record")),
                metrics={"accuracy": metric(value, half, better="higher")}, **fields,
            )
            for seed, value in enumerate(values)
        ]  # fmt: skip

    return make


@pytest.fixture
def public(accuracies):
    """Public data alone, with two seeds."""
    return accuracies("sgd", [0.9, 0.8], epsilon=0.0, control="public_only")


def verdicts(records):
    (comparison,) = public_comparisons(rows_from(records))
    return {row.defense.name: place for row, place in comparison.verdicts}


def test_a_cell_is_placed_if_the_intervals_are_disjoint_in_every_seed(accuracies, public):
    records = [
        *public,
        *accuracies("fed_avg", [0.85, 0.7]),
        *accuracies("moon", [0.85, 0.77]),  # intervals of seed 1 meet
        *accuracies("scaffold", [0.95, 0.85]),
        *accuracies("fed_prox", [0.95, 0.7]),  # above in one seed, below in the other
    ]
    assert verdicts(records) == {"fed_avg": "above", "moon": "untold", "scaffold": "below", "fed_prox": "untold"}
    (sentence,) = public_sentences(rows_from(records))
    assert "has accuracy 0.850 " in sentence and "above 1 of 4 cells that prove an epsilon" in sentence
    assert "Above it: scaffold. Not decided: fed_prox, moon." in sentence


def test_seeds_are_paired_so_a_hard_seed_is_hard_for_both(accuracies, public):
    # The mean of public data alone, 0.85, lies within the interval of seed 0 below.
    assert verdicts([*public, *accuracies("fed_avg", [0.84, 0.75])]) == {"fed_avg": "above"}


def test_only_seeds_that_both_have_are_compared(accuracies, public):
    assert verdicts([*public[:1], *accuracies("fed_avg", [0.85, 0.99])]) == {"fed_avg": "above"}
    lone = [record for record in accuracies("moon", [0.5, 0.5]) if record.seed == 1]
    (sentence,) = public_sentences(rows_from([*public[:1], *accuracies("fed_avg", [0.85]), *lone]))
    assert "above 1 of 2 cells" in sentence and sentence.endswith("Without a common seed: moon.")


def test_a_cell_that_lacks_seeds_is_named_with_their_number(accuracies, public):
    records = [*public, *accuracies("fed_avg", [0.7, 0.6]), *accuracies("moon", [0.7])]
    (sentence,) = public_sentences(rows_from(records))
    assert "above every cell" in sentence and "in every seed that both have" in sentence
    assert sentence.endswith("Compared in fewer seeds than were measured: moon 1 of 2.")


def test_cells_without_a_proof_and_those_of_other_suites_are_left_out(accuracies, public):
    records = [
        *public,
        *accuracies("fed_avg", [0.5, 0.5]),
        *accuracies("percentile_filter", [0.99, 0.99], epsilon=None),
        *accuracies("sgd", [0.99, 0.99], control="positive"),
        *accuracies("moon", [0.99, 0.99], suite="other"),
    ]
    assert verdicts(records) == {"fed_avg": "above"}


def test_cells_of_both_units_are_compared_and_the_sentence_says_so(accuracies, public):
    record_unit, client_unit = accuracies("fed_avg", [0.5]), accuracies("dp_fed_avg", [0.5], unit="client")
    assert "either privacy unit" not in public_sentences(rows_from([*public, *record_unit]))[0]
    records = [*public, *record_unit, *client_unit]
    assert set(verdicts(records)) == {"fed_avg", "dp_fed_avg"}
    assert "of either privacy unit" in public_sentences(rows_from(records))[0]


def test_boards_in_text_have_the_sentence_and_none_without_the_control(accuracies, public):
    defended = accuracies("fed_avg", [0.85, 0.7])
    text = Board.from_records([*public, *defended]).to_markdown()
    assert "above every cell that proves an epsilon" in text
    assert public_sentences(rows_from(defended)) == [] and public_sentences(rows_from(public)) == []
    assert "public_only" not in Board.from_records(defended).to_markdown()


def test_json_has_each_rows_place_and_both_intervals_by_seed(accuracies, public):
    records = [
        *public,
        *accuracies("fed_avg", [0.85, 0.7]),
        *accuracies("moon", [0.95]),
        *accuracies("pfa", [0.1, 0.99]),
    ]
    board = Board.from_records(records).to_dict()
    (comparison,) = json.loads(json.dumps(board["public_only"], allow_nan=False))
    assert comparison["control"] == "sgd (public only control)" and comparison["suite"] == board["rows"][0]["suite"]
    places = {row["label"]: row["metrics"]["accuracy"]["public_only_is"] for row in comparison["rows"]}
    assert places == {"fed_avg": "better", "moon": "worse", "pfa": "undecided"}
    row = next(row for row in comparison["rows"] if row["label"] == "fed_avg")
    seeds = row["metrics"]["accuracy"]["seeds"]
    assert [seed["seed"] for seed in seeds] == [0, 1] and row["epsilon"] == 3.0
    assert seeds[1]["public_only"] == pytest.approx({"value": 0.8, "low": 0.78, "high": 0.82})
    assert seeds[1]["row"] == pytest.approx({"value": 0.7, "low": 0.68, "high": 0.72})
    assert Board.from_records(accuracies("fed_avg", [0.85])).to_dict()["public_only"] == []


def test_json_calls_the_smaller_loss_better_and_says_nothing_without_a_common_seed(record, metric, claim):
    def losses(defense, values, epsilon, **fields):
        return [
            record(
                "utility", defense=defense, seed=seed, claim=claim(epsilon),
                metrics={"loss": metric(value, 0.01, better="lower"), "accuracy": metric(0.5, 0.1, better="higher")},
                **fields,
            )
            for seed, value in values.items()
        ]  # fmt: skip

    records = losses("sgd", {0: 0.3, 1: 0.4}, 0.0, control="public_only")
    records += losses("fed_avg", {0: 0.5, 1: 0.6}, 3.0) + losses("moon", {0: 0.1}, 3.0) + losses("pfa", {2: 0.1}, 3.0)
    (comparison,) = Board.from_records(records).to_dict()["public_only"]
    assert {row["label"]: row["metrics"]["loss"]["public_only_is"] for row in comparison["rows"]} == {
        "fed_avg": "better", "moon": "worse", "pfa": None,
    }  # fmt: skip
    assert {row["metrics"]["accuracy"]["public_only_is"] for row in comparison["rows"]} == {"undecided", None}
