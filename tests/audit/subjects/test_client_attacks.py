"""Attacks on clients: whose records, which non-members, under which claim, and what messages give away of classes."""

from functools import cache

import numpy as np
import pytest
import torch

from leakbench.attacks.core import RESULTS, Attack, ClassScores, Examples, MembershipScores, NotApplicable, granted
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan.expand import plan
from leakbench.audit.run.job import compute
from leakbench.audit.scoring.client_property import score_client_property
from leakbench.audit.scoring.theoretical_bounds import SHARED_NOISE
from leakbench.audit.subjects.client_attacks import class_matched
from leakbench.audit.subjects.federated_run import ClientsRun
from leakbench.audit.subjects.federation import FederatedModel
from leakbench.audit.suite import suite as suites
from leakbench.audit.suite.suite import SuiteError

from ...attacks.toys import auc
from ...parameters import subtests

CPU = torch.device("cpu")
SUITE = """
name = "toy"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, private = 120, batch = 10, lr = 0.2 }
budget = { noise_multiplier = 1.0, delta = 1e-5 }
federated = { clients = 3, split = "class", rounds = 8, local_steps = 1, participation = 0.7 }
controls = false
defense = [{ name = "fed_avg" }]
attack = [
    { name = "message_likelihood" },
    { name = "likelihood_ratio" },
    { name = "loss_trace" },
    { name = "client_classes" },
    { name = "one_step_likelihood_ratio" },
]
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(subject's run, {attack or kind: outcome}) of a suite with one defense."""
    folder = tmp_path_factory.mktemp("clients")

    @cache
    def of(old="", new="", control=None):
        path = folder / "toy.toml"
        path.write_text(SUITE.replace(old, new) if old else SUITE, encoding="utf-8")
        jobs = plan(suites.load(path)).jobs
        job = next(job for job in jobs if job.cells[0].request.control == control)
        subject = FederatedModel(job.cells, CPU)
        result = {}
        for cell in job.cells:
            name = cell.request.attack.name if cell.request.attack else cell.kind
            result[name] = subject.outcome(cell)
        return subject.model, result

    return of


def examples(labels: list[int], first_id: int = 0) -> Examples:
    count = len(labels)
    return Examples(
        ids=torch.arange(first_id, first_id + count), inputs=torch.zeros(count, 2), labels=torch.tensor(labels)
    )


def histogram(pool: Examples) -> list[int]:
    return torch.bincount(pool.labels, minlength=3).tolist()


def test_both_pools_get_the_histogram_of_the_client_and_as_many_as_there_are():
    inside, outside = examples([0] * 20 + [1] * 10), examples([0] * 10 + [1] * 50 + [2] * 9, 100)
    counts = torch.tensor([20, 10, 0])
    one, other = class_matched(counts, inside, outside, limit=None, seed=0)
    assert histogram(one) == histogram(other) == [10, 5, 0]
    small = class_matched(counts, inside, outside, limit=6, seed=0)
    assert [histogram(pool) for pool in small] == [[4, 2, 0]] * 2
    # Smaller selections are parts of larger ones.
    assert torch.isin(small[1].ids, other.ids).all()


def test_pools_without_a_class_of_the_client_are_refused():
    inside = examples([0] * 20 + [1] * 10)
    with pytest.raises(NotApplicable, match=r"must have the classes of the attacked client, .* of class 1; set task"):
        class_matched(torch.tensor([20, 10, 0]), inside, examples([0] * 9, 100), limit=None, seed=0)
    with pytest.raises(NotApplicable, match=r"are too few: 0.025 of its 40 examples"):
        class_matched(
            torch.tensor([19, 21, 0]), examples([0] * 19 + [1] * 21), examples([0, 1, 1], 100), limit=1, seed=0
        )


