"""Common bugs of private federated training, planted one at a time: the check that passes without them fails."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from leakbench.defenses.clipped_sgd import clipped_sgd
from leakbench.defenses.core import Federated, Recipe, RoundSchedule, full, own_noise, per_example_gradients
from leakbench.defenses.core.federated import federated_setup, local_training, private_average, run
from leakbench.defenses.dp_fed_avg import dp_fed_avg
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.moon import Contrastive
from leakbench.defenses.scaffold import scaffold

from ...duties import has_scale
from ...federated_runs import EVERYBODY, FEDERATION, SHARDS, federated

BLACK = [(torch.zeros(12, 6), torch.zeros(12, dtype=torch.int64))] * 4


def noise_of_control_variates_has_its_scale():
    """Changes of control variates in round 0, of gradients so short that all there is is noise: 1e4 x 1e-4 / 12."""
    method = scaffold(clip_norm=1e-4, control="gradient", control_noise_multiplier=1e4, noise_multiplier=1e4)
    draws = [federated(method, shards=BLACK, key=key, schedule=EVERYBODY) for key in range(10)]
    changes = [m.extras["control"] for one in draws for m in one.rounds[0].messages.values()]
    return has_scale(torch.stack(changes), 1.0 / 12)


@pytest.mark.long
def test_a_control_variate_without_noise_is_found(monkeypatch):
    assert noise_of_control_variates_has_its_scale()
    original = local_training.LocalTrainer._on_everybody

    def without_noise(self, client, round, plan):
        return original(self, client, round, plan.plan.at(0.0))

    monkeypatch.setattr(local_training.LocalTrainer, "_on_everybody", without_noise)
    assert not noise_of_control_variates_has_its_scale()


def test_a_control_variate_that_is_asked_for_without_noise_proves_nothing():
    claim = federated(scaffold(control="gradient", control_noise_multiplier=0.0, noise_multiplier=1.0))
    assert claim.claim(1e-5).reason == "no noise is added"


class AfterTheNoise(Contrastive):
    """Adds the gradient of the contrastive term to the noisy update: what a naive wrapper of DP-SGD does."""

    term: Any = None
    batch: Any = None

    def network(self, model, loss):
        contrastive: Any
        wrapped, contrastive = super().network(model, loss)
        without = replace(contrastive, mu=0.0)
        object.__setattr__(self, "term", lambda a, b: contrastive(a, b) - without(a, b))
        return wrapped, without

    def targets(self, state, round, inputs, labels):
        computed = super().targets(state, round, inputs, labels)
        object.__setattr__(self, "batch", (inputs, computed))
        return computed

    def correct(self, state, round, point, update):
        layout = round.context.layout
        rows = per_example_gradients(round.network, self.term, layout, *self.batch, parameters=point)
        return update + rows.sum(dim=0) / 12


def largest_move_by_a_record(rule):
    """Largest move of a client's undivided update by one of its records, in its second round, over the clip norm."""
    settings = {"sampling": full(), "recipe": Recipe(nominal_size=12), "lr": 0.5}
    federation, schedule = replace(FEDERATION, local_steps=1), RoundSchedule(((1,), (0,), (1,)))
    method = Federated(client=clipped_sgd(clip_norm=0.02), rule=rule)
    moves = []
    for record in range(12):
        kept = torch.arange(12) != record
        less = [SHARDS[0], tuple(part[kept] for part in SHARDS[1]), *SHARDS[2:]]
        # Without the record in the third round alone: its first round must end at the same model.
        sums = []
        for shard in (SHARDS, less):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(local_training.LocalTrainer, "run", switched(SHARDS, shard))
                one = federated(method, federation=federation, schedule=schedule, **settings)
            sums.append(one.rounds[2].messages[1].tensors["values"])
        moves.append(float((sums[0] - sums[1]).norm()) * 12 / 0.5 / 0.02)
    return max(moves)


