"""A federated training as a subject: its clients' data, its numbers against independent computations, its controls."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from leakbench.audit.plan.expand import plan
from leakbench.audit.subjects.federated_run import ClientsRun, relative_drift
from leakbench.audit.subjects.federation import FederatedModel
from leakbench.audit.suite import suite as suites
from leakbench.audit.targets.observe import logits_of
from leakbench.defenses.core import poisson, predict
from leakbench.defenses.dp_sgd import dp_sgd

CPU = torch.device("cpu")
SUITE = """
name = "toy"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, private = 60, non_member = 60, batch = 5, lr = 0.5 }
budget = { noise_multiplier = 4.0, delta = 1e-5 }
federated = { clients = 3, split = "class", rounds = 4, local_steps = 2, participation = 0.7 }
public_only = { epochs = 20, lr = 0.01 }
defense = [{ name = "fed_avg" }, { name = "dp_fed_avg" }]
attack = [{ name = "loss_threshold" }]
"""


def job_of(folder, text=SUITE, name="fed_avg", control=None):
    path = folder / "toy.toml"
    path.write_text(text, encoding="utf-8")
    jobs = plan(suites.load(path)).jobs
    return next(j for j in jobs if (j.cells[0].request.defense.name, j.cells[0].request.control) == (name, control))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Outcomes by defense, control and kind; a run is trained once."""
    folder = tmp_path_factory.mktemp("federation")

    @cache
    def of(name="fed_avg", control=None, text=SUITE):
        job = job_of(folder, text, name, control)
        subject = FederatedModel(job.cells, CPU)
        return subject.model, {cell.kind: subject.outcome(cell) for cell in job.cells}

    return of


def test_the_claim_is_the_worst_clients_and_every_epsilon_that_of_its_own_steps(outcomes):
    model, found = outcomes()
    table = found["federation"].arrays
    for client, epsilon in zip(table["client"], table["epsilon"], strict=True):
        steps = 2 * table["rounds"][client]
        central = predict(dp_sgd(clip_norm=1.0, noise_multiplier=4.0), sampling=poisson(0.25), steps=steps)
        assert epsilon == pytest.approx(central.claim(1e-5).epsilon)
    for outcome in found.values():
        assert outcome.claim["epsilon"] == max(table["epsilon"]) and outcome.claim["unit"] == "record"
    assert found["federation"].metrics["epsilon_worst"].value == max(table["epsilon"])
    assert table["rounds"] == [len(model.schedule.rounds_of(client)) for client in range(3)]


def test_messages_have_the_bytes_of_their_numbers(outcomes):
    _, found = outcomes()
    parameters = found["utility"].task["parameters"]
    assert found["federation"].metrics["bytes_up"].value == 4 * parameters
    assert found["federation"].metrics["bytes_down"].value == 4 * parameters
    assert found["rounds"].arrays["bytes_up"] == [4 * parameters * 2 * done for done in (1, 2, 3, 4)]


def test_the_last_round_is_the_final_model(outcomes):
    _, found = outcomes()
    assert found["rounds"].arrays["accuracy"][-1] == pytest.approx(found["utility"].metrics["accuracy"].value)
    assert found["rounds"].arrays["loss"][-1] == pytest.approx(found["utility"].metrics["loss"].value, rel=1e-6)
    assert found["rounds"].metrics["round_accuracy"].value == pytest.approx(np.mean(found["rounds"].arrays["accuracy"]))


def test_clients_of_classes_are_measured_on_their_classes(outcomes):
    model, found = outcomes()
    labels, test = model.uninserted.labels, model.test
    right = logits_of(model.run.model, test.inputs).argmax(dim=1) == test.labels
    expected = [
        np.mean([float(right[test.labels == label].double().mean()) for label in labels[shard].tolist()])
        for shard in model.shards
    ]
    assert found["federation"].arrays["accuracy"] == pytest.approx(expected)
    assert found["utility"].metrics["worst_client_accuracy"].value == pytest.approx(min(expected))
    assert found["utility"].metrics["client_accuracy_std"].value == pytest.approx(np.std(expected))


def test_records_name_sizes_clients_and_schedule(outcomes):
    model, found = outcomes()
    task = found["utility"].task
    assert task["client_sizes"] == [20, 20, 20] and (task["steps"], task["sample_rate"]) == (8, 0.25)
    assert task["schedule_of"] == {"seed": model.schedule_seed} and len(task["clients_digest"]) == 64


def test_methods_on_the_same_clients_have_the_same_schedule(outcomes):
    first, second = outcomes()[0], outcomes("dp_fed_avg")[0]
    assert first.request.seeds != second.request.seeds
    assert first.run.schedule == second.run.schedule == first.schedule


