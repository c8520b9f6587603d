"""Suites with clients: cells, skips and refusals before any computation, and noise for the worst client's epsilon."""

import re

import pytest
import torch

from leakbench.audit.plan import federation
from leakbench.audit.plan.expand import plan
from leakbench.audit.plan.request import RequestedMethod
from leakbench.audit.plan.splits_cache import load_data
from leakbench.audit.suite.suite import SuiteError
from leakbench.defenses.core import PrivateAverage, draw_schedule, poisson, predict, predict_federated
from leakbench.defenses.dp_sgd import dp_sgd

from ...parameters import subtests

SUITE = """
name = "toy"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, private = 60, batch = 5, lr = 0.5 }
budget = { epsilon = 3.0, delta = 1e-5 }
federated = { clients = 3, rounds = 4, local_steps = 2, participation = 0.7 }
defense = [{ name = "fed_avg" }, { name = "dp_sgd" }, { name = "local_noise_filter" }]
attack = [{ name = "loss_threshold" }, { name = "one_step_likelihood_ratio" }, { name = "lira" }]
"""
SIZES = [20, 20, 20]


def request_of(suite, name="fed_avg"):
    return next(cell.request for cell in plan(suite).cells if cell.request.defense.name == name)


def test_every_defense_has_a_cell_of_each_kind_and_the_suite_its_controls(suite_of):
    cells = plan(suite_of(SUITE)).jobs
    found = sorted(
        (cell.request.defense.name, cell.kind, str(cell.request.control)) for job in cells for cell in job.cells
    )
    kinds = ("federation", "membership", "rounds", "utility")
    expected = [(name, kind, "None") for name in ("dp_sgd", "fed_avg", "local_noise_filter") for kind in kinds]
    expected += [("sgd", kind, role) for kind in kinds for role in ("negative", "positive")]
    # An attack that reads remainders has a negative control with noise, too.
    expected += [("dp_sgd", kind, "negative") for kind in kinds]
    assert found == sorted([*expected, ("sgd", "utility", "public_only")])
    assert {job.subject for job in cells} == {"federation"}


def test_attacks_on_what_federated_runs_do_not_offer_are_skipped_with_a_sentence(suite_of):
    reasons = {cell.request.attack.name: cell.skip for cell in plan(suite_of(SUITE)).skipped if cell.request.attack}
    assert reasons == {
        "one_step_likelihood_ratio": "one_step_likelihood_ratio needs the release of a single step, and a message is "
        "the sum of several; set local_steps = 1",
        "lira": "lira needs shadow models, and none are trained by clients",
    }


def test_only_attacks_that_read_remainders_add_a_control_with_noise(suite_of):
    def negative(attack):
        cells = plan(suite_of(SUITE.replace("one_step_likelihood_ratio", attack))).cells
        return {cell.request.defense.name for cell in cells if cell.request.control == "negative"}

    assert negative("message_likelihood") == {"sgd", "dp_sgd"} and negative("loss_trace") == {"sgd"}


def test_the_attacked_client_decides_ids_and_the_worst_moves_none(suite_of):
    def ids(table):
        return [cell.id for cell in plan(suite_of(SUITE.replace("participation = 0.7", table))).cells]

    assert ids("participation = 0.7") == ids('participation = 0.7, attacked = "worst"')
    assert {*ids("participation = 0.7")}.isdisjoint(ids("participation = 0.7, attacked = 1"))


def test_without_attacks_public_only_is_the_one_control(suite_of):
    text = SUITE.replace("attack =", "#")
    roles = {cell.request.control for cell in plan(suite_of(text)).cells}
    assert roles == {None, "public_only"}
    assert {cell.request.control for cell in plan(suite_of(text + "controls = false\n")).cells} == {None}


