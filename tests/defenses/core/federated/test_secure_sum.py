"""Secure aggregation as a view: noise in shares, claims of the least honest shares, aborted rounds, what is shown."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant

from leakbench.defenses.adaptive_clipping import adaptive_clipping
from leakbench.defenses.core import (
    Block,
    Defense,
    Everything,
    Execution,
    Federated,
    Federation,
    LargestEntries,
    PrivateAverage,
    Recipe,
    RoundSchedule,
    Stateless,
    StepPlan,
    StrategyRow,
    Tree,
    calibrate_federated,
    clip,
    draw_schedule,
    full,
    poisson,
    predict_federated,
)
from leakbench.defenses.core.federated import rounds, secure_sum
from leakbench.defenses.core.federated.federated_settings import FederatedSettings
from leakbench.defenses.core.federated.secure_sum import NoiseShares, added
from leakbench.defenses.core.plan.defense import NoisyPlan
from leakbench.defenses.core.randomness.noise import secure, seeded
from leakbench.defenses.dp_fed_avg import dp_fed_avg
from leakbench.defenses.dp_ftrl import dp_ftrl
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.fed_lrs import fed_lrs
from leakbench.defenses.fed_pcdp import fed_pcdp
from leakbench.defenses.local_noise_filter import local_noise_filter
from leakbench.defenses.moon import moon
from leakbench.defenses.per_layer import per_layer
from leakbench.defenses.percentile_filter import percentile_filter
from leakbench.defenses.pfa import pfa
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.ranked import ranked
from leakbench.defenses.scaffold import scaffold
from leakbench.defenses.sgd import sgd

from ....parameters import subtests
from ...duties import has_scale, network
from ...federated_runs import EVERYBODY, FEDERATION, SHARDS, Diverging, federated, parameters

DELTA = 1e-5
SUM: dict[str, Any] = {"aggregation": "sum", "least_honest": 3}
OF_SUM = replace(FEDERATION, **SUM)
HIDDEN = replace(FEDERATION, participation=0.5, participants="poisson", **SUM)


def of_server(defense):
    return Federated(client=sgd(), server=PrivateAverage(defense=defense))


SERVERS = {
    "dp_fed_avg": dp_fed_avg(update_norm=0.02, noise_multiplier=0.0),
    "per_layer": of_server(per_layer(clip_norm=0.02, noise_multiplier=0.0)),
    "adaptive_clipping": of_server(adaptive_clipping(clip_norm=0.02, noise_multiplier=0.0)),
    "random_sparsification": of_server(random_sparsification(clip_norm=0.02, noise_multiplier=0.0)),
}


@pytest.mark.long
@subtests("name", list(SERVERS))
def test_without_noise_the_sum_of_bounded_rows_is_the_trusted_servers(name):
    """Also with a client that is lost: it has no row, where the trusted server has one of 0 and its count."""
    schedule = EVERYBODY if name == "adaptive_clipping" else replace(EVERYBODY, lost={(1, 2): 2})
    shown = federated(SERVERS[name], schedule=schedule)
    summed = federated(SERVERS[name], federation=OF_SUM, schedule=schedule)
    torch.testing.assert_close(parameters(summed), parameters(shown), rtol=0, atol=1e-6)


def noise_of_the_sum(schedule=EVERYBODY, least=1, **settings: Any):
    """Moves of the model by noise alone, over its standard deviation z S / (rho K): 20 runs of updates that are 0."""
    method = dp_fed_avg(update_norm=1e-6, noise_multiplier=1e6)
    federation = replace(FEDERATION, aggregation="sum", least_honest=least, **settings)
    moves = []
    for key in range(20):
        run = federated(method, schedule=schedule, federation=federation, key=key, lr=1e-9)
        moves.append((run.rounds[1].parameters - run.rounds[0].parameters) * 4)
    return torch.stack(moves)


def share_of_m():
    """Returns whether a round in which one of four clients replies has noise of standard deviation z S sqrt(1/4)."""
    moves = noise_of_the_sum(replace(EVERYBODY, lost={(0, 1): 2, (0, 2): 0, (0, 3): 4}))
    return has_scale(moves, 0.5)


@pytest.mark.long
def test_the_noise_of_all_shares_is_the_servers_and_a_lost_client_takes_its_own_away():
    assert has_scale(noise_of_the_sum(), 1.0)
    assert share_of_m()


@pytest.mark.long
def test_shares_over_the_replies_that_came_are_found(monkeypatch):
    """A share of variance z^2 S^2 where one client replies: it would have to know who is lost when it sends."""
    monkeypatch.setattr(NoiseShares, "of_client", lambda self, plan: plan)
    assert not share_of_m()


def is_charged_at_the_least_honest_shares():
    """Returns whether the claim is that of an independent composition at z sqrt(h / m)."""
    run = federated(dp_fed_avg(noise_multiplier=2.0), federation=OF_SUM, schedule=EVERYBODY)
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(2.0 * math.sqrt(3 / 4)), 3)
    claim = run.claim(DELTA)
    assert (claim.unit, claim.relation) == ("client", "zero_out")
    return claim.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)


def test_the_claim_is_at_z_sqrt_h_over_m_and_a_claim_at_z_is_found(monkeypatch):
    assert is_charged_at_the_least_honest_shares()
    monkeypatch.setattr(NoiseShares, "claimed", lambda self, plan: plan)
    assert not is_charged_at_the_least_honest_shares()


@pytest.mark.long
def test_golden_f_of_80_honest_clients_of_100():
    """One hundred rounds in which two of a hundred clients are sampled, and nobody sees which."""
    federation = Federation(
        rounds=100, participation=0.02, participants="poisson", aggregation="sum", least_honest=80, colluders=20
    )
    known = {"federation": federation, "sampling": full(), "schedule": RoundSchedule(((0,),) * 100)}
    ledgers = predict_federated(dp_fed_avg(noise_multiplier=1.0), [1] * 100, **known)
    claim = ledgers[0].claim(1e-4, unit="client")
    assert claim.epsilon == pytest.approx(1.4636, abs=1e-4)
    assert claim.epsilon_rdp == pytest.approx(1.9509, abs=1e-4)


def noise_is_claimed_of_opened_sums(schedule):
    """Returns whether every opened sum is of as many messages as its claim counts on."""
    federation = replace(OF_SUM, colluders=1, least_honest=2)
    run = federated(dp_fed_avg(noise_multiplier=1.0), federation=federation, schedule=schedule)
    for number, record in enumerate(run.rounds):
        after = run.rounds[number + 1].parameters if number + 1 < len(run.rounds) else parameters(run)
        came = len(record.clients) - len(record.missing)
        if not torch.equal(after, record.parameters) and came < 3:
            return False
    return True


def test_a_round_of_too_few_is_aborted_and_opened_ones_are_found(monkeypatch):
    schedule = replace(EVERYBODY, lost={(1, 2): 4, (1, 3): 0})
    run = federated(dp_fed_avg(noise_multiplier=1.0), federation=OF_SUM, schedule=schedule)
    first, second, third = run.rounds
    assert torch.equal(second.parameters, third.parameters) and second.total is None
    assert not torch.equal(first.parameters, second.parameters) and first.total is not None
    assert run.losses[-1] == "round 1: is aborted, with 2 messages of at least 3"
    # Charged: a client cannot know, when it sends, whether others will.
    assert [sum(entry.steps for entry in ledger.entries) for ledger in run.ledgers] == [3] * 4
    assert noise_is_claimed_of_opened_sums(schedule)
    monkeypatch.setattr(rounds.OngoingFederation, "refuse_too_few", lambda self, outcome: None)
    assert not noise_is_claimed_of_opened_sums(schedule)


def test_clients_who_may_collude_do_not_count_as_honest_survivors():
    """One of four clients may reveal its noise: three messages may be of two honest ones."""
    federation = replace(OF_SUM, least_honest=3, colluders=1)
    schedule = replace(EVERYBODY, lost={(0, 1): 0})
    run = federated(dp_fed_avg(noise_multiplier=1.0), federation=federation, schedule=schedule)
    assert run.rounds[0].aborted == "is aborted, with 3 messages of at least 4"
    assert not run.rounds[1].aborted
    assert any("1 at most share their noise" in sentence for sentence in run.claim(DELTA).assumes)


def test_an_aborted_round_leaves_the_states_of_clients_and_server():
    lost = replace(EVERYBODY, lost={(0, 2): 0, (0, 3): 0})
    method = scaffold(noise_multiplier=1.3)
    run = federated(method, federation=OF_SUM, schedule=lost)
    assert run.rounds[0].aborted and torch.equal(run.rounds[0].parameters, run.rounds[1].parameters)
    assert sum(entry.steps for entry in run.ledgers[0].entries) == 12 and run.ledgers[2].steps == 8
    adaptive = federated(SERVERS["adaptive_clipping"], federation=OF_SUM, schedule=lost)
    later = federated(
        SERVERS["adaptive_clipping"], federation=OF_SUM, schedule=RoundSchedule(((0, 1), (0, 1, 2, 3), (0, 1, 2, 3)))
    )
    assert torch.equal(parameters(adaptive), parameters(later))


def test_a_round_without_senders_is_aborted():
    run = federated(
        dp_fed_avg(noise_multiplier=1.0), federation=OF_SUM, schedule=RoundSchedule(((0, 1, 2), (), (0, 1, 2)))
    )
    assert [bool(record.aborted) for record in run.rounds] == [False, True, False]


class LaterInAStream(Stateless):
    """Independent noise in the first rounds, which a dry run takes, and then a stream of correlated noise."""

    def plan(self, context):
        block = Block(codec=Everything(context.dim), bound=clip(0.02))
        if context.step < 5:
            return StepPlan(block)
        return StepPlan(block, correlated=StrategyRow(Tree(4), context.step - 5))


def test_a_stream_that_begins_in_a_later_round_is_refused_before_a_share_is_sent():
    """Each share would be independent of those before, and the ledger would charge a stream."""
    federation = replace(OF_SUM, rounds=7)
    schedule = RoundSchedule(((0, 1, 2, 3),) * 7)
    method = of_server(Defense(LaterInAStream(), noise_multiplier=1.0))
    words = "noise in shares must be independent from round to round, got a plan of a stream"
    with pytest.raises(ValueError, match=words):
        federated(method, federation=federation, schedule=schedule)
    with pytest.raises(ValueError, match=words):
        predict_federated(method, [12] * 4, federation=federation, sampling=poisson(0.4), schedule=schedule)


# --- participants that nobody sees


def test_all_clients_send_messages_of_equal_form_where_participants_are_secret():
    run = federated(dp_fed_avg(noise_multiplier=1.0), federation=HIDDEN)
    assert {len(clients) for clients in run.schedule.rounds} - {4}  # some are not sampled
    for record in run.rounds:
        assert record.clients == (0, 1, 2, 3) and not record.missing and not record.messages and not record.plans
        assert len({*record.bytes_up.values()}) == len({*record.bytes_down.values()}) == 1
        assert {*record.kinds.values()} == {"shares"}


def test_a_round_in_which_nobody_is_sampled_is_noise_of_full_scale():
    federation = replace(HIDDEN, participation=1e-6)
    method = dp_fed_avg(update_norm=1e-6, noise_multiplier=1e6)
    moves = []
    for key in range(20):
        run = federated(method, federation=federation, key=key)
        assert run.schedule.rounds == ((), (), ())
        moves.append((run.rounds[1].parameters - run.rounds[0].parameters) * 4e-6)
    assert has_scale(torch.stack(moves), 1.0)


@pytest.mark.long
def test_whether_a_client_is_sampled_decides_neither_an_abort_nor_who_is_lost():
    """Under neighbours that differ in what a client sends, the public part of every round is the same."""
    federation = replace(HIDDEN, dropout=0.4, rounds=40)
    drawn = [draw_schedule(federation, range(4), seed=3, key=key) for key in range(2)]
    assert drawn[0].rounds != drawn[1].rounds and drawn[0].lost.keys() == drawn[1].lost.keys()
    runs = [federated(dp_fed_avg(noise_multiplier=1.0), federation=federation, key=key) for key in range(2)]
    public = [
        [(record.clients, dict(record.missing), record.aborted, dict(record.bytes_up)) for record in run.rounds]
        for run in runs
    ]
    assert public[0] == public[1] and any(missing for _, missing, _, _ in public[0])
    assert any(aborted for _, _, aborted, _ in public[0])
    assert all(reason == "is lost" for _, missing, _, _ in public[0] for reason in missing.values())


def test_a_secret_sample_amplifies_at_the_noise_of_the_least_honest_shares():
    run = federated(dp_fed_avg(noise_multiplier=2.0), federation=HIDDEN)
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(2.0 * math.sqrt(3 / 4)))
    accountant.compose(event, 3)
    claim = run.claim(DELTA)
    assert claim.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
    # Not add/remove: without the client, its share of the noise would be missing, too.
    assert claim.relation == "zero_out"


def test_a_client_that_is_not_sampled_has_no_row_in_any_block():
    """Not even in the count of an adaptive clip norm, where a row of 0 and a long row differ by twice the bound."""
    plan = adaptive_clipping(clip_norm=0.5, noise_multiplier=1.0)
    at = plan.plan(plan.start(_context()), _context())[1].at(0.0)
    assert len(at.plan.blocks) == 2
    message = NoiseShares(4, 3).message(at, None, torch.ones(7), seeded(1))
    assert all(not part.any() for part in message.tensors.values())


# --- rows and whole numbers


def test_an_update_that_is_not_finite_is_a_share_of_noise_on_zero_and_no_loss():
    shards = [SHARDS[0], tuple(part[:11] for part in SHARDS[1]), *SHARDS[2:]]
    method = replace(dp_fed_avg(update_norm=0.02, noise_multiplier=0.0), rule=Diverging())
    run = federated(method, shards=shards, federation=OF_SUM, schedule=RoundSchedule(((0, 1, 2, 3), (0, 2), (0, 2))))
    without = federated(method, shards=shards, schedule=RoundSchedule(((0, 2, 3), (), ())))
    assert not run.rounds[0].missing  # which would tell the server of the client's data
    torch.testing.assert_close(run.rounds[1].parameters, without.rounds[1].parameters, rtol=0, atol=1e-7)


def test_removing_a_client_moves_the_opened_sum_by_at_most_the_update_norm():
    method = dp_fed_avg(update_norm=0.02, noise_multiplier=0.0)
    federation = replace(OF_SUM, least_honest=1)
    whole = federated(method, federation=federation, schedule=EVERYBODY)
    for client in range(4):
        members = tuple(other for other in range(4) if other != client)
        less = federated(method, federation=federation, schedule=RoundSchedule((members, (0,), (0,))))
        moved = (whole.rounds[1].parameters - less.rounds[1].parameters).norm() * 4
        assert 0.01 < moved <= 0.02 * (1 + 1e-4)


@subtests("kind, width", [("seeded", 4), ("secure", 8)])
def test_messages_are_whole_numbers_of_a_public_unit_and_their_sum_is_exact(kind, width):
    noise = seeded(1) if kind == "seeded" else secure()
    plan = dp_sgd(clip_norm=0.5, noise_multiplier=1.0).plan(None, _context())[1].at(1.0)
    shares = NoiseShares(clients=4, least=3)
    draw = torch.Generator().manual_seed(3)
    deltas = [torch.randn(7, generator=draw) for _ in range(4)]
    messages = [shares.message(plan, delta, deltas[0], noise) for delta in deltas]
    assert all(message.bytes == 7 * width for message in messages)
    total = added(messages)
    by_python = [sum(int(m.tensors["block0"][i]) for m in messages) for i in range(7)]
    assert total.tensors["block0"].tolist() == by_python
    unit = noise.unit(0.5 / 2)
    released = shares.opened(plan, total, deltas[0], noise).total.double()
    torch.testing.assert_close(released, torch.tensor(by_python, dtype=torch.float64) * unit, rtol=1e-6, atol=0)


def _context():
    from leakbench.defenses.core import Context, Layout

    return Context(step=0, steps=1, layout=Layout(("w",), ((7,),)), expected_batch=4.0)


def test_little_noise_or_many_clients_take_64_bits():
    noise = seeded(1)
    little: NoisyPlan = dp_sgd(clip_norm=0.5, noise_multiplier=1.0).plan(None, _context())[1].at(1e-4)
    message = NoiseShares(4, 3).message(little, torch.ones(7), torch.ones(7), noise)
    assert message.tensors["block0"].dtype == torch.int64
    assert NoiseShares(10**6, 10).message(
        little.plan.at(1.0), torch.ones(7), torch.ones(7), noise
    ).tensors["block0"].dtype == torch.int64  # fmt: skip


def test_exact_noise_in_shares_is_charged_as_a_discrete_gaussian_of_the_least_honest_shares():
    run = federated(dp_fed_avg(noise_multiplier=2.0), federation=OF_SUM, schedule=EVERYBODY, exact=True, key=None)
    assert run.noise == "secure" and all(entry.exact for entry in run.ledgers[0].entries)
    assert {*run.rounds[0].bytes_up.values()} == {43 * 8}
    like = federated(dp_fed_avg(noise_multiplier=2.0), federation=OF_SUM, schedule=EVERYBODY)
    assert run.claim(DELTA).epsilon == pytest.approx(like.claim(DELTA).epsilon, rel=1e-6)


# --- predictions and calibration


@pytest.mark.long
@subtests("participants", ["fixed", "poisson", "partition"])
def test_predictions_and_calibrations_are_of_the_noise_that_claims_count_on(participants):
    federation = replace(
        FEDERATION, participation=0.5, participants=participants, aggregation="sum", least_honest=1, colluders=1
    )
    schedule = None if participants == "poisson" else draw_schedule(federation, range(4), seed=2, key=2)
    drawn = schedule or draw_schedule(federation, range(4), seed=2, key=2)
    known: dict[str, Any] = {"federation": federation, "sampling": poisson(0.4), "schedule": drawn}
    method = calibrate_federated(dp_fed_avg(), [12] * 4, epsilon=3.0, delta=DELTA, **known)
    ledgers = predict_federated(method, [12] * 4, **known)
    assert 2.97 < max(ledger.claim(DELTA).epsilon for ledger in ledgers) <= 3.0
    run = federated(method, federation=federation, schedule=schedule)
    assert [ledger.entries for ledger in run.ledgers] == [ledger.entries for ledger in ledgers]
    shown = replace(federation, aggregation="messages", least_honest=None, colluders=None)
    of_messages: dict[str, Any] = known | {"federation": shown}
    trusted = calibrate_federated(dp_fed_avg(), [12] * 4, epsilon=3.0, delta=DELTA, **of_messages)
    senders = 4 if participants == "poisson" else 2
    ratio = (method.noise_multiplier or 0.0) / (trusted.noise_multiplier or 1.0)
    assert ratio == pytest.approx(math.sqrt(senders), rel=1e-9)


# --- the view where clients' messages are releases


VIEWS = {
    "fed_avg": fed_avg(noise_multiplier=1.3),
    "by size": fed_avg(noise_multiplier=1.3),
    "scaffold": scaffold(noise_multiplier=1.3),
    "moon": moon(noise_multiplier=1.3),
    "fed_pcdp": fed_pcdp(rank=3, noise_multiplier=1.3),
    "pfa": pfa(rank=3, noise_multiplier=1.3),
    "masks": Federated(client=random_sparsification(final_sparsity=0.8, noise_multiplier=1.3)),
    "masks of its own": Federated(client=ranked(final_sparsity=0.5, noise_multiplier=1.3)),
    "fed_lrs without sparsity": fed_lrs(sparsity=0.0, noise_multiplier=1.3),
    "local_noise_filter": local_noise_filter(),
}


@pytest.mark.long
@subtests("name", list(VIEWS))
def test_a_view_changes_no_claim_and_no_model_and_shows_no_message(name):
    settings: dict[str, Any] = {"weights": "size"} if name == "by size" else {}
    shards = [SHARDS[0], tuple(part[:5] for part in SHARDS[1]), *SHARDS[2:]]
    schedule = replace(EVERYBODY, lost={(1, 2): 2})
    shown = federated(VIEWS[name], shards=shards, schedule=schedule, federation=replace(FEDERATION, **settings))
    view = replace(FEDERATION, aggregation="sum", **settings)
    run = federated(VIEWS[name], shards=shards, schedule=schedule, federation=view)
    torch.testing.assert_close(parameters(run), parameters(shown), rtol=1e-5, atol=2e-6)
    assert [ledger.entries for ledger in run.ledgers] == [ledger.entries for ledger in shown.ledgers]
    assert [claim.epsilon for claim in run.claims(DELTA)] == [claim.epsilon for claim in shown.claims(DELTA)]
    assert all(not (record.messages or record.plans) and record.total is not None for record in run.rounds)
    assert not run.federation.shows_messages and shown.federation.shows_messages
    kinds = {kind for record in run.rounds for kind in record.kinds.values()}
    assert kinds <= {"dense", "values", "coefficients"}


def observed(aggregation):
    """Clients whose replies an observer of the loop gets, a list a round."""
    clients: list[list[int]] = []
    settings = FederatedSettings(
        method=fed_avg(noise_multiplier=1.3), federation=replace(FEDERATION, aggregation=aggregation),
        sampling=poisson(0.4), lr=0.3, seed=2, key=7, exact=False,
        schedule=replace(EVERYBODY, lost={(0, 2): 1}), recipe=Recipe(), execution=Execution(),
        keep_messages=True, progress=None, observe=lambda deltas, weights: clients.append([*deltas]),
    )  # fmt: skip
    rounds.OngoingFederation(network(), SHARDS, None, settings).run()
    return clients


def test_replies_are_observed_before_each_average_and_never_under_a_sum():
    assert observed("messages") == [[0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert observed("sum") == []


def test_a_sum_of_one_message_is_not_opened():
    alone = replace(EVERYBODY, lost={(0, client): 0 for client in (1, 2, 3)})
    run = federated(fed_avg(noise_multiplier=1.3), federation=replace(FEDERATION, aggregation="sum"), schedule=alone)
    assert run.rounds[0].aborted == "is aborted, with 1 messages of at least 2"
    assert run.ledgers[0].steps == 12


def test_messages_of_several_forms_have_no_sum():
    one, other = (secure_sum.Message(kind, {"values": torch.ones(3)}) for kind in ("dense", "coefficients"))
    with pytest.raises(ValueError, match="public positions, got kind coefficients and dense"):
        added([one, other])
    with pytest.raises(ValueError, match="public positions, got kind indexed"):
        added([secure_sum.Message("indexed", {"values": torch.ones(3)})])


@subtests(
    "method, changes, words",
    [
        (dp_fed_avg(noise_multiplier=1.0), {"least_honest": None}, "least_honest must be set for aggregation 'sum'"),
        (
            dp_fed_avg(noise_multiplier=1.0),
            {"least_honest": 5},
            "at most the 4 clients that send in a round, got 5",
        ),
        (
            dp_fed_avg(noise_multiplier=1.0),
            {"least_honest": 3, "participation": 0.5},
            "at most the 2 clients that send in a round, got 3",
        ),
        (fed_avg(noise_multiplier=1.0), {"least_honest": 4, "colluders": 1}, "at most the 4 clients that send"),
        (fed_avg(noise_multiplier=1.0), {"participation": 0.25}, "at most the 1 clients that send in a round, got 2"),
        (
            of_server(dp_ftrl(noise_multiplier=1.0)),
            {"participants": "partition"},
            "aggregation must be 'messages', got 'sum', in which a lost client",
        ),
        (fed_lrs(noise_multiplier=1.0), {}, "got 'sum': its messages have positions of their own"),
        (percentile_filter(), {}, "got 'sum': its codec, PercentileMessages, must say by `adds` that a sum"),
        (scaffold(stored=True, noise_multiplier=1.0), {}, "got 'sum': its server reads each client's message"),
        (
            pfa(variant="full", rank=2, budgets=(1.0, 2.0, 2.0, 1.0)),
            {},
            "got 'sum': its server reads each client's message",
        ),
    ],
)
def test_what_does_not_fit_a_sum_is_refused_by_runs_and_predictions(method, changes, words):
    changes = {"least_honest": 2} | changes
    if "participation" in changes and method.noise_place != "server":
        changes = changes | {"least_honest": None}
    federation = replace(FEDERATION, aggregation="sum", **changes)
    with pytest.raises(ValueError, match=words):
        federated(method, federation=federation)
    known = {"federation": federation, "sampling": poisson(0.4), "schedule": RoundSchedule(((0,), (1,), (2,)))}
    with pytest.raises(ValueError, match=words):
        predict_federated(method, [12] * 4, **known)


def test_keys_of_a_sum_go_with_it():
    for key in ("least_honest", "colluders"):
        with pytest.raises(ValueError, match=f"{key} must be None with aggregation 'messages', got 2"):
            replace(FEDERATION, **{key: 2})
    with pytest.raises(ValueError, match="least_honest must be at least 1, got 0"):
        Federation(rounds=1, aggregation="sum", least_honest=0)
    assert LargestEntries(sparsity=0.0).adds
