"""Proved bound of a row: valid for all attacks at once, with its own relation, and n/a where nothing proves one."""

import csv
import io
import json

import numpy as np
import pytest

from leakbench.leaderboard.board.proved_bound import bound_words, proved_bound, proved_bounds
from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.exports.tidy import tables

from ..conftest import metric, record


def proof(value, seed=0, attack="lira", *, sure=None, claimed=6.0, kind="membership", split=None, **fields):
    """A record with a bound; the splits of seeds differ."""
    pairs = kind == "membership"
    detail = {"relation": "replace_one" if pairs else "add_remove", "delta": 1e-5, "claimed": claimed}
    detail |= {"value_at_verdict": sure, **fields.pop("detail", {})}
    bound = metric(value, n=100, detail=detail, reason=None if value is not None else "few pairs")
    metrics = {"auc": metric(0.6, 0.1), "epsilon_lower": bound} if pairs else {"canary_epsilon": bound}
    task = {"data": "digits", "model": "mlp", "batch": 64, "digest": f"{seed if split is None else split:064d}"}
    return record(kind, seed=seed, attack=attack, metrics=metrics, task=task, **fields)


def of(*records):
    (row,) = rows_from(records)
    return proved_bound(row)


def test_a_single_attack_and_training_is_shown_as_its_record_has_it():
    bound = of(proof(1.5))
    assert (bound.value, bound.confidence, bound.looks, bound.attack) == (1.5, 0.95, 1, "lira")
    assert (bound.relation, bound.claimed, bound.delta) == ("replace_one", 6.0, 1e-5)


def test_several_attacks_on_one_training_are_compared_at_the_confidence_of_a_verdict():
    bound = of(proof(1.5, sure=0.4), proof(1.2, attack="rmia", sure=0.7))
    assert (bound.value, bound.attack, bound.looks) == (0.7, "rmia", 2)
    assert bound.confidence == pytest.approx(1 - 2e-6)
    assert "largest of 2 bounds" in bound.reason
    without = of(proof(1.5), proof(1.2, attack="rmia"))
    assert without.value is None and "do not hold at once" in without.reason


def test_the_least_of_several_trainings_is_sure_enough_to_take_the_largest_over_attacks():
    records = [
        proof(v, seed, attack) for attack, values in (("a", (2, 1)), ("b", (3, 0.5))) for seed, v in enumerate(values)
    ]
    bound = of(*records)
    assert (bound.value, bound.attack, bound.seeds) == (1, "a", (0, 1))
    assert bound.confidence == pytest.approx(1 - 2 * 0.05**2)
    # Seeds of the same split are no further evidence.
    again = [proof(v, seed, attack, split=0) for attack in "ab" for seed, v in enumerate((2, 1))]
    assert of(*again).value is None


@pytest.mark.long
def test_the_rule_fails_in_no_more_than_one_of_twenty_rows():
    # Bounds that exceed an epsilon of 0 with a probability of exactly 0.05, and 1e-6 at the verdict's confidence.
    rng = np.random.default_rng(0)
    for attacks, seeds in ((1, 1), (10, 1), (6, 2), (2, 3)):
        wrong = 0
        for _ in range(150):
            lucky = rng.random((attacks, seeds))
            records = [
                proof(float(lucky[a, s] < 0.05), s, f"a{a}", sure=float(lucky[a, s] < 1e-6))
                for a in range(attacks)
                for s in range(seeds)
            ]
            wrong += (of(*records).value or 0.0) > 0
        # 0.05 of 150 rows are 7.5; more than 19 have a probability below 1e-4. The largest of 10 would fail in 60.
        assert wrong <= 19, (attacks, seeds)


def test_relations_are_apart_and_the_closest_to_its_claim_is_the_rows():
    records = [proof(4.0, s, claimed=8.0) for s in (0, 1)] + [
        proof(2.5, s, "canary", kind="canaries", claimed=3.0) for s in (0, 1)
    ]
    (row,) = rows_from(records)
    first, second = proved_bounds(row)
    assert [(b.relation, b.value, b.claimed, b.looks) for b in (first, second)] == [
        ("add_remove", 2.5, 3.0, 2),
        ("replace_one", 4.0, 8.0, 2),
    ]


def test_the_claim_of_another_delta_is_not_compared(claim):
    other = {"delta_at_verdict": 1e-9, "claimed": 9.0}
    same_relation = of(proof(2.0, kind="canaries", attack="canary", detail=other, claim=claim(3.0)))
    assert same_relation.claimed == 3.0
    pairs = of(proof(2.0, detail=other, claim=claim(3.0)))
    assert pairs.claimed is None


def test_nothing_is_proved_without_such_a_record_or_of_a_negative_control():
    assert (bound := of(record())).value is None and "no attack was run" in bound.reason
    assert (bound := of(proof(None))).value is None and bound.reason == "few pairs"
    assert (bound := of(proof(1.0, control="negative"))).value is None and "negative control" in bound.reason


def test_exports_have_the_bound_with_its_relation_and_null_with_a_reason():
    board = Board.from_records([proof(1.5), record(defense="dpdr")])
    with_bound, without = csv.DictReader(io.StringIO(board.to_csv()))
    if with_bound["defense"] == "dpdr":
        with_bound, without = without, with_bound
    assert (with_bound["epsilon_lower"], with_bound["epsilon_lower_relation"]) == ("1.5", "replace_one")
    assert (with_bound["epsilon_lower_claimed"], with_bound["epsilon_lower_confidence"]) == ("6.0", "0.95")
    assert without["epsilon_lower"] == "" and without["epsilon_lower_reason"]
    tree = json.loads(json.dumps(board.to_dict(), allow_nan=False))
    by_defense = {row["defense"]["name"]: row["epsilon_lower"] for row in tree["rows"]}
    assert [b["value"] for b in by_defense["dp_sgd"]] == [1.5] and by_defense["dpdr"][0]["value"] is None
    lines = {line["defense"]: line for line in tables(board)["record"] if line["metric"] == "epsilon_lower"}
    assert (lines["dp_sgd"]["value"], lines["dp_sgd"]["bound_relation"]) == (1.5, "replace_one")
    assert lines["dp_sgd"]["largest_under_claim"] == 6.0 and lines["dpdr"]["value"] is None


def test_seeds_of_several_deltas_hold_at_the_smallest_and_of_several_relations_for_none():
    # Not (epsilon, delta)-private implies the same for any smaller delta, and for no larger one.
    assert of(proof(2.0, 0), proof(1.5, 1, detail={"delta": 1e-3})).delta == 1e-5
    mixed = of(proof(2.0, 0), proof(1.5, 1, detail={"relation": "add_remove"}))
    assert mixed.value is None and "different relations" in mixed.reason


def test_a_bound_is_never_rounded_up():
    assert [bound_words(value) for value in (0.999, 1.15, 2.0)] == ["0.99", "1.15", "2.00"]