def test_a_pool_without_public_examples_skips_public_only(suite_of):
    (cell,) = [
        c
        for c in plan(suite_of(SUITE.replace("private = 60", "private = 60, public = 0"))).skipped
        if c.request.control == "public_only"
    ]
    assert cell.skip == "public_only needs at least 32 public examples, a batch, got 0; set task.public"


def test_clients_and_public_only_decide_the_ids_of_their_own_cells(suite_of):
    def ids(text, control):
        return {c.id for c in plan(suite_of(text)).cells if (c.request.control == "public_only") == control}

    other = SUITE + "public_only = { epochs = 3 }\n"
    assert ids(SUITE, control=False) == ids(other, control=False)
    assert not ids(SUITE, control=True) & ids(other, control=True)
    more = SUITE.replace("rounds = 4", "rounds = 5")
    assert not ids(SUITE, control=False) & ids(more, control=False)


@subtests(
    "old, new, sentence",
    [
        ("clients = 3", "clients = 61", "federated.clients: must be at most 60, the private examples, got 61"),
        ("batch = 5", "batch = 21", "task.batch: must be at most 20, the examples of a client of average size, got 21"),
        (
            "clients = 3,",
            'clients = 3, split = "dirichlet", least = 21,',
            "federated: clients x least must be at most the number of examples, 60, got 3 x 21",
        ),
        (
            "lr = 0.5 }",
            'lr = 0.5, sampling = "shuffle" }',
            "federated: local_steps must be whole epochs of 4 steps under shuffle sampling, got 2: rounds that a "
            "client misses would cut its epochs; take poisson",
        ),
    ],
)
def test_clients_that_do_not_fit_the_data_are_refused_before_any_computation(old, new, sentence, suite_of):
    text = SUITE.replace(old, new)
    assert text != SUITE
    with pytest.raises(SuiteError, match=re.escape(sentence)):
        plan(suite_of(text))


@subtests(
    "entry, task, sentence",
    [
        ('{ name = "scaffold" }', "momentum = 0.9, lr = 0.5", "scaffold does not fit these clients: .*momentum"),
        (
            '{ name = "pfa", variant = "full", budgets = [4.0, 8.0] }',
            "lr = 0.5",
            "pfa does not fit these clients: budgets must be one for each of 3 clients, got 2",
        ),
    ],
)
def test_a_method_that_does_not_fit_the_clients_is_skipped_with_its_sentence(entry, task, sentence, suite_of):
    text = SUITE.replace('{ name = "fed_avg" }', entry).replace("lr = 0.5", task)
    name = entry.split('"')[1]
    reasons = {
        cell.skip
        for cell in plan(suite_of(text)).cells
        if cell.request.defense.name == name and not cell.request.attack
    }
    (reason,) = reasons
    assert re.match(sentence, reason)


@subtests(
    "entry, clients, task, sentence",
    [
        (
            '{ name = "dp_ftrl", tree_per_epoch = false }',
            "",
            'sampling = "partition"',
            "dp_ftrl does not fit these clients: noise that is correlated over steps must restart within a round of 4 "
            "local steps, got a stream of 16: a client that misses a round would break it",
        ),
        (
            '{ name = "dp_ftrl" }',
            'unit = "client"',
            "",
            "dp_ftrl does not fit these clients: 'dp_ftrl' has noise that is correlated over rounds, so participants "
            "must be 'partition', got 'fixed', which has no participation pattern",
        ),
        (
            '{ name = "dpsur" }',
            'unit = "client"',
            "",
            "dpsur does not fit these clients: 'dpsur' cannot average clients: a round has no trial and no other start",
        ),
        (
            '{ name = "fed_lrs" }',
            'aggregation = "sum"',
            "",
            "fed_lrs does not fit these clients: aggregation must be 'messages' for 'fed_lrs', got 'sum': its messages "
            "have positions of their own, which a sum does not show",
        ),
        (
            '{ name = "dp_fed_avg" }',
            'aggregation = "sum"',
            "",
            "dp_fed_avg does not fit these clients: least_honest must be set for aggregation 'sum' where the noise is "
            "in the server's average, got None: the claim counts on the shares of as many clients",
        ),
        (
            '{ name = "dp_fed_avg" }',
            'aggregation = "sum", least_honest = 2, colluders = 1',
            "",
            "dp_fed_avg does not fit these clients: least_honest + colluders must be at most the 2 clients that send "
            "in a round, got 2 + 1",
        ),
    ],
)
def test_what_a_run_would_refuse_by_its_noise_is_skipped_before_any_computation(
    entry, clients, task, sentence, suite_of
):
    text = SUITE.replace('{ name = "fed_avg" }', entry).replace("local_steps = 2", "local_steps = 4")
    text = text.replace("participation = 0.7", f"participation = 0.7, {clients}" if clients else "participation = 0.7")
    text = text.replace("lr = 0.5", f"lr = 0.5, {task}" if task else "lr = 0.5")
    name = entry.split('"')[1]
    cells = [c for c in plan(suite_of(text)).cells if c.request.defense.name == name and not c.request.attack]
    assert {cell.skip for cell in cells} == {sentence}


