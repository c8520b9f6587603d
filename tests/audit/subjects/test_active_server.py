"""Suites with attacks of active servers: charges, refusals, and a table apart from honest results."""

import json
from dataclasses import replace

import pytest

from leakbench.audit.plan.expand import plan
from leakbench.audit.run.federated_claims import proved_by_clients
from leakbench.audit.run.harness import run
from leakbench.audit.run.verify import contradiction
from leakbench.audit.suite import suite as suites
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.checks.difference import diff
from leakbench.leaderboard.exports.tidy import tables
from leakbench.leaderboard.page.build import render
from leakbench.leaderboard.records.record import Record, RecordedRequirements, read_all
from leakbench.leaderboard.records.task import TrainingTask

SUITE = """
name = "active"
seeds = [0]
controls = false
task = { data = "digits", model = "mlp", private = 80, batch = 10, lr = 0.5, candidates = 20 }
budget = { noise_multiplier = 4.0, delta = 1e-5 }
federated = { clients = 4, rounds = 2, local_steps = 1, participation = 1.0, chosen_models = 3 }
share = { data = "digits", model = "mlp", batch = 4, images = 1, noise = ["none", "calibrated"] }
defense = [{ name = "fed_avg" }]
attack = [{ name = "imprint" }, { name = "fishing" }, { name = "active_membership" }, { name = "message_likelihood" }]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("active")
    (folder / "active.toml").write_text(SUITE)
    run(suites.load(folder / "active.toml"), folder / "out", device=None, jobs=1)
    return next((folder / "out").rglob("*.json")).parent


@pytest.fixture(scope="module")
def records(folder) -> list[Record]:
    return read_all(folder)


def of(records: list[Record], attack: str, noise: str | None = None) -> Record:
    return next(r for r in records if r.attack and r.attack.name == attack and r.task.noise == noise)


def test_a_claim_counts_the_messages_that_were_asked_for(records):
    one, three = of(records, "imprint", "calibrated"), of(records, "active_membership")
    assert one.task["releases"] == 1 and three.task["releases"] == 3
    for record in (one, three):
        assert record.status == "ok" and record.active_server and record.claim is not None
    assert one.claim is not None and three.claim is not None
    # Four examples in one full batch at multiplier 4, by dp-accounting.
    import dp_accounting

    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_accounting.GaussianDpEvent(4.0))
    assert one.claim.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    sampled = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    sampled.compose(dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(4.0)), 3)
    assert three.claim.epsilon == pytest.approx(sampled.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.long
def test_results_are_in_no_row_control_or_honest_table_and_in_one_of_their_own(records, tmp_path):
    board = Board.from_records(records)
    honest = Board.from_records([record for record in records if not record.active_server])
    assert board.rows == honest.rows and board.controls == honest.controls and board.unranked == honest.unranked
    assert board.to_csv() == honest.to_csv() and not honest.active
    assert {result.attack for result in board.active} == {"imprint", "fishing", "active_membership"}
    assert "Active server: it chooses the model that a client trains from" in board.to_text(width=200)
    assert board.to_text(width=200).startswith(honest.to_text(width=200).split("\nAttack")[0][:200])
    tree = board.to_dict()
    assert "active_server" not in honest.to_dict() and len(tree.pop("active_server")) == len(board.active)
    page, plain = (
        render(board, records, tmp_path),
        render(honest, [r for r in records if not r.active_server], tmp_path),
    )
    assert 'id="active"' in page and 'id="active"' not in plain
    for record in records:
        if record.active_server and record.status == "ok" and record.kind == "membership":
            assert f"of {record.metrics['auc'].n} candidates" in page[page.index('id="active"') :]
    part = page[page.index('id="board"') : page.index('id="active"')]
    assert "imprint" not in part and "fishing" not in part and "active_membership" not in part


def test_a_violated_claim_is_an_alarm_and_marks_its_row_although_the_result_is_not_ranked(records):
    broken = [replace(r, flags=(*r.flags, "claim_violated")) if r.active_server else r for r in records]
    board, whole = Board.from_records(broken), Board.from_records(records)
    assert board.violations and "CLAIM VIOLATED" in board.to_text(width=200)
    # A claim is for any model: a row whose claim a server has refuted is published nowhere as if it held.
    assert [row.flags for row in board.rows] == [(*row.flags, "claim_violated") for row in whole.rows]
    (line,) = {tuple(line["flags"].split()) for line in tables(board)["record"]}
    assert "claim_violated" in line


def test_an_attack_of_the_catalogue_is_active_or_honest_whatever_its_record_says(records, folder):
    honest, active = of(records, "message_likelihood"), of(records, "active_membership")
    images = of(records, "imprint", "calibrated")
    for record in (honest, active, images):
        assert record.requires is not None
        other = () if record.active_server else (*record.requires.controls, "MODEL")
        forged = replace(record, requires=RecordedRequirements(dict(record.requires) | {"controls": other}))
        assert "is given" in contradiction(forged, folder)
    assert "is given" in contradiction(replace(images, requires=None), folder)
    # Half a forgery is no way into the honest table either.
    assert replace(active, requires=RecordedRequirements(dict(active.requires or {}) | {"controls": ()})).active_server


def test_a_record_with_fewer_messages_than_its_epsilon_needs_is_refuted(records):
    from leakbench.audit.run.claims import unproved_share

    record = of(records, "imprint", "calibrated")
    assert not unproved_share(record)
    more = replace(record, task=json.loads(json.dumps(dict(record.task) | {"releases": 3}, default=list)))
    assert "does not follow from its steps" in unproved_share(more)


def test_fewer_messages_than_the_claim_charges_are_refuted(records, folder):
    three, one = of(records, "active_membership"), of(records, "imprint", "calibrated")
    for releases in (2, 1):
        task = json.loads(json.dumps(dict(three.task) | {"releases": releases}, default=list))
        assert f"its claim charges 3 steps, and the {releases} releases of its task are charged {releases}" in (
            contradiction(replace(three, task=task), folder)
        )
    assert one.claim is not None
    more = replace(one.claim, events=tuple(event.replace("1 x", "2 x") for event in one.claim.events))
    assert "its claim charges 2 steps, and the 1 releases" in contradiction(replace(one, claim=more), folder)
    uncounted = replace(one.claim, events=("plenty",))
    assert "its claim charges no counted steps" in contradiction(replace(one, claim=uncounted), folder)
    without = {key: value for key, value in dict(three.task).items() if key != "releases"}
    unsaid = replace(three, task=json.loads(json.dumps(without, default=list)))
    assert "its claim charges 3 steps" in contradiction(unsaid, folder)
    forged = replace(three, control="public_only", noise_multiplier=None)  # a claim of it is not counted
    assert "its messages cannot be counted: " in contradiction(forged, folder)


def test_without_clients_an_active_server_has_nobody_to_send_a_model_to(tmp_path):
    central = SUITE.replace("federated = {", "# federated = {").replace("lr = 0.5,", "lr = 0.5, epochs = 1,")
    (tmp_path / "central.toml").write_text(central.replace('{ name = "fed_avg" }', '{ name = "dp_sgd" }'))
    cells = plan(suites.load(tmp_path / "central.toml")).cells
    skips = {cell.request.attack.name: cell.skip for cell in cells if cell.request.attack}
    assert "needs a client that trains from a server's model; add a [federated] table" in skips["imprint"]
    assert "has no [federated] table" in skips["active_membership"]


def test_arrays_and_rounds_of_every_record_give_its_numbers_and_claim_again(records, folder):
    assert [contradiction(record, folder) for record in records if record.status == "ok" and record.active_server] == [
        "" for record in records if record.status == "ok" and record.active_server
    ]
    # Rounds at chosen models are fewer than the training's, so its claim would not do for them, nor theirs for it.
    three = of(records, "active_membership")
    assert three.claim is not None and three.claim.epsilon is not None
    less = replace(three, claim=replace(three.claim, epsilon=three.claim.epsilon * 0.9))
    assert "does not follow" in contradiction(less, folder)


def test_a_claim_at_chosen_models_is_that_of_the_attacked_client_and_not_of_the_safest(records):
    record = of(records, "active_membership")
    task, proved = json.loads(json.dumps(dict(record.task), default=list)), {}
    sizes = [17, 20, 21, 22]  # the smallest client has the largest sample rate, and so the largest epsilon
    table = task["federated"] | {"equal": "batch"}
    for attacked in (None, 0, 3):
        task |= {"client_sizes": sizes, "federated": table | ({} if attacked is None else {"attacked": attacked})}
        changed = replace(record, task=task)
        assert isinstance(changed.task, TrainingTask)
        proved[attacked] = proved_by_clients(changed, changed.task, 1e-5).epsilon
    assert proved[None] == proved[0] > proved[3]
    changed = replace(record, task=task | {"releases": 4})
    assert isinstance(changed.task, TrainingTask)
    with pytest.raises(ValueError, match="releases of a record must be at most the 3 that its clients allow, got 4"):
        proved_by_clients(changed, changed.task, 1e-5)


def test_a_difference_of_boards_is_of_active_servers_too_and_their_drift_is_their_own(records, tmp_path):
    more = replace(of(records, "imprint", "none").metrics["psnr"], value=99.0, low=98.0, high=100.0)
    paths = []
    for side, of_side in (
        ("before", records),
        (
            "after",
            [
                replace(r, metrics={**r.metrics, "psnr": more}) if r.active_server and "psnr" in r.metrics else r
                for r in records
            ],
        ),
    ):
        paths.append(tmp_path / f"{side}.json")
        paths[-1].write_text(json.dumps(Board.from_records(of_side).to_dict()))
    assert diff(paths[0], paths[0]).equal
    difference = diff(*paths)
    assert not difference.equal and all("active server" in change.name for change in difference.rows.changed)
    assert {drift.name for drift in difference.drift if drift.changed} == {"active_server.psnr"}
