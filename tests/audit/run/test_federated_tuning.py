"""Settings of federated suites chosen on public clients: their data, their noise, and what is refused."""

import json

import pytest
import torch

from leakbench.audit.plan.expand import plan
from leakbench.audit.plan.splits_cache import load_data
from leakbench.audit.run import federated_tuning, harness
from leakbench.audit.run.tuning import tune
from leakbench.audit.suite.suite import SuiteError
from leakbench.defenses.core import Federation, calibrate_federated, poisson
from leakbench.defenses.fed_avg import fed_avg
from leakbench.leaderboard.records.record import read_all

from ...parameters import subtests

CPU = torch.device("cpu")
TUNED = """
name = "toy"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, private = 400, batch = 10, lr = 0.5 }
budget = { noise_multiplier = [1.0, 2.0], delta = 1e-5 }
federated = { clients = 4, split = "class", rounds = 3, local_steps = 2, participation = 0.75 }
defense = [{ name = "fed_avg" }, { name = "fed_pcdp", rank = 3, lr = 0.2 }]
controls = false
tune = { validation = 60, trial_examples = 120, trial_rounds = 2, lr = [1e-4, 0.5], clip_norm = [0.5, 1.0] }
"""
ALONE = TUNED.replace(', { name = "fed_pcdp", rank = 3, lr = 0.2 }', "").replace(", clip_norm = [0.5, 1.0]", "")
EPSILON = ALONE.replace("noise_multiplier = [1.0, 2.0]", "epsilon = 2.0")


def tuned(suite, folder):
    return tune(suite, folder, device=CPU, jobs=1, report=lambda done, total, activity: None)


@pytest.fixture(name="watched")
def _watched(monkeypatch):
    """The arguments of every federated trial, which is trained all the same."""
    real, calls = federated_tuning.federate, []

    def watch(model, shards, method, **settings):
        calls.append((shards, method, settings))
        return real(model, shards, method, **settings)

    monkeypatch.setattr(federated_tuning, "federate", watch)
    return calls


@pytest.mark.long
def test_public_clients_are_divided_as_private_ones_and_no_example_is_read_twice(suite_of, tmp_path, watched):
    suite = suite_of(TUNED)
    tuned(suite, tmp_path)
    public = load_data("digits", 0, suite.task.sizes).public.inputs.flatten(start_dim=1)
    assert len(watched) == 2 * (4 + 2)  # two noise multipliers; fed_pcdp's entry has a learning rate
    for shards, _, settings in watched:
        assert [len(inputs) for inputs, _ in shards] == [30] * 4
        assert max(len(labels.unique()) for _, labels in shards) <= 4  # `class` sorts by label and cuts
        rows = torch.cat([*(inputs for inputs, _ in shards), settings["public"][0]]).flatten(start_dim=1)
        assert len(rows) == len(public) - 60 and len(rows.unique(dim=0)) == len(rows)
        assert (rows[:, None] == public[None]).all(dim=2).any(dim=1).all()


@pytest.mark.long
def test_a_step_of_a_trial_has_the_batch_and_the_noise_of_the_private_run(suite_of, tmp_path, watched):
    tuned(suite_of(TUNED), tmp_path)
    assert {method.noise_multiplier for _, method, _ in watched} == {1.0, 2.0}
    for shards, _, settings in watched:
        assert settings["sampling"].rate * len(shards[0][0]) == pytest.approx(10)
        assert settings["federation"] == Federation(rounds=2, local_steps=2, participation=0.75)
    assert (
        len({settings["schedule"].rounds for _, _, settings in watched}) == 1
    )  # a point is not chosen for its participants


@pytest.mark.long
def test_local_epochs_of_a_trial_are_as_many_steps_as_those_of_the_private_run(suite_of, tmp_path, watched):
    tuned(suite_of(ALONE.replace("local_steps = 2", "local_epochs = 1")), tmp_path)
    assert {settings["federation"].local_steps for _, _, settings in watched} == {10}  # 100 private examples, not 30


@pytest.mark.long
def test_noise_is_calibrated_for_the_private_run_and_not_for_the_trial(suite_of, tmp_path, watched):
    tuned(suite_of(EPSILON), tmp_path / "one")
    tuned(suite_of(EPSILON.replace("trial_rounds = 2", "trial_rounds = 1")), tmp_path / "two")
    multipliers = {method.noise_multiplier for _, method, _ in watched}
    assert len(multipliers) == 1
    schedule = federated_tuning.schedule_of(Federation(rounds=3, local_steps=2, participation=0.75), [100] * 4, 0)
    run = {"federation": Federation(rounds=3, local_steps=2, participation=0.75), "sampling": poisson(0.1)}
    expected = calibrate_federated(fed_avg(), sizes=[100] * 4, schedule=schedule, epsilon=2.0, delta=1e-5, **run)
    assert multipliers == {expected.noise_multiplier}


def test_a_nominal_size_is_of_private_clients_alone(suite_of, tmp_path, watched):
    tuned(suite_of(ALONE.replace("batch = 10", "batch = 10, nominal_size = 200")), tmp_path)
    for shards, _, settings in watched:
        assert settings["recipe"].nominal_size is None
        assert settings["sampling"].rate * len(shards[0][0]) == pytest.approx(10)


