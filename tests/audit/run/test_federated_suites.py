"""Federated suites from end to end: records, tables, resuming, and claims that are computed again from a record."""

import dataclasses
import json
import shutil

import pyarrow.parquet as pq
import pytest

from leakbench.audit.plan.expand import plan
from leakbench.audit.run.claims import claim_fault
from leakbench.audit.run.verify import contradiction
from leakbench.audit.scoring.federation import score_federation
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.records.record import Record, read_all

from .runs import load, run

TOY = """
name = "toy"
seeds = [0, 2]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, private = 60, non_member = 60, batch = 5, lr = 0.5 }
budget = { epsilon = 3.0, delta = 1e-5 }
federated = { clients = 3, split = "dirichlet", least = 10, rounds = 3, local_steps = 2, participation = 0.7 }
public_only = { epochs = 2 }
defense = [
    { name = "fed_avg" },
    { name = "random_sparsification", final_sparsity = 0.5 },
    { name = "dp_fed_avg" },
    { name = "pfa", variant = "full", budgets = [4.0, 4.0, 8.0] },
]
attack = [{ name = "loss_threshold" }]
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federated")
    return folder, run(TOY, folder)


def of(records, name, kind="utility", control=None, seed=0) -> Record:
    (record,) = (r for r in records if (r.defense.name, r.kind, r.control, r.seed) == (name, kind, control, seed))
    return record


def test_every_cell_has_a_record(results):
    folder, records = results
    assert {record.status for record in records} == {"ok"}
    assert [record.id for record in records] == [cell.id for cell in plan(load(folder, TOY)).cells]
    assert {record.id for record in read_all(folder)} == {record.id for record in records}


def test_numbers_and_claims_of_every_record_can_be_computed_again(results):
    folder, records = results
    assert {contradiction(record, folder / "records") for record in records} == {""}


def test_an_epsilon_below_what_the_rounds_prove_is_noticed(results):
    _, records = results
    record = of(records, "fed_avg")
    assert record.claim is not None and record.claim.epsilon is not None
    lower = dataclasses.replace(record, claim=dataclasses.replace(record.claim, epsilon=record.claim.epsilon * 0.9))
    assert "does not follow from its steps" in claim_fault(lower)
    content = json.loads(record.to_json())["task"]
    content["federated"]["rounds"] = 30
    longer = dataclasses.replace(record, task=content)
    assert "does not follow from its steps" in claim_fault(longer)
    nothing = dataclasses.replace(record, task={key: value for key, value in content.items() if key != "client_sizes"})
    assert "cannot be counted" in claim_fault(nothing)


def test_clients_that_do_not_hold_the_trained_examples_are_noticed(results):
    """A federation of empty clients is never scheduled, so its rounds would prove epsilon 0."""
    _, records = results
    record = of(records, "fed_avg")
    assert record.claim is not None
    task = json.loads(record.to_json())["task"] | {"client_sizes": [0, 0, 0]}
    nothing = dataclasses.replace(record.claim, epsilon=0.0, epsilon_rdp=0.0)
    budget = {"noise_multiplier": record.noise_multiplier, "delta": 1e-5}
    empty = dataclasses.replace(record, task=task, claim=nothing, budget=budget)
    assert "client_sizes must add up to the 60 examples of the training, got (0, 0, 0)" in claim_fault(empty)


def test_epsilons_of_clients_below_what_their_rounds_prove_are_noticed(results, tmp_path):
    """The page draws them, from a table whose metrics agree with it."""
    folder, records = results
    copy = shutil.copytree(folder, tmp_path / "copy")
    for name, control in (("fed_avg", None), ("dp_fed_avg", None), ("pfa", None)):
        record = of(records, name, "federation", control)
        assert record.arrays is not None and contradiction(record, copy / "records") == ""
        path = copy / "records" / record.arrays
        table = pq.read_table(path)
        epsilons = [epsilon / 10 for epsilon in table["epsilon"].to_pylist()]
        place = table.column_names.index("epsilon")
        pq.write_table(table.set_column(place, "epsilon", [epsilons]), path)
        again = score_federation(
            {column: table[column].to_pylist() for column in table.column_names} | {"epsilon": epsilons}
        )
        forged = dataclasses.replace(record, metrics=dict(record.metrics) | again)
        assert "does not follow from its steps" in contradiction(forged, copy / "records")


@pytest.mark.long
def test_nominal_sizes_hide_the_weights_and_records_of_them_are_accepted(tmp_path):
    text = TOY.replace("seeds = [0, 2]", "seeds = [0]\ncontrols = false").replace(
        "lr = 0.5", "lr = 0.5, nominal_size = 20"
    )
    records = [r for r in run(text.replace("participation", 'weights = "size", participation'), tmp_path)]
    averaged = of(records, "fed_avg")
    assert averaged.claim is not None and averaged.claim.relation == "add_remove"
    assert {contradiction(r, tmp_path / "records") for r in records if r.status == "ok"} == {""}


def test_units_have_tables_of_their_own(results):
    """An epsilon for a client's data is not compared with one for a record."""
    folder, _ = results
    board = Board.from_folder(folder)
    sections = {row.section: [] for row in board.rows}
    for row in board.rows:
        sections[row.section].append(row.defense.name)
    assert sections["toy", "digits", "mlp", "unit: client"] == ["dp_fed_avg"]
    assert "dp_fed_avg" not in sections["toy", "digits", "mlp", ""]
    assert {row.control for row in board.rows} == {None, "positive", "negative", "public_only"}