_RUN = local_training.LocalTrainer.run


def switched(before, after):
    """Local training on other records of client 1 from round 2 on."""

    def run_on(self, client, round, steps):
        if client.number == 1:
            client.inputs, client.labels = (after if round.number == 2 else before)[1]
        return _RUN(self, client, round, steps)

    return run_on


@pytest.mark.long
def test_a_contrastive_term_behind_the_noise_is_found():
    assert 0.5 < largest_move_by_a_record(Contrastive(mu=20.0)) <= 1 + 1e-4
    assert largest_move_by_a_record(AfterTheNoise(mu=20.0)) > 1.5


def weights_are_covered_by_the_claim(one):
    """Weights that are not uniform, as they follow from messages and models, are claimed under zero-out."""
    first, second = one.rounds[:2]
    messages = torch.stack([m.tensors["values"] for m in first.messages.values()]).double()
    moved = (second.parameters - first.parameters).double()
    weights = torch.linalg.lstsq(messages.T, moved.unsqueeze(1)).solution.flatten()
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-3)
    uniform = bool((weights - weights.mean()).abs().max() < 1e-3)
    return uniform or one.claim(1e-5).relation != "add_remove"


def test_weights_by_size_under_add_remove_are_found(monkeypatch):
    shards = [SHARDS[0], tuple(part[:5] for part in SHARDS[1]), *SHARDS[2:]]
    method = fed_avg(noise_multiplier=1.3)
    by_size = replace(FEDERATION, weights="size")
    assert weights_are_covered_by_the_claim(federated(method, shards=shards))
    assert weights_are_covered_by_the_claim(federated(method, shards=shards, federation=by_size))
    original = run.FederatedRun._claim
    monkeypatch.setattr(
        run.FederatedRun, "_claim", lambda self, *args: replace(original(self, *args), relation="add_remove")
    )
    assert not weights_are_covered_by_the_claim(federated(method, shards=shards, federation=by_size))


def noise_is_independent():
    """A client that subtracts its own message from another's leaves more noise, not none."""
    method = fed_avg(clip_norm=1e-6, noise_multiplier=1e6)
    one = federated(method, shards=BLACK, schedule=EVERYBODY, sampling=full())
    first, second = (one.rounds[0].messages[client].tensors["values"] for client in (0, 1))
    return bool((first - second).norm() > first.norm())


def test_one_key_of_noise_for_all_clients_is_found(monkeypatch):
    assert noise_is_independent()
    monkeypatch.setattr(federated_setup, "own_noise", lambda key, party, kind: own_noise(key, 0, kind))
    assert not noise_is_independent()


def sums_are_divided_by_a_public_constant():
    """The displacement is the sum of the clipped updates that came, over participation x clients, whoever is lost."""
    method = dp_fed_avg(update_norm=1e-3, noise_multiplier=0.0)
    schedule = replace(EVERYBODY, lost={(0, 1): 0, (0, 2): 4})
    one = federated(method, federation=replace(FEDERATION, participation=0.8), schedule=schedule)
    first, second = one.rounds[:2]
    assert {*first.messages} == {0, 3}
    rows = torch.stack([message.tensors["values"] for message in first.messages.values()])
    clipped = rows * (1e-3 / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    moved = second.parameters - first.parameters
    return bool((moved - clipped.sum(dim=0) / (0.8 * 4)).abs().max() < 1e-7)


def test_a_divisor_that_counts_replies_is_found(monkeypatch):
    assert sums_are_divided_by_a_public_constant()
    original = private_average.PrivateServer.average

    def by_replies(self, number, parameters, deltas, *others):
        replies = float((deltas.norm(dim=1) > 0).sum())
        self.stepper.context = replace(self.stepper.context, expected_batch=replies)
        return original(self, number, parameters, deltas, *others)

    monkeypatch.setattr(private_average.PrivateServer, "average", by_replies)
    assert not sums_are_divided_by_a_public_constant()