@subtests(
    "entry, clients",
    [
        ('{ name = "dp_ftrl" }', "participation = 0.7"),
        ('{ name = "dp_ftrl", tree_per_epoch = false }', "participation = 1.0"),
        ('{ name = "band_mf", bands = 2 }', 'unit = "client", participants = "partition", participation = 0.4'),
        ('{ name = "dp_fed_avg" }', 'participation = 0.7, aggregation = "sum", least_honest = 1, colluders = 1'),
        ('{ name = "scaffold" }', 'participation = 0.7, aggregation = "sum"'),
    ],
)
def test_noise_that_rounds_do_not_cut_is_not_skipped(entry, clients, suite_of):
    text = SUITE.replace('{ name = "fed_avg" }', entry).replace("local_steps = 2", "local_steps = 4")
    text = text.replace("lr = 0.5", 'lr = 0.5, sampling = "partition"')
    text = text.replace("participation = 0.7", clients)
    name = entry.split('"')[1]
    cells = [c for c in plan(suite_of(text)).cells if c.request.defense.name == name and not c.request.attack]
    assert cells and {cell.skip for cell in cells} == {""}


def test_attacks_on_single_messages_are_not_offered_under_a_sum(suite_of):
    assert federation.hides_messages(suite_of(SUITE).federated, "message_likelihood") == ""
    summed = suite_of(SUITE.replace("participation = 0.7", 'participation = 0.7, aggregation = "sum"')).federated
    assert federation.hides_messages(summed, "message_likelihood") == (
        "message_likelihood reads the messages of a client, and aggregation = 'sum' shows the server their sum alone"
    )


def test_attacks_that_read_messages_are_skipped_under_a_sum_and_others_are_not(suite_of):
    clients = "local_steps = 1, participation = 0.7"
    text = SUITE.replace("local_steps = 2, participation = 0.7", clients)
    text = text.replace('{ name = "lira" }', '{ name = "message_likelihood" }, { name = "client_classes" }')

    def skips(text):
        found = plan(suite_of(text)).cells
        return {
            cell.request.attack.name: cell.skip for cell in found if cell.request.attack and not cell.request.control
        }

    shown, summed = skips(text), skips(text.replace(clients, clients + ', aggregation = "sum"'))
    assert not any(shown.values())
    assert {name for name, skip in summed.items() if skip} == {
        "message_likelihood",
        "client_classes",
        "one_step_likelihood_ratio",
    }
    for name in ("message_likelihood", "client_classes", "one_step_likelihood_ratio"):
        assert summed[name].startswith(f"{name} reads the messages of a client, and aggregation = 'sum'")