@pytest.mark.long
def test_the_best_point_reaches_the_records_which_say_so(suite_of, tmp_path):
    suite = suite_of(ALONE.replace("[1.0, 2.0]", "1.0"))
    harness.run(suite, tmp_path, device=CPU, jobs=1)
    records = read_all(tmp_path)
    assert {record.kind for record in records} == {"utility", "federation", "rounds"}
    (document,) = [json.loads(path.read_text("utf-8")) for path in (tmp_path / "tuning").glob("*.json")]
    best = max(document["grid"], key=lambda point: point["accuracy"])
    assert document["request"]["trial"] == {"examples": 120, "rounds": 2}
    for record in records:
        assert "tuned_on_public" in record.flags
        assert record.task["lr"] == best["lr"] == document["chosen"]["lr"]
        assert (tmp_path / "tuning" / f"{record.task['tuning_digest']}.json").is_file()


def test_a_server_with_noise_for_clients_is_tuned_too(suite_of, tmp_path, watched):
    text = ALONE.replace("participation", 'unit = "client", participants = "poisson", participation')
    text = text.replace('"fed_avg"', '"dp_sgd"').replace("[1.0, 2.0]", "1.0")
    suite = tuned(suite_of(text), tmp_path)
    assert all(method.noise_place == "server" and method.noise_multiplier == 1.0 for _, method, _ in watched)
    assert all(settings["schedule"] is None for _, _, settings in watched)  # drawn with the run's secret key
    (cell, *_) = plan(suite).cells
    assert cell.request.training.tuning_digest


def test_a_method_that_does_not_fit_the_clients_is_not_tuned(suite_of, tmp_path, watched):
    text = ALONE.replace('{ name = "fed_avg" }', '{ name = "fed_avg" }, { name = "scaffold", momentum = 0.9 }')
    tuned(suite_of(text.replace("[1.0, 2.0]", "1.0")), tmp_path)
    assert {method.name for _, method, _ in watched} == {"fed_avg"}


@subtests(
    ("old", "new", "words"),
    [
        (
            "trial_examples = 120",
            "trial_examples = 39",
            "tune: trial_examples must be at least 4 clients x 10, a batch of the private run, .*, got 39; raise it",
        ),
        (
            "trial_examples = 120",
            "trial_examples = 390",
            "must leave public examples for methods that read some, got 397 of which 390 .* or tune.trial_examples",
        ),
        (
            "batch = 10,",
            'batch = 10, sampling = "full",',
            "tune: trial_examples must be absent under full sampling, .*, got 120",
        ),
        (
            "batch = 10,",
            'batch = 10, sampling = "shuffle",',
            "federated: local_steps must be whole epochs",
        ),
        ('"class"', '"dirichlet", least = 40', "trial_examples must be enough for the division .*, 120, got 4 x 40"),
        ('"class"', '"shards", shards = 40', "trial_examples must be enough for the division .*, 120, got 4 x 40"),
        ("seeds = [0]", "seeds = [0, 1]", "needs public examples that are the same under every seed"),
    ],
)
def test_public_clients_that_cannot_take_the_private_steps_are_refused(old, new, words, suite_of, tmp_path, watched):
    assert old in ALONE
    with pytest.raises(SuiteError, match=words):
        harness.run(suite_of(ALONE.replace(old, new)), tmp_path, device=CPU, jobs=1)
    assert not watched and not any(tmp_path.rglob("*.json"))


@subtests(
    ("entry", "words"),
    [
        (
            '{ name = "fed_pcdp", rank = 3, auxiliary_size = 218 }',
            "tune: must leave the public examples that fed_pcdp reads, got 217: public data must have at least 218 .*; "
            "raise task.public, lower tune.validation or tune.trial_examples, or set a smaller rank or auxiliary_size",
        ),
        (
            '{ name = "pfa", rank = 3, auxiliary_size = 218 }',
            "that pfa reads, got 217: public data must have at least 218",
        ),
        (
            '{ name = "fed_pcdp", rank = 3, auxiliary = "independent", auxiliary_size = 109 }',
            "that fed_pcdp reads, got 217: independent auxiliary batches must fit",
        ),
        (
            '{ name = "fed_pcdp", rank = 218, shortage = "lower_rank" }',
            "that fed_pcdp reads, got 217: its plan would be marked rank_lowered_to_217",
        ),
        (
            '{ name = "pcdp", rank = 3, auxiliary_size = 218, shortage = "lower_rank" }',
            "that pcdp reads, got 217: its plan would be marked auxiliary_lowered_to_217",
        ),
    ],
)
def test_a_method_that_reads_more_public_examples_than_a_trial_leaves_is_refused(
    entry, words, suite_of, tmp_path, watched
):
    text = ALONE.replace('{ name = "fed_avg" }', f'{{ name = "fed_avg" }}, {entry}')
    with pytest.raises(SuiteError, match=words):
        harness.run(suite_of(text), tmp_path, device=CPU, jobs=1)
    assert not watched and not any(tmp_path.rglob("*.json"))


def test_a_method_that_reads_all_public_examples_of_a_trial_is_tuned(suite_of, tmp_path, watched):
    text = ALONE.replace('"fed_avg"', '"fed_pcdp", rank = 3, auxiliary_size = 217').replace("[1.0, 2.0]", "1.0")
    tuned(suite_of(text.replace("1e-4", "0.25")), tmp_path)
    assert {len(settings["public"][0]) for _, _, settings in watched} == {217}
