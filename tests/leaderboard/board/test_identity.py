"""Ids of rows: the same when seeds or records are added, others for other settings."""

from leakbench.leaderboard.board.identity import board_version, row_id
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.records.record import SCHEMA

from ...parameters import subtests
from ..conftest import claim, metric, provenance, record

TASK = {"data": "digits", "model": "mlp", "batch": 64, "seed": 0, "digest": "a", "schedule_of": {"seed": 0}}


def ids(*records):
    return [row_id(row) for row in Board.from_records(records).rows]


def test_seeds_attacks_metrics_claims_and_code_do_not_change_an_id():
    first = record(task=TASK)
    other_seed = record(seed=1, task=TASK | {"seed": 1, "digest": "b", "schedule_of": {"seed": 1}})
    more = [
        record("utility", task=TASK),
        record(task=TASK, attack="loss_threshold", metrics={"auc": metric(0.9, 0.01)}, claim=claim(2.0)),
        record(task=TASK, attack="failed", status="failed", reason="out of memory", provenance=provenance(version="9")),
        record("reconstruction"),
    ]
    assert ids(first) == ids(first, other_seed) == ids(first, other_seed, *more)


@subtests(
    "fields",
    [
        {"suite": "another"},
        {"defense": "dpdr"},
        {"defense_settings": {"clip_norm": 2.0}},
        {"budget": {"epsilon": 1.0, "delta": 1e-5}},
        {"task": TASK | {"batch": 32}},
        {"control": "positive"},
        {"noise": "secure"},
    ],
)
def test_every_part_of_the_identity_changes_the_id(fields):
    assert ids(record(**{"task": TASK, **fields})) != ids(record(task=TASK))


def test_rows_of_a_board_have_ids_of_their_own():
    budgets = [{"epsilon": float(e), "delta": 1e-5} for e in range(1, 20)]
    assert len(set(ids(*(record(budget=budget) for budget in budgets)))) == 19


def test_an_id_is_pinned():
    """Links and citations of published boards hold it."""
    assert ids(record()) == ["de6f47615ff438a0"]


def test_the_version_names_package_and_schema():
    assert board_version().endswith(f"record schema {SCHEMA}")