def test_seeds_are_in_the_same_row_although_their_clients_differ(results):
    _, records = results
    sizes = [of(records, "fed_avg", seed=seed).task.client_sizes for seed in (0, 2)]
    assert sizes[0] != sizes[1]
    rows = [row for row in Board.from_records(records).rows if row.defense.name == "fed_avg"]
    assert len(rows) == 1 and rows[0].seeds == (0, 2)


def test_a_killed_run_computes_what_is_missing_and_nothing_else(results, tmp_path):
    folder, records = results
    copy = shutil.copytree(folder, tmp_path / "copy")
    lost = of(records, "dp_fed_avg", "rounds", seed=2)
    (copy / "records" / f"{lost.id}.json").unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in (copy / "records").glob("*.json")}
    again = run(TOY, copy)
    assert [dataclasses.replace(r, seconds=0.0) for r in again] == [
        dataclasses.replace(r, seconds=0.0) for r in records
    ]
    assert {name: (copy / "records" / name).stat().st_mtime_ns for name in kept} == kept


@pytest.mark.long
def test_noise_of_the_operating_system_proves_the_same(tmp_path, results):
    text = TOY.replace("seeds = [0, 2]", "seeds = [0]\ncontrols = false").replace('{ name = "dp_fed_avg" },', "")
    records = run(text, tmp_path, secure_noise=True)
    assert {record.noise for record in records} == {"secure"}
    fresh, seeded = (of(those, "fed_avg").claim for those in (records, results[1]))
    assert fresh is not None and seeded is not None
    assert fresh.epsilon == pytest.approx(seeded.epsilon)


@pytest.mark.long
def test_records_of_sums_have_claims_that_are_computed_again_and_no_drift(tmp_path):
    """One of two clients in a round may reveal its noise: claims of clients are at z sqrt(1/2), under zero-out."""
    text = TOY.replace("seeds = [0, 2]", "seeds = [0]\ncontrols = false")
    for changes in (
        'participation = 0.7, aggregation = "sum", least_honest = 1, colluders = 1',
        'participation = 0.7, participants = "poisson", dropout = 0.2, aggregation = "sum", least_honest = 1',
    ):
        folder = tmp_path / str(len(changes))
        folder.mkdir()
        records = run(text.replace("participation = 0.7", changes), folder)
        skipped = {record.defense.name for record in records if record.status != "ok"}
        assert skipped == {"pfa"}
        assert {contradiction(r, folder / "records") for r in records if r.status == "ok"} == {""}
        averaged = of(records, "dp_fed_avg")
        assert averaged.claim is not None and averaged.claim.relation == "zero_out"
        assert averaged.claim.epsilon == pytest.approx(3.0, rel=0.02)
        lower = dataclasses.replace(averaged, noise_multiplier=(averaged.noise_multiplier or 0.0) / 2**0.5)
        assert "does not follow from its steps" in claim_fault(lower)
        drift = of(records, "fed_avg", "rounds").metrics["relative_drift"]
        assert drift.reason == "aggregation = 'sum' shows no single reply"