def test_the_default_aggregation_moves_no_id(suite_of):
    def ids(text):
        return {cell.id for cell in plan(suite_of(text)).cells}

    named = SUITE.replace("participation = 0.7", 'participation = 0.7, aggregation = "messages"')
    summed = SUITE.replace("participation = 0.7", 'participation = 0.7, aggregation = "sum"')
    assert ids(named) == ids(SUITE)
    assert not {i for i in ids(summed) if "public" not in i} & ids(SUITE)


def test_clients_hold_the_private_examples_and_a_seed_decides_which(suite_of):
    request = request_of(suite_of(SUITE))
    pool = load_data("digits", 0, request.training.sizes).private
    parts = federation.divided(request, pool.ids, pool.labels)
    assert [len(part) for part in parts] == SIZES and torch.cat(parts).unique().numel() == 60


def test_a_central_defense_is_the_clients_or_the_servers(suite_of):
    method = RequestedMethod(kind="defenses", name="dp_sgd", settings={"clip_norm": 0.5})
    table = suite_of(SUITE).federated
    clients = federation.lifted(method, table)
    server = federation.lifted(method, table.model_copy(update={"unit": "client"}))
    assert (clients.unit, clients.name) == ("record", "dp_sgd") and clients.client == dp_sgd(clip_norm=0.5)
    assert (server.unit, server.name) == ("client", "dp_sgd") and isinstance(server.server, PrivateAverage)
    assert server.server.defense == dp_sgd(clip_norm=0.5)


def test_noise_is_calibrated_to_the_client_with_the_most_rounds(suite_of):
    """Three clients are in about two of four rounds; the worst one's epsilon is the budget, by a central prediction."""
    request = request_of(suite_of(SUITE))
    shape = federation.federation_of(request, 60)
    schedule = federation.schedule_of(shape, SIZES, 7)
    method, matched = federation.defend_federated(request, SIZES, schedule)
    most = max(len(schedule.rounds_of(client)) for client in range(3))
    central = dp_sgd(clip_norm=1.0, noise_multiplier=method.noise_multiplier)
    epsilon = predict(central, sampling=poisson(0.25), steps=2 * most).claim(1e-5).epsilon
    assert not matched and 2.95 < epsilon <= 3.0 + 1e-9
    assert schedule == draw_schedule(shape, [0, 1, 2], seed=7, key=7)


def test_a_method_without_a_bound_gets_the_noise_of_one_with_a_bound(suite_of):
    request = request_of(suite_of(SUITE.replace('"fed_avg"', '"noisy_sgd"')), "noisy_sgd")
    schedule = federation.schedule_of(federation.federation_of(request, 60), SIZES, 7)
    method, matched = federation.defend_federated(request, SIZES, schedule)
    bounded, _ = federation.defend_federated(request_of(suite_of(SUITE)), SIZES, schedule)
    assert matched and method.noise_multiplier == pytest.approx(bounded.noise_multiplier)


def test_noise_of_a_methods_own_is_kept_whatever_the_budget(suite_of):
    suite = suite_of(SUITE)
    request = request_of(suite, "local_noise_filter")
    shape = federation.federation_of(request, 60)
    schedule = federation.schedule_of(shape, SIZES, 7)
    method, _ = federation.defend_federated(request, SIZES, schedule)
    own = federation.lifted(request.defense, suite.federated).noise_multiplier
    assert own is not None and method.noise_multiplier == own > 0
    assert federation.draws_noise(request.defense) and not federation.draws_noise(request_of(suite).defense)
    ledgers = predict_federated(method, SIZES, federation=shape, sampling=poisson(0.25), schedule=schedule)
    assert max(ledger.claim(1e-5, unit="client").epsilon for ledger in ledgers) > 0


def test_secure_noise_is_part_of_the_request_of_a_method_with_noise_of_its_own(suite_of):
    cells = plan(suite_of(SUITE), secure_noise=True).cells
    secure = {cell.request.defense.name: cell.request.secure for cell in cells}
    assert secure["local_noise_filter"] and secure["fed_avg"] and not secure["sgd"]
