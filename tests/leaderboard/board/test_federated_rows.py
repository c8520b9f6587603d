"""Boards of federated suites: units apart, clients that differ by seed together, and the control on public data."""

import pytest

from leakbench.leaderboard.board.table import Board

from ..conftest import complete

TASK = {"data": "digits", "model": "mlp", "federated": {"clients": 3}}


def board(*records):
    return Board.from_records(records, complete(*records))


def test_a_record_and_a_client_are_ranked_in_tables_of_their_own(record, claim, metric):
    """Ranks are by AUC within a table; the client's would be the second of a common one."""
    found = board(
        record(defense="fed_avg", claim=claim(unit="record"), metrics={"auc": metric(0.6, 0.01)}),
        record(defense="dp_fed_avg", claim=claim(unit="client"), metrics={"auc": metric(0.7, 0.01)}),
        record(defense="scaffold", claim=claim(unit="record"), metrics={"auc": metric(0.8, 0.01)}),
        record(defense="sgd", control="positive", claim=claim(None, unit="record")),
    )
    ranks = {row.defense.name: (row.section[3], row.rank) for row in found.rows if row.control is None}
    assert ranks == {"fed_avg": ("", 1), "scaffold": ("", 2), "dp_fed_avg": ("unit: client", 1)}
    assert "unit: client" in found.to_text()
    assert not any(control.measured == "nothing" for control in found.controls)


def test_sizes_and_digests_of_clients_do_not_divide_a_row(record, metric):
    records = [
        record(
            seed=seed,
            task=TASK | {"client_sizes": [seed, 2], "clients_digest": f"d{seed}", "schedule_of": {"seed": seed}},
        )
        for seed in (0, 1)
    ]
    (row,) = board(*records).rows
    assert row.seeds == (0, 1) and row.details == ""


def test_other_clients_are_no_fair_comparison(record):
    found = board(
        record(defense="fed_avg", task=TASK), record(defense="moon", task=TASK | {"federated": {"clients": 4}})
    )
    assert {flag for row in found.rows for flag in row.flags} == {"uneven_tasks"}
    assert {row.rank for row in found.rows} == {None}


def test_public_only_is_shown_as_a_control_and_judged_by_nothing(record, metric):
    accuracy = {"accuracy": metric(0.9, 0.02, better="higher")}
    found = board(
        record("utility", defense="sgd", control="public_only", metrics=accuracy),
        record(control="positive", defense="sgd", metrics={"auc": metric(0.9, 0.01)}),
        record(control="negative", defense="sgd", metrics={"auc": metric(0.5, 0.01)}),
    )
    assert [row.label for row in found.rows] == [
        "sgd (positive control)",
        "sgd (negative control)",
        "sgd (public only control)",
    ]
    assert len(found.controls) == 2 and found.trustworthy


@pytest.mark.parametrize("kind", ["federation", "rounds"])
def test_columns_of_clients_are_left_out_without_federated_records(record, metric, kind):
    name, better = {"federation": ("bytes_up", "lower"), "rounds": ("round_accuracy", "higher")}[kind]
    own = record(kind, metrics={name: metric(0.5, better=better)})
    assert name in Board.from_records([own]).rows[0].estimates
    header = {"federation": "bytes up", "rounds": "mean over"}[kind]
    assert header in Board.from_records([own]).to_text() and header not in Board.from_records([record()]).to_text()
