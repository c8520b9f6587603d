"""Messages as a subject of suites: the client's first, with its codec, noise and claim, and what is refused."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from leakbench.attacks.core import Observation, Reconstruction
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan.expand import plan
from leakbench.audit.run import harness
from leakbench.audit.run.claims import claim_fault, unproved_share
from leakbench.audit.run.job import compute
from leakbench.audit.subjects.outcome import Outcome
from leakbench.audit.suite.suite import SuiteError
from leakbench.leaderboard.records.task import UpdateTask

from ...parameters import long_but

CPU = torch.device("cpu")
SUITE = """
name = "toy"
seeds = [0]
controls = false
task = { data = "digits", model = "mlp", private = 60, batch = 5, lr = 0.5 }
budget = { noise_multiplier = 1.5, delta = 1e-5 }
federated = { clients = 3, rounds = 2, local_steps = 1 }
share = { data = "digits", model = "mlp", batch = 2, images = 2 }
defense = [
    { name = "fed_avg", lr = 0.25 },
    { name = "fed_lrs" },
    { name = "random_sparsification", final_sparsity = 0.8, cooling = false },
    { name = "local_noise_filter" },
    { name = "dp_fed_avg" },
    { name = "gep", rank = 5 },
]
attack = [{ name = "inverting_gradients", iterations = 2 }]
"""
SEVERAL = SUITE.replace("local_steps = 1", "local_steps = 4").replace("batch = 2,", "batch = 2, local = { batch = 1 },")


class Double:
    """Stands in for an attack: keeps what it is given and answers with grey images."""

    def __init__(self, real):
        self.requires, self.kind, self.check, self.targets = real.requires, real.kind, real.check, []

    def __call__(self, target: Observation, generator: torch.Generator, **settings) -> Reconstruction:
        assert target.labels is not None
        self.targets.append(target)
        grey = torch.full((len(target.labels), *target.input_shape), 0.5)
        return Reconstruction(inputs=grey, labels=target.labels, objective=0.0)


@pytest.fixture
def watched(monkeypatch):
    double = Double(catalog.attack("inverting_gradients"))
    monkeypatch.setattr(catalog, "attack", lambda name: double)
    return double


def cells(suite, defense: str):
    chosen = [c for c in plan(suite).cells if c.kind == "reconstruction" and c.request.defense.name == defense]
    return {cell.request.release_noise: cell for cell in chosen}


def outcome(cell) -> Outcome:
    ((_, found),) = compute((cell,), CPU)
    assert not found.error, found.error
    return found


def claim_of(finished: Outcome) -> dict[str, Any]:
    assert finished.claim is not None
    return finished.claim


def test_a_suite_attacks_the_message_of_a_client_of_its_defense(suite_of, watched):
    suite = suite_of(SUITE)
    both = cells(suite, "fed_lrs")
    assert set(both) == {"none", "calibrated"}
    update = both["none"].request.requested_update
    assert update.message == {"clients": 3, "rounds": 2, "local_steps": 1, "unit": "record"}
    quiet, noisy = (outcome(both[noise]) for noise in ("none", "calibrated"))
    assert quiet.noise == "none" and noisy.noise == "seeded"
    # Half of the network's 2,410 numbers, and a bitmap of their positions.
    assert (quiet.task["form"], quiet.task["bytes"]) == ("bitmap", 4 * 1205 + 302)
    assert [len(target.released) for target in watched.targets] == [1205] * 4
    assert claim_of(quiet)["epsilon"] is None and claim_of(noisy)["epsilon"] > 1
    assert claim_of(noisy)["unit"] == "record"
    # Each target has noise of its own, and the same examples in both variants.
    silent, loud = watched.targets[:2], watched.targets[2:]
    assert not torch.equal(loud[0].noise_std, torch.zeros(1205)) and not silent[0].noise_std.any()
    assert [t.labels.tolist() for t in silent] == [t.labels.tolist() for t in loud]


@pytest.mark.long
def test_a_defense_has_its_own_learning_rate_and_its_noise_from_the_budget_of_the_run(suite_of, watched):
    text = SUITE.replace("noise_multiplier = 1.5", "epsilon = 3.0")
    found = cells(suite_of(text), "fed_avg")
    assert found["none"].request.requested_update.lr == 0.25
    other = cells(suite_of(text), "fed_lrs")["none"].request.requested_update
    assert other.lr == 0.5
    calibrated = outcome(found["calibrated"])
    assert calibrated.noise_multiplier is not None and 0.3 < calibrated.noise_multiplier < 3
    # One message with known participants has no amplification by sampling: it may cost more than the run is claimed to.
    assert claim_of(calibrated)["epsilon"] > 1


def test_noise_that_is_added_elsewhere_has_no_variant_of_its_own(suite_of, watched):
    suite = suite_of(SUITE)
    assert set(cells(suite, "dp_fed_avg")) == {"none"}
    at_the_server = outcome(cells(suite, "dp_fed_avg")["none"])
    assert claim_of(at_the_server)["epsilon"] is None
    assert (
        claim_of(at_the_server)["reason"]
        == "the server adds the noise of this method after it has received the message"
    )
    own = cells(suite, "local_noise_filter")
    assert set(own) == {"none", "calibrated"}
    found = outcome(own["calibrated"])
    assert claim_of(found)["unit"] == "client" and claim_of(found)["relation"] == "replace_one"
    bound = found.metrics["rero_bound"]
    assert bound.value is None and (bound.reason or "").startswith("the claim is for all of a client's data")


def test_what_cannot_be_simulated_is_skipped_with_its_sentence(suite_of):
    suite = suite_of(SEVERAL)
    assert "cannot be shared as the sum of 4 local steps" in cells(suite, "gep")["calibrated"].skip
    adam = suite_of(SUITE.replace("lr = 0.5 }\nbudget", 'lr = 0.5, optimizer = "adam" }\nbudget'))
    assert (
        cells(adam, "fed_avg")["calibrated"].skip
        == "messages are simulated of local steps by SGD, with or without momentum, got adam"
    )
    assert not cells(suite, "random_sparsification")["calibrated"].skip
    assert not cells(suite_of(SUITE), "gep")["calibrated"].skip


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("images = 2", "images = 2, step = 1", "share.step: must be absent with [federated], whose first round's"),
        ("images = 2", "images = 2, steps = 5", "share.steps: must be absent with [federated], whose first round's"),
        ("{ batch = 1 }", "{ batch = 1, epochs = 2 }", "share.local.epochs: must be absent with [federated]"),
    ],
)
def test_keys_that_the_rounds_decide_are_refused(old, new, sentence, suite_of):
    text = SEVERAL.replace(old, new)
    assert text != SEVERAL
    with pytest.raises(SuiteError) as error:
        suite_of(text)
    assert sentence in str(error.value)


def test_a_client_whose_server_sees_a_sum_shares_no_message(suite_of):
    with pytest.raises(SuiteError, match="share: must be absent with aggregation = 'sum', under which no message"):
        suite_of(SUITE.replace("local_steps = 1", 'local_steps = 1, aggregation = "sum"'))


def test_a_record_of_a_message_that_no_server_sees_proves_nothing(suite_of, watched, tmp_path):
    suite = suite_of(SUITE).select(defenses=["fed_avg"])
    records = harness.run(suite, tmp_path / "records", device=CPU, jobs=1)
    (noisy,) = (r for r in records if r.kind == "reconstruction" and r.task.get("noise") == "calibrated")
    assert isinstance(noisy.task, UpdateTask) and noisy.task.message and unproved_share(noisy) == ""
    message = {**noisy.task.message, "aggregation": "sum"}
    summed = replace(noisy, task=UpdateTask({**noisy.task, "message": message}))
    with pytest.raises(ValueError, match="must be of a run that shows messages, got aggregation = 'sum'"):
        unproved_share(summed)


def test_local_steps_that_end_within_a_pass_are_refused(suite_of):
    with pytest.raises(SuiteError, match="must make whole passes over the client's 2 examples in 3 local steps, got 1"):
        plan(suite_of(SEVERAL.replace("local_steps = 4", "local_steps = 3")))


@pytest.mark.parametrize("defense", long_but(["fed_avg"], ["fed_avg", "local_noise_filter", "random_sparsification"]))
@pytest.mark.parametrize("text", [SUITE, SEVERAL], ids=["one step", "several"])
def test_the_claim_of_a_message_follows_from_its_record_and_a_better_one_does_not(
    defense, text, suite_of, watched, tmp_path
):
    suite = suite_of(text).select(defenses=[defense])
    records = [r for r in harness.run(suite, tmp_path / "records", device=CPU, jobs=1) if r.kind == "reconstruction"]
    (noisy,) = (record for record in records if record.task.get("noise") == "calibrated")
    assert noisy.status == "ok" and unproved_share(noisy) == ""
    assert noisy.claim is not None and noisy.claim.epsilon is not None and math.isfinite(noisy.claim.epsilon)
    better = replace(noisy.claim, epsilon=noisy.claim.epsilon * 0.9)
    assert "does not follow from its steps" in unproved_share(replace(noisy, claim=better))


def test_an_epsilon_for_a_message_without_noise_of_its_own_is_noticed(suite_of, watched, tmp_path):
    """The noise of `dp_fed_avg` comes after the message, which its attacks see as it was sent."""
    suite = suite_of(SUITE).select(defenses=["dp_fed_avg"])
    records = harness.run(suite, tmp_path / "records", device=CPU, jobs=1)
    (sent, *_) = (r for r in records if r.kind == "reconstruction" and r.status == "ok")
    assert sent.claim is not None and sent.claim.epsilon is None and claim_fault(sent) == ""
    forged = replace(sent.claim, epsilon=2.8, relation="zero_out", unit="client", sampling="partition", reason="")
    assert "adds it at the server" in claim_fault(replace(sent, claim=forged, noise_multiplier=1.5))