@pytest.mark.long
def test_on_a_split_by_class_no_score_of_a_class_alone_tells_members(outcomes):
    """The class is all that a score below reads; against non-members of all classes it would reach far above 0.5."""
    model, found = outcomes()
    for attack in ("message_likelihood", "likelihood_ratio"):
        table = found[attack].arrays
        labels = dict(zip(model.members.ids.tolist(), model.members.labels.tolist(), strict=True))
        outside = model.splits.non_member
        labels |= dict(zip(outside.ids.tolist(), outside.labels.tolist(), strict=True))
        classes = np.array([labels[number] for number in table["id"]])
        member = np.asarray(table["member"])
        held = model.histograms[model.attacked]
        scores = held[torch.from_numpy(classes)]
        assert auc(scores, torch.from_numpy(member)) == 0.5
        assert sorted(classes[member]) == sorted(classes[~member])
        own = model.members.ids[model.shards[model.attacked]].tolist()
        assert {*table["id"][member].tolist()} <= {*own} and found[attack].metrics["auc"].n == len(classes)
    everybody = torch.cat([scores[torch.from_numpy(member)], held[outside.labels]])
    inside = torch.arange(len(everybody)) < member.sum()
    assert auc(everybody, inside) > 0.7


def test_at_one_local_step_messages_and_local_steps_give_the_same_ratios(outcomes):
    _, found = outcomes()
    messages, steps = (found[name].arrays for name in ("message_likelihood", "likelihood_ratio"))
    order = np.argsort(messages["id"]), np.argsort(steps["id"])
    np.testing.assert_allclose(messages["score"][order[0]], steps["score"][order[1]], rtol=0.01, atol=0.01)
    assert found["message_likelihood"].flags == found["likelihood_ratio"].flags == []


@pytest.mark.long
def test_members_are_told_apart_under_little_noise_and_the_claim_says_how_it_bounds_them(outcomes):
    """One run's AUC may exceed the claim's: examples of a class have like gradients, and all share the run's noise.

    Ratios over independent rounds are tested in `test_client_messages.py`.
    """
    model, found = outcomes()
    allowed = model.run.claims(1e-5)[model.attacked].trade_off.auc
    for name in ("message_likelihood", "likelihood_ratio"):
        metric = found[name].metrics["auc"]
        assert metric.low > 0.5 and metric.detail["largest_under_claim"] == pytest.approx(allowed)
        assert metric.detail["largest_note"] == SHARED_NOISE
        assert "claim_violated" not in found[name].flags
    leaky = outcomes("noise_multiplier = 1.0", "noise_multiplier = 0.2")[1]["message_likelihood"]
    # A member is in one of seven steps or more with probability 1 - 0.75^7 = 0.87, and like non-members otherwise.
    assert leaky.metrics["auc"].value > 0.8


def test_the_control_that_never_saw_the_members_is_at_chance(outcomes):
    sgd = 'controls = false\ndefense = [{ name = "sgd" }, { name = "fed_avg" }, { name = "dp_sgd" }]'
    _, found = outcomes(
        'controls = false\ndefense = [{ name = "fed_avg" }]', sgd.replace("controls = false\n", ""), "negative"
    )
    metric = found["message_likelihood"].metrics["auc"]
    assert metric.value == 0.5 and "deterministic" in found["message_likelihood"].flags


@pytest.mark.long
def test_the_attacked_client_is_the_worst_by_its_claim_or_the_number_of_the_suite(outcomes):
    model, found = outcomes()
    epsilons = found["federation"].arrays["epsilon"]
    assert model.attacked == epsilons.index(max(epsilons))
    other, again = outcomes("participation = 0.7", "participation = 0.7, attacked = 0")
    assert other.attacked == 0
    own = other.members.ids[other.shards[0]].tolist()
    table = again["message_likelihood"].arrays
    assert {*table["id"][table["member"]].tolist()} <= {*own}
    # Its claim is its own: another number of rounds, another bound.
    rounds = found["federation"].arrays["rounds"]
    assert rounds == again["federation"].arrays["rounds"] and rounds[model.attacked] > rounds[0]
    largest = [outcome["likelihood_ratio"].metrics["auc"].detail["largest_under_claim"] for outcome in (found, again)]
    assert largest[0] > largest[1]