def test_watching_a_run_does_not_change_it(outcomes, tmp_path):
    """Measured after every round, and trained by `federate` itself, from the same seeds."""
    from leakbench.audit.plan.build import recipe_of
    from leakbench.defenses.core import federate

    model, _ = outcomes()
    data, seeds = model.uninserted, model.request.seeds
    own = ClientsRun(model.request, CPU)
    again = federate(
        own.network,
        [(data.inputs[shard], data.labels[shard]) for shard in own.shards],
        own.method[0],
        federation=own.federation,
        sampling=own.sampling[0],
        lr=0.5,
        seed=seeds.public,
        key=seeds.noise,
        schedule=own.schedule,
        recipe=recipe_of(model.request.training, model.splits),
    )
    for a, b in zip(again.model.parameters(), model.run.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_attack_on_the_final_model_is_bounded_by_the_claim_for_a_record_alone(outcomes):
    of_records, of_clients = (outcomes(name)[1]["membership"] for name in ("fed_avg", "dp_fed_avg"))
    assert of_records.metrics["auc"].n == of_clients.metrics["auc"].n == 120
    assert 0.5 < of_records.metrics["auc"].detail.largest_under_claim < 1
    assert of_clients.metrics["auc"].detail.get("largest_under_claim") is None
    assert of_clients.claim["unit"] == "client"


def test_the_negative_control_trains_clients_on_public_examples(outcomes):
    model, found = outcomes("sgd", "negative")
    public = model.splits.public.ids
    assert torch.isin(model.uninserted.ids, public).all() and sum(model.sizes) == len(model.uninserted) == 60
    assert found["membership"].claim["epsilon"] is None


@pytest.mark.long
def test_public_only_reads_no_private_example_and_claims_epsilon_0(outcomes, tmp_path):
    model, found = outcomes("sgd", "public_only")
    outcome = found["utility"]
    assert outcome.claim["epsilon"] == 0 and outcome.noise_multiplier is None and outcome.task["steps"] == 0
    assert "the public examples are public, and tell nothing of the private ones" in outcome.claim["assumes"]
    assert outcome.metrics["accuracy"].value > 0.6 and "run" not in vars(model) and "_watched" not in vars(model)
    assert "pretrained_on_public" in outcome.flags


def test_lost_clients_are_named_in_their_round(outcomes):
    text = SUITE.replace("participation = 0.7", "participation = 1.0, dropout = 0.6")
    model, found = outcomes(text=text)
    rounds = found["rounds"].arrays
    expected = [sorted(client for number, client in model.schedule.lost if number == r) for r in range(4)]
    assert rounds["lost"] == expected and any(expected)
    assert sum(found["federation"].arrays["messages"]) == 12 - len(model.schedule.lost)


def test_relative_drift_is_the_weighted_spread_over_the_squared_mean():
    deltas = [torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0])]
    mean = np.array([2.5, 3.0])  # weights 1/4 and 3/4
    spread = 0.25 * np.sum((np.array([1.0, 0.0]) - mean) ** 2) + 0.75 * np.sum((np.array([3.0, 4.0]) - mean) ** 2)
    assert relative_drift(deltas, [1.0, 3.0]) == pytest.approx(spread / np.sum(mean**2))
    assert relative_drift([deltas[0]] * 3, [1.0] * 3) == 0.0
    assert math.isnan(relative_drift(deltas[:1], [1.0])) and math.isnan(relative_drift([deltas[0], -deltas[0]], [1, 1]))


@pytest.mark.long
def test_a_method_that_was_calibrated_has_no_unverified_part(tmp_path):
    """Its dry run leaves bases in a memory, which a claim must not take for somebody else's code."""
    text = SUITE.replace("noise_multiplier = 4.0", "epsilon = 3.0").replace('"fed_avg"', '"fed_pcdp", rank = 5')
    job = job_of(tmp_path, text, "fed_pcdp")
    outcome = FederatedModel(job.cells, CPU).outcome(job.cells[0])
    assert outcome.flags == ["public_in_distribution"] and (outcome.claim or {})["unverified"] == ()


def test_a_loss_of_the_budget_would_be_flagged(outcomes, tmp_path, monkeypatch):
    """Half of the noise that was calibrated: the ledgers say so."""
    text = SUITE.replace("noise_multiplier = 4.0", "epsilon = 3.0")
    job = job_of(tmp_path, text)
    subject = FederatedModel(job.cells, CPU)
    method, matched = subject.model.method
    subject.model.method = (method.with_noise((method.noise_multiplier or 0.0) / 2), matched)
    assert "claim_violated" in subject.outcome(job.cells[0]).flags
    honest = FederatedModel(job.cells, CPU).outcome(job.cells[0])
    assert "claim_violated" not in honest.flags and (honest.claim or {})["epsilon"] == pytest.approx(3.0, rel=0.01)
