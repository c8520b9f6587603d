"""The federated loop: one client is central training, and what a client lacks or loses costs the others nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from leakbench.defenses.adaptive_clipping import adaptive_clipping
from leakbench.defenses.clipped_sgd import clipped_sgd
from leakbench.defenses.core import (
    Engine,
    Execution,
    Federated,
    Federation,
    Follow,
    Layout,
    Reachable,
    Recipe,
    RoundSchedule,
    cyclic,
    federate,
    full,
    own_noise,
    own_sampler_key,
    partition,
    poisson,
    predict_federated,
    shuffle,
    train,
    truncated_poisson,
)
from leakbench.defenses.core.federated import federated_setup
from leakbench.defenses.dp_adam import dp_adam
from leakbench.defenses.dp_ftrl import dp_ftrl
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dp_snip import dp_snip
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.dpsur import dpsur
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.fed_lrs import fed_lrs
from leakbench.defenses.fed_pcdp import fed_pcdp
from leakbench.defenses.fed_pdp import fed_pdp
from leakbench.defenses.fed_prox import fed_prox
from leakbench.defenses.moon import moon
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.pdp import pdp
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.ranked import ranked
from leakbench.defenses.scaffold import scaffold
from leakbench.defenses.sgd import sgd

from ....parameters import subtests
from ...duties import DATA, PUBLIC, network
from ...federated_runs import EVERYBODY, FEDERATION, SHARDS, federated, parameters

ALONE = RoundSchedule(((0,),) * 3)
HALF = {"federation": Federation(rounds=3, local_steps=4, participation=0.5)}
NOISY: dict[str, Any] = {"noise_multiplier": 1.3}
CLIENTS = {
    "dp_sgd": dp_sgd(**NOISY),
    "pcdp": pcdp(rank=3, interval=4, **NOISY),
    "pdp": pdp(rank=3, interval=4, **NOISY),
    "random_sparsification": random_sparsification(final_sparsity=0.8, **NOISY),
    "adaptive_clipping": adaptive_clipping(**NOISY),
    "dpdr": dpdr(**NOISY),
    "ranked": ranked(final_sparsity=0.5, **NOISY),
    "dp_snip": dp_snip(**NOISY),
    "dp_ftrl": dp_ftrl(**NOISY),
    "dp_adam": dp_adam(**NOISY),
    "dpsur": dpsur(**NOISY),
}


def centrally(defense, *, sampling=None, key=7, recipe=None):
    """The central run with the noise and the sampler of client 0."""
    return train(
        network(), DATA, defense, sampling=sampling or poisson(0.4), steps=12, lr=0.3, seed=2, public=PUBLIC,
        noise=own_noise(key, 0, "seeded"), sampler_key=own_sampler_key(key, 0), recipe=recipe,
    )  # fmt: skip


@subtests("name", list(CLIENTS))
def test_one_client_is_central_training_over_all_rounds_with_an_equal_ledger(name):
    sampling = partition(0.5) if name == "dp_ftrl" else poisson(0.4)
    run = federated(Federated(client=CLIENTS[name]), shards=[DATA], schedule=ALONE, sampling=sampling)
    central = centrally(CLIENTS[name], sampling=sampling)
    torch.testing.assert_close(parameters(run), parameters(central.model), rtol=0, atol=1e-6)
    assert run.ledgers[0].entries == central.ledger.entries
    assert run.claim(1e-5).epsilon == central.claim(1e-5).epsilon
    assert run.claim(1e-5).unit == "record"


RULES = {
    "fed_avg": (fed_avg(**NOISY), "dp_sgd"),
    "fed_prox": (fed_prox(mu=0.0, **NOISY), "dp_sgd"),
    "scaffold": (scaffold(**NOISY), "dp_sgd"),
    "scaffold stored": (scaffold(stored=True, **NOISY), "dp_sgd"),
    "fed_lrs": (fed_lrs(penalty=0.0, sparsity=0.0, **NOISY), "dp_sgd"),
    "moon": (moon(mu=0.0, **NOISY), "dp_sgd"),
    "fed_pdp": (fed_pdp(rank=3, **NOISY), "pdp"),
    "fed_pcdp": (fed_pcdp(rank=3, **NOISY), "pcdp"),
}


@subtests("name", list(RULES))
def test_one_client_under_a_rule_that_is_off_is_central_training(name):
    method, client = RULES[name]
    run, central = federated(method, shards=[DATA], schedule=ALONE), centrally(CLIENTS[client])
    torch.testing.assert_close(parameters(run), parameters(central.model), rtol=0, atol=1e-6)
    assert run.ledgers[0].entries == central.ledger.entries


def test_a_schedule_of_rates_goes_on_over_rounds_and_momentum_starts_again():
    cosine = Recipe(schedule="cosine")
    run = federated(fed_avg(**NOISY), shards=[DATA], schedule=ALONE, recipe=cosine)
    torch.testing.assert_close(
        parameters(run), parameters(centrally(CLIENTS["dp_sgd"], recipe=cosine).model), rtol=0, atol=1e-6
    )
    momentum = Recipe(momentum=0.9)
    run = federated(fed_avg(**NOISY), shards=[DATA], schedule=ALONE, recipe=momentum)
    central = centrally(CLIENTS["dp_sgd"], recipe=momentum)
    assert (parameters(run) - parameters(central.model)).norm() > 1e-2


def test_the_order_of_clients_in_a_round_changes_nothing():
    forth = federated(scaffold(**NOISY), schedule=EVERYBODY)
    back = federated(scaffold(**NOISY), schedule=RoundSchedule(((3, 1, 0, 2),) * 3))
    torch.testing.assert_close(parameters(forth), parameters(back), rtol=0, atol=1e-6)
    assert [ledger.entries for ledger in forth.ledgers] == [ledger.entries for ledger in back.ledgers]


def test_two_equal_clients_with_equal_keys_are_one(monkeypatch):
    monkeypatch.setattr(federated_setup, "own_noise", lambda key, party, kind: own_noise(key, 0, kind))
    monkeypatch.setattr(federated_setup, "own_sampler_key", lambda key, party: own_sampler_key(key, 0))
    alone = federated(fed_prox(**NOISY), shards=[DATA], schedule=ALONE)
    both = federated(fed_prox(**NOISY), shards=[DATA, DATA], schedule=RoundSchedule(((0, 1),) * 3))
    torch.testing.assert_close(parameters(both), parameters(alone), rtol=0, atol=1e-6)


def test_the_server_takes_a_share_of_the_mean_displacement():
    run = federated(fed_avg(**NOISY), federation=replace(FEDERATION, server_lr=0.25), schedule=EVERYBODY)
    first, second = run.rounds[:2]
    mean = torch.stack([message.tensors["values"] for message in first.messages.values()]).mean(dim=0)
    torch.testing.assert_close(second.parameters - first.parameters, 0.25 * mean, rtol=0, atol=1e-6)


def test_weights_by_size_are_those_of_the_replies_that_came():
    shards = [(DATA[0][:6], DATA[1][:6]), (DATA[0][6:], DATA[1][6:]), (DATA[0][:3], DATA[1][:3])]
    lost = RoundSchedule(((0, 1, 2),) * 3, {(0, 2): 1})
    run = federated(fed_avg(**NOISY), shards=shards, federation=replace(FEDERATION, weights="size"), schedule=lost)
    first, second = run.rounds[:2]
    values = [first.messages[client].tensors["values"] for client in (0, 1)]
    expected = (6 * values[0] + 18 * values[1]) / 24
    torch.testing.assert_close(second.parameters - first.parameters, expected, rtol=0, atol=1e-6)


def charges(run):
    return [sum(entry.steps for entry in ledger.entries) for ledger in run.ledgers]


@subtests("steps", [0, 2, 4])
def test_a_client_that_is_lost_pays_for_its_steps_and_costs_the_others_nothing(steps):
    """The others are as if it had not been scheduled in that round."""
    method = scaffold(**NOISY)
    lost = federated(method, schedule=replace(EVERYBODY, lost={(1, 2): steps}))
    without = federated(method, schedule=RoundSchedule(((0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3))))
    assert torch.equal(lost.rounds[2].parameters, without.rounds[2].parameters)
    assert charges(lost) == [12, 12, 8 + steps, 12] and charges(without) == [12, 12, 8, 12]
    (sentence,) = lost.losses
    assert sentence.startswith("round 1: client 2 is lost")
    assert 2 not in lost.rounds[1].messages
    if steps == 0:  # it has drawn no noise either, so that its next round is the same
        assert torch.equal(parameters(lost), parameters(without))


def test_a_lost_client_continues_with_fresh_noise():
    """Its states are taken back, and its stream of noise is not: two releases never share noise."""
    run = federated(fed_avg(**NOISY), schedule=replace(EVERYBODY, lost={(0, 2): 4}), lr=1e-6)
    whole = federated(fed_avg(**NOISY), schedule=EVERYBODY, lr=1e-6)
    # Without learning, rounds differ in their noise and batches alone, and those of the same round are the same.
    torch.testing.assert_close(
        run.rounds[1].messages[2].tensors["values"],
        whole.rounds[1].messages[2].tensors["values"], rtol=0, atol=1e-7,
    )  # fmt: skip


class Broken(Follow):
    """Sends infinity from the client of eleven records in round 1."""

    def begin(self, state, round, noisy, size):
        return size

    def correct(self, state, round, point, update):
        return update * float("inf") if round.number == 1 and state == 11 else update


def test_a_client_that_sends_infinity_is_named_and_counts_as_lost():
    method = Federated(client=CLIENTS["dp_sgd"], rule=Broken())
    shards = [SHARDS[0], tuple(part[:11] for part in SHARDS[1]), *SHARDS[2:]]
    run = federated(method, shards=shards, schedule=RoundSchedule(((0, 2, 3), (0, 1, 2, 3), (0, 2, 3))))
    assert run.losses == ("round 1: client 1 sends non-finite numbers",)
    assert charges(run) == [12, 4, 12, 12]
    without = federated(method, shards=shards, schedule=RoundSchedule(((0, 2, 3),) * 3))
    assert torch.equal(parameters(run), parameters(without))
    assert torch.isfinite(parameters(run)).all()


def test_records_that_are_nan_count_for_nothing():
    inputs = SHARDS[1][0].clone()
    inputs[3] = torch.nan
    run = federated(fed_avg(**NOISY), shards=[SHARDS[0], (inputs, SHARDS[1][1]), *SHARDS[2:]])
    assert run.losses == () and torch.isfinite(parameters(run)).all()


def test_a_round_without_replies_leaves_the_model():
    run = federated(fed_avg(**NOISY), schedule=RoundSchedule(((0,), (), (1,)), {(2, 1): 3}))
    assert torch.equal(run.rounds[1].parameters, run.rounds[2].parameters)
    assert torch.equal(run.rounds[2].parameters, parameters(run))
    assert charges(run) == [4, 3, 0, 0]


def test_clients_without_data_are_named_never_scheduled_and_prove_zero():
    shards = [SHARDS[0], None, (SHARDS[2][0][:0], SHARDS[2][1][:0]), SHARDS[3]]
    run = federated(fed_avg(**NOISY), shards=shards)
    assert run.empty == (1, 2)
    assert all({1, 2}.isdisjoint(record.clients) for record in run.rounds)
    assert [claim.epsilon for claim in run.claims(1e-5)][1:3] == [0.0, 0.0]
    assert run.losses[0] == "client 1 has no data and is never scheduled"
    with pytest.raises(ValueError, match="at least one client must have data, got none of 2"):
        federated(fed_avg(**NOISY), shards=[None, None])
    with pytest.raises(ValueError, match="round 0 of the schedule must have distinct clients with data, got 0, 1"):
        federated(fed_avg(**NOISY), shards=shards, schedule=RoundSchedule(((0, 1),) * 3))


def test_a_client_of_one_record_and_one_class_trains_on_empty_batches_too():
    shards = [(DATA[0][:1], DATA[1][:1]), SHARDS[1]]
    run = federated(fed_avg(**NOISY), shards=shards, sampling=poisson(0.05))
    assert charges(run) == [12, 12]  # an empty batch is a step, with noise
    values = run.rounds[0].messages[0].tensors["values"]
    assert values.norm() > 0 and torch.isfinite(values).all()


def test_small_clients_have_more_noise_at_one_rate_and_more_epsilon_at_one_batch():
    shards = [(DATA[0][:4], DATA[1][:4]), (DATA[0][4:], DATA[1][4:])]
    rate = federated(fed_avg(**NOISY), shards=shards)
    batch = federated(fed_avg(**NOISY), shards=shards, federation=replace(FEDERATION, equal="batch"))
    assert len({claim.epsilon for claim in rate.claims(1e-5)}) == 1
    small, large = batch.claims(1e-5)
    # 12 examples on average at a rate of 0.4: a batch of 4.8, more than the small client has.
    assert (small.sample_rate, large.sample_rate) == (1.0, pytest.approx(0.24))
    assert small.epsilon > large.epsilon and batch.worst == 0


@pytest.mark.long
def test_noise_of_the_mean_follows_the_sizes():
    """(lr sigma C)^2 tau / m^2 times the sum of 1 / (q n_i)^2: the smallest client dominates."""
    zeros = [(torch.zeros(n, 6), torch.zeros(n, dtype=torch.int64)) for n in (4, 10)]
    method = fed_avg(clip_norm=1e-4, noise_multiplier=1e4)
    steps = [
        federated(method, shards=zeros, sampling=full(), key=key, schedule=RoundSchedule(((0, 1),) * 3))
        for key in range(40)
    ]
    moved = torch.stack([run.rounds[1].parameters - run.rounds[0].parameters for run in steps])
    expected = 0.3**2 * 4 / 4 * (1 / 4**2 + 1 / 10**2)
    assert moved.var() == pytest.approx(expected, rel=0.15)  # 1,720 numbers: 0.15 are 4.4 deviations


def test_a_run_is_a_function_of_its_keys_and_ends_in_evaluation_mode():
    first, again = (federated(fed_avg(**NOISY)) for _ in range(2))
    assert torch.equal(parameters(first), parameters(again))
    assert not torch.equal(parameters(first), parameters(federated(fed_avg(**NOISY), key=8)))
    assert not first.model.training and first.noise == "seeded" and first.key_given
    assert "key=7" not in repr(first)


def test_without_a_key_noise_is_the_operating_systems_and_exact_noise_is_offered():
    run = federated(fed_avg(**NOISY), key=None)
    assert run.noise == "os" and not run.key_given
    exact = federated(fed_avg(**NOISY), key=None, exact=True)
    assert exact.noise == "secure" and all(entry.exact for ledger in exact.ledgers for entry in ledger.entries)
    assert "discrete Gaussian" in exact.claim(1e-5).events[0]
    assert federated(Federated(client=sgd())).noise == "none"


def test_every_client_has_its_own_noise_and_its_own_batches():
    zeros = [(torch.zeros(12, 6), torch.zeros(12, dtype=torch.int64))] * 2
    run = federated(fed_avg(clip_norm=1e-6, noise_multiplier=1e6), shards=zeros)
    first, second = (run.rounds[0].messages[client].tensors["values"] for client in (0, 1))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.6  # of 43 numbers
    assert own_sampler_key(7, 0) != own_sampler_key(7, 1) != own_sampler_key(8, 1)


def test_dropout_in_the_network_and_views_are_drawn_as_in_central_training():
    def of_dropout():
        plain = network()
        return nn.Sequential(plain[0], plain[1], nn.Dropout(0.4), plain[2])

    settings = {"sampling": poisson(0.4), "lr": 0.3, "seed": 2}
    one = federate(of_dropout(), [DATA], fed_avg(**NOISY), federation=FEDERATION, schedule=ALONE, key=7, **settings)
    central = train(
        of_dropout(), DATA, CLIENTS["dp_sgd"], steps=12, noise=own_noise(7, 0, "seeded"),
        sampler_key=own_sampler_key(7, 0), **settings,
    )  # fmt: skip
    layout = Layout.of(one.model)
    torch.testing.assert_close(layout.read(one.model), layout.read(central.model), rtol=0, atol=1e-6)


def test_public_gradients_are_computed_once_a_round():
    reads = []
    method = fed_pcdp(rank=3, **NOISY)
    original = Engine.batch

    def counted(self, *arguments, **keywords):
        reads.append(1)
        return original(self, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "batch", counted)
        run = federated(method)
    assert len(reads) == FEDERATION.rounds
    codecs = {id(plan.plan.blocks[0].codec) for plans in run.rounds[1].plans.values() for plan in plans}
    assert len(codecs) == 1
    assert run.public_used


@subtests(
    ("settings", "words"),
    [
        ({"method": fed_avg()}, "noise_multiplier of 'dp_sgd' must be set"),
        ({"federation": Federation(rounds=3, local_steps=3), "sampling": shuffle(0.25)}, "whole epochs of 4 steps"),
        ({"federation": Federation(rounds=3, local_steps=3), "sampling": cyclic(0.1, groups=2)}, "epochs of 2 steps"),
        ({"recipe": Recipe(average=0.9)}, "no average and no statistics"),
        ({"public": SHARDS[2]}, "public examples must be none of the private ones"),
        ({"schedule": ALONE, "federation": Federation(rounds=2)}, "schedule must have 2 rounds, got 3"),
        ({"exact": True, "execution": Execution(engine="layerwise")}, "engine must be 'auto' or 'one_by_one'"),
        ({"method": Federated(client=dp_ftrl(tree_per_epoch=False, **NOISY)), **HALF}, "a stream of 12"),
        ({"sampling": truncated_poisson(0.4, most=6, examples=13)}, "truncated_poisson must be of the examples"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_released(settings, words):
    method = settings.pop("method", fed_avg(**NOISY))
    with pytest.raises(ValueError, match=words):
        federated(method, **settings)


def test_samplers_that_deal_epochs_run_where_a_round_is_whole_epochs():
    run = federated(fed_avg(**NOISY), sampling=shuffle(0.5))
    claim = run.claim(1e-5)
    assert claim.relation == "zero_out"
    assert sum(event.count for event in claim.gaussians or ()) == 6  # two epochs a round, each charged once


def test_a_model_with_spectral_norm_is_refused():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    with pytest.raises(ValueError, match="no spectral norm"):
        federate(model, SHARDS, fed_avg(**NOISY), federation=FEDERATION, sampling=poisson(0.4))


def test_removing_a_record_moves_its_clients_sum_by_at_most_the_bound_and_no_other_client():
    """Undivided and unscheduled: one local step on all records, a divisor that does not follow from their number."""
    settings = {
        "sampling": full(), "federation": Federation(rounds=2, local_steps=1, participation=1.0),
        "recipe": Recipe(nominal_size=12), "schedule": RoundSchedule(((0, 1, 2, 3),) * 2),
    }  # fmt: skip
    method = Federated(client=clipped_sgd(clip_norm=0.05))
    whole = federated(method, **settings)
    for record in range(0, 12, 4):
        kept = torch.arange(12) != record
        less = federated(method, shards=[SHARDS[0], tuple(part[kept] for part in SHARDS[1]), *SHARDS[2:]], **settings)
        for client in range(4):
            before, after = (run.rounds[0].messages[client].tensors["values"] for run in (whole, less))
            moved = float((before - after).norm()) * 12 / 0.3
            assert 0.01 < moved <= 0.05 * (1 + 1e-4) if client == 1 else moved == 0.0


def test_predictions_equal_the_ledgers_of_a_run_with_losses():
    federation = Federation(rounds=5, local_steps=4, participation=0.6, dropout=0.4)
    for name in ("dp_sgd", "dp_snip", "dpsur", "pcdp"):
        run = federated(Federated(client=CLIENTS[name]), federation=federation)
        predicted = predict_federated(
            run.method, [12] * 4, federation=federation, sampling=poisson(0.4), schedule=run.schedule
        )
        assert [ledger.entries for ledger in predicted] == [ledger.entries for ledger in run.ledgers]


def test_an_unspanned_optimizer_sends_everything_or_is_refused():
    adam = Recipe(optimizer="adam")
    run = federated(Federated(client=CLIENTS["pcdp"]), recipe=adam)
    assert {*run.rounds[0].kinds.values()} == {"dense"}
    with pytest.raises(ValueError, match="optimizer or client rule add other directions"):
        federated(Federated(client=CLIENTS["pcdp"], messages=Reachable(outside="refuse")), recipe=adam)