@pytest.mark.long
def test_a_number_out_of_range_and_a_client_without_rounds_are_refused(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(SUITE.replace("participation = 0.7", "attacked = 3"), encoding="utf-8")
    with pytest.raises(SuiteError, match="attacked must be a client's number below 3, got 3"):
        suites.load(path)
    text = SUITE.replace("rounds = 8", "rounds = 1").replace(
        "participation = 0.7", "participation = 0.3, attacked = CLIENT"
    )
    sentence = "is attacked, and takes part in no round; set federated.attacked"
    skipped = []
    for client in range(3):
        path.write_text(text.replace("CLIENT", str(client)), encoding="utf-8")
        (job,) = plan(suites.load(path)).jobs
        outcomes = {cell.request.attack and cell.request.attack.name: out for cell, out in compute(job.cells, CPU)}
        skipped.append(sentence in outcomes["message_likelihood"].skipped)
        # The training, its utility, and attacks on others go on.
        assert not any(outcome.error for outcome in outcomes.values())
        assert not any(outcomes[name].skipped for name in (None, "loss_trace", "client_classes"))
    assert sum(skipped) == 2


def test_models_of_rounds_are_asked_about_the_records_of_all_clients(outcomes):
    model, found = outcomes()
    table, trace = found["loss_trace"].arrays, found["loss_trace"]
    assert {*table["id"][table["member"]].tolist()} <= {*model.members.ids.tolist()}
    assert trace.metrics["auc"].n > found["message_likelihood"].metrics["auc"].n
    assert trace.metrics["auc"].detail["largest_under_claim"] == pytest.approx(
        found["likelihood_ratio"].metrics["auc"].detail["largest_under_claim"], rel=0.05
    )


def test_an_update_of_one_step_is_attacked_by_its_participants(outcomes):
    model, found = outcomes()
    outcome = found["one_step_likelihood_ratio"]
    data = model.private_side(model.attacked)
    last = model.watched.steps[-1].step
    joined = data.examples.ids[data.sampling.indices(last, len(data.examples), data.sampler_key)].tolist()
    table = outcome.arrays
    assert {*table["id"][table["member"]].tolist()} <= {*joined}
    assert "participation_known" in outcome.flags
    # The last step is charged without amplification.
    assert outcome.metrics["auc"].detail["largest_under_claim"] > 0.7


@pytest.mark.long
def test_an_update_that_was_lost_is_attacked_by_nobody(outcomes):
    """A client may be lost after its step: the last message is of an earlier step, and so are the participants."""
    model, found = outcomes("participation = 0.7", "participation = 1.0, attacked = 1, dropout = 0.7")
    lost = [number for number, client in model.schedule.lost if client == 1 and model.schedule.lost[number, client]]
    received = [reply.round.number for reply in model.watched.replies[1]]
    assert max(lost) > max(received) and model.watched.steps[-1].step == max(lost)
    data = model.private_side(1)
    joined = [
        {*data.examples.ids[data.sampling.indices(step, len(data.examples), data.sampler_key)].tolist()}
        for step in (max(received), max(lost))
    ]
    table = found["one_step_likelihood_ratio"].arrays
    members = {*table["id"][table["member"]].tolist()}
    assert members <= joined[0] and not members <= joined[1]


@subtests(
    "attack, sentence",
    [
        ("message_likelihood", "client 0 is attacked, and none of its messages was received"),
        ("likelihood_ratio", "client 0 is attacked, and took no local step"),
        ("one_step_likelihood_ratio", "client 0 is attacked, and none of its messages was received"),
    ],
)
def test_attacks_on_a_client_that_is_always_lost_are_skipped(tmp_path, attack, sentence):
    path = tmp_path / "toy.toml"
    lost = "rounds = 2, local_steps = 1, participation = 1.0, dropout = 0.97, attacked = 0"
    path.write_text(SUITE.replace("rounds = 8, local_steps = 1, participation = 0.7", lost), encoding="utf-8")
    (job,) = plan(suites.load(path)).jobs
    cells = tuple(cell for cell in job.cells if cell.request.attack and cell.request.attack.name == attack)
    ((_, outcome),) = compute(cells, CPU)
    assert sentence in outcome.skipped and not outcome.error


def replaced_attack(monkeypatch, name: str, function):
    """Has the suite's attack of this name run another function."""
    own = catalog.attack(name)

    def run(target, generator, *, ignored=0):
        return function(target, generator)

    # The decorator of attacks reads the types of both ends.
    run.__annotations__ = {
        "target": own.target, "generator": torch.Generator, "ignored": int, "return": RESULTS[own.kind].result
    }  # fmt: skip

    run.__name__ = name
    other = Attack(run, own.requires)
    monkeypatch.setattr(other, "settings", lambda **chosen: {})
    monkeypatch.setattr(catalog, "attack", lambda asked: other if asked == name else own)


def computed(tmp_path, name: str, text: str = SUITE):
    path = tmp_path / "toy.toml"
    path.write_text(text, encoding="utf-8")
    (job,) = plan(suites.load(path)).jobs
    (cell,) = [cell for cell in job.cells if cell.request.attack and cell.request.attack.name == name]
    return FederatedModel((cell,), CPU), cell


def test_an_attack_that_compares_remainders_is_refused_whatever_it_says_of_noise(tmp_path, monkeypatch):
    """Rows of non-participants are equal, so that their comparison cancels noise of any size."""
    subject, cell = computed(tmp_path, "message_likelihood")

    def comparing(target, generator):
        scores = torch.zeros(len(target.candidates), dtype=torch.float64)
        for message in target.messages:
            rows = message.others_removed()
            scores += (rows - rows.median(dim=0).values).norm(dim=1)
        return MembershipScores(ids=target.candidates.ids, scores=scores, exact=False, deterministic=True)

    replaced_attack(monkeypatch, "message_likelihood", comparing)
    with pytest.raises(ValueError, match="must score a candidate by what is left without everybody else"):
        subject.outcome(cell)


def test_an_attack_that_counts_its_calls_names_no_classes(tmp_path, monkeypatch):
    """A split by class deals the first class to the first client."""
    clients = 'clients = 10, split = "class", rounds = 1, local_steps = 1, participation = 1.0'
    text = SUITE.replace('clients = 3, split = "class", rounds = 8, local_steps = 1, participation = 0.7', clients)
    subject, cell = computed(tmp_path, "client_classes", text.replace("private = 120", "private = 200"))
    calls = []

    def counting(target, generator):
        calls.append(target)
        named = torch.arange(10) == len(calls) - 1
        return ClassScores(scores=named.double(), named=named)

    replaced_attack(monkeypatch, "client_classes", counting)
    outcome = subject.outcome(cell)
    assert len(calls) == 10 and granted(outcome.metrics["classes_named"].value) < 0.5
    assert outcome.arrays["client"] == [client for client in range(10) for _ in range(10)]


@subtests(
    "defense, attack, sentence",
    [
        ("dp_fed_avg", "message_likelihood", "the server of dp_fed_avg is trusted"),
        ("dp_fed_avg", "client_classes", "the server of dp_fed_avg is trusted"),
        ("local_noise_filter", "message_likelihood", "is on the whole update of a client"),
        ("moon", "likelihood_ratio", "take the gradient of another loss than the model's"),
        ("fed_lrs", "message_likelihood", "messages of fed_lrs do not show the sums of local steps"),
        ("fed_lrs", "one_step_likelihood_ratio", "a message of fed_lrs shows a part of its local step's release"),
        ("posterior_freeze", "one_step_likelihood_ratio", "shows a part of its local step's release"),
    ],
)
def test_what_no_claim_covers_or_no_message_shows_is_skipped_with_a_sentence(tmp_path, defense, attack, sentence):
    path = tmp_path / "toy.toml"
    path.write_text(SUITE.replace('name = "fed_avg"', f'name = "{defense}"'), encoding="utf-8")
    (job,) = plan(suites.load(path)).jobs
    cells = tuple(cell for cell in job.cells if cell.request.attack and cell.request.attack.name == attack)
    ((_, outcome),) = compute(cells, CPU)
    assert sentence in outcome.skipped and not outcome.error


def test_nothing_is_kept_that_no_attack_sees(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(SUITE, encoding="utf-8")
    (job,) = plan(suites.load(path)).jobs
    bare = ClientsRun(job.cells[0].request.of_training(), CPU)
    _ = bare.run
    assert not (bare.watched.models or bare.watched.replies or bare.watched.steps)
    assert bare.watched.trainer.recorder is None


def test_classes_of_clients_are_named_from_messages_and_counted_a_row_each(outcomes):
    model, found = outcomes("noise_multiplier = 1.0", "noise_multiplier = 0.2")
    table = found["client_classes"].arrays
    assert table["client"] == [client for client in range(3) for _ in range(10)]
    assert table["class"] == [*range(10)] * 3
    assert table["held"] == pytest.approx(model.histograms.flatten().tolist())
    assert np.reshape(table["named"], (3, 10)).sum(axis=1).tolist() == [1, 1, 1]
    metrics = found["client_classes"].metrics
    assert metrics["classes_named"].n == 3 and metrics["classes_named"].value >= 2 / 3
    # One of three clients has the class that is the most frequent of all.
    assert metrics["classes_named_floor"].value == pytest.approx(1 / 3)


def columns(held: list[list[float]], named: list[int], examples: int = 10) -> dict[str, list]:
    clients, classes = len(held), len(held[0])
    return {
        "client": [client for client in range(clients) for _ in range(classes)],
        "class": [*range(classes)] * clients,
        "score": [0.0] * clients * classes,
        "held": [share for row in held for share in row],
        "named": [number == named[client] for client in range(clients) for number in range(classes)],
        "examples": [examples] * clients * classes,
    }


def test_a_named_class_is_right_if_no_other_is_more_frequent():
    held = [[0.6, 0.4, 0.0], [0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [0.0, 1.0, 0.0]]
    metrics = score_client_property(columns(held, [0, 1, 1, 1]))
    value = metrics["classes_named"]
    assert (value.value, value.n) == (0.75, 4)
    # Clopper and Pearson's for 3 of 4.
    assert (value.low, value.high) == pytest.approx((0.1941, 0.9937), abs=1e-4)
    # Class frequencies are 0.3, 0.525, 0.175: right for the clients with probability 0.3, 0.825, 0.175 and 0.525, 0.456
    # on average; the second class for all is right for two of four.
    assert metrics["classes_named_floor"].value == pytest.approx(0.5)
    held[1] = [0.6, 0.4, 0.0]
    drawn = score_client_property(columns(held, [0, 1, 1, 1]))["classes_named_floor"]
    assert drawn.value == pytest.approx((0.325 + 0.325 + 0.175 + 0.5) / 4)


@subtests("names", [[0], [0, 1], [0, 1, 2]])
def test_the_same_names_for_every_client_are_no_better_than_the_floor(names):
    """Public knowledge of the classes is enough for them: no message is read."""
    held = [[0.5, 0.3, 0.1, 0.1], [0.6, 0.3, 0.1, 0.0], [0.4, 0.3, 0.3, 0.0], [0.4, 0.3, 0.2, 0.1]]
    table = columns(held, [0] * 4)
    table["named"] = [number in names for _ in held for number in range(4)]
    metrics = score_client_property(table)
    assert granted(metrics["classes_named"].value) >= 11 / 12
    assert metrics["classes_named_floor"].value == pytest.approx(metrics["classes_named"].value)


def test_equally_frequent_classes_have_the_floor_of_a_class_at_random():
    one_each = [[float(number == client) for number in range(4)] for client in range(4)]
    floor = score_client_property(columns(one_each, [0] * 4))["classes_named_floor"]
    assert floor.value == pytest.approx(1 / 4)


def test_several_names_count_by_their_fraction():
    table = columns([[0.5, 0.3, 0.2, 0.0], [0.4, 0.0, 0.3, 0.3]], [0, 0])
    table["named"] = [True, False, True, False, False, True, True, False]
    value = score_client_property(table)["classes_named"]
    assert value.value == 0.5  # one of two of the first client, one of two of the second
    assert value.low == 0.0 and value.high == 1.0


def test_clients_without_messages_and_rows_that_are_no_fractions_are_refused():
    empty = {name: [] for name in columns([[1.0]], [0])}
    assert score_client_property(empty)["classes_named"].reason == "no client sent a message"
    with pytest.raises(ValueError, match="client 1 must have a named class, and fractions that sum to 1"):
        score_client_property(columns([[1.0, 0.0], [0.5, 0.4]], [0, 0]))
    assert score_client_property(columns([[1.0, 0.0]], [0]))["classes_named"].value == pytest.approx(1.0)
