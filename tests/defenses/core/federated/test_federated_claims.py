"""Claims of federated runs: golden values, an independent composition by dp-accounting, and the units."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from leakbench.defenses.clipped_sgd import clipped_sgd
from leakbench.defenses.core import (
    Federated,
    Federation,
    Follow,
    PrivateAverage,
    Recipe,
    RoundSchedule,
    calibrate_federated,
    draw_schedule,
    fixed,
    full,
    partition,
    poisson,
    predict_federated,
)
from leakbench.defenses.dp_fed_avg import dp_fed_avg
from leakbench.defenses.dp_ftrl import dp_ftrl
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dpsur import dpsur
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.fed_pcdp import fed_pcdp
from leakbench.defenses.local_noise_filter import local_noise_filter
from leakbench.defenses.noisy_sgd import noisy_sgd
from leakbench.defenses.pfa import pfa
from leakbench.defenses.scaffold import scaffold
from leakbench.defenses.sgd import sgd

from ....parameters import subtests
from ...federated_runs import EVERYBODY, FEDERATION, SHARDS, federated

SAMPLED, WHOLE = dp_accounting.PoissonSampledDpEvent, dp_accounting.GaussianDpEvent


def every(rounds, clients=(0,)):
    return RoundSchedule((clients,) * rounds)


def predicted(method, sizes, federation, sampling, schedule, *, delta=1e-5, client=0):
    ledgers = predict_federated(method, sizes, federation=federation, sampling=sampling, schedule=schedule)
    return ledgers[client].claim(delta, unit=method.unit)


def of_fed_avg(sigma, rounds, local_steps, rate, **settings):
    federation = Federation(rounds=rounds, local_steps=local_steps)
    sampling = poisson(rate) if rate < 1 else full()
    return predicted(fed_avg(noise_multiplier=sigma), [5000], federation, sampling, every(rounds), **settings)


def in_some_of_fifty(rounds):
    schedule = RoundSchedule(((0, 1),) * rounds + ((1,),) * (50 - rounds))
    federation, method = Federation(rounds=50, local_steps=10), fed_avg(noise_multiplier=4.0)
    return predicted(method, [5000, 5000], federation, poisson(0.05), schedule)


def of_small_client():
    federation = Federation(rounds=40, local_steps=10, equal="batch")
    schedule = every(40, (0, 1))
    return predicted(fed_avg(noise_multiplier=6.0), [500, 9500], federation, poisson(0.05), schedule)


def of_clients(z, **settings):
    federation = Federation(**{"rounds": 100, "participation": 0.02} | settings)
    schedule = every(federation.rounds)
    return predicted(dp_fed_avg(noise_multiplier=z), [1] * 100, federation, full(), schedule, delta=1e-4)


def of_controls(z):
    method = scaffold(control="gradient", control_noise_multiplier=z, noise_multiplier=6.0)
    return predicted(method, [5000], Federation(rounds=40, local_steps=10), poisson(0.05), every(40))


GOLDEN = {
    "A 4": (lambda: of_fed_avg(4.0, 40, 10, 0.05), 0.9638, 1.0574),
    "A 6": (lambda: of_fed_avg(6.0, 40, 10, 0.05), 0.6078, 0.6682),
    "A 8": (lambda: of_fed_avg(8.0, 40, 10, 0.05), 0.4410, 0.4857),
    "A 10": (lambda: of_fed_avg(10.0, 40, 10, 0.05), 0.3445, 0.3800),
    "B 1": (lambda: in_some_of_fifty(1), 0.1437, 0.1669),
    "B 10": (lambda: in_some_of_fifty(10), 0.4618, 0.5116),
    "B 50": (lambda: in_some_of_fifty(50), 1.0868, 1.1904),
    "B 0": (lambda: in_some_of_fifty(0), 0.0, 0.0),
    "C": (lambda: of_fed_avg(20.0, 100, 1, 1.0), 1.9931, 2.1657),
    "D 75": (lambda: of_fed_avg(4.0, 15, 5, 0.2), 1.8013, 1.9736),
    "D 100": (lambda: of_fed_avg(4.0, 20, 5, 0.2), 2.1021, 2.2982),
    "D 10": (lambda: of_fed_avg(10.0, 15, 5, 0.2), 0.6321, 0.6950),
    "E": (of_small_client, 8.1003, 8.7811),
    "F": (lambda: of_clients(1.0, participants="poisson"), 1.0987, 1.4623),
    "F 80": (
        lambda: of_clients(1.0, participants="poisson", aggregation="sum", least_honest=80, colluders=20),
        1.4636,
        1.9509,
    ),
    "G": (lambda: of_clients(4.0, rounds=40), 6.6197, 7.2216),
    "H 6": (lambda: of_controls(6.0), 4.7214, 5.0975),
    "H 60": (lambda: of_controls(60.0), 0.7248, 0.7949),
}


@pytest.mark.long
@subtests("name", list(GOLDEN))
def test_the_specifications_table_is_met_to_four_digits(name):
    claim, by_pld, by_rdp = GOLDEN[name]
    found = claim()
    assert found.epsilon == pytest.approx(by_pld, abs=1e-4)
    assert found.epsilon_rdp == pytest.approx(by_rdp, abs=1e-4)
    assert found.unit == ("client" if name[0] in "FG" else "record")
    assert found.relation == ("zero_out" if name == "G" else "add_remove")


def independent(events, delta, accountant):
    """Epsilon of (event, count) pairs, composed by the library alone."""
    ledger = accountant()
    for event, count in events:
        if count:
            ledger.compose(event, count)
    return ledger.get_epsilon(delta) if any(count for _, count in events) else 0.0


@pytest.mark.long
def test_every_clients_epsilon_is_that_of_its_own_rounds_by_an_independent_composition():
    federation = Federation(rounds=7, local_steps=4, participation=0.5, dropout=0.3)
    run = federated(fed_avg(noise_multiplier=1.3), federation=federation)
    for client, claim in enumerate(run.claims(1e-5)):
        steps = sum(run.schedule.steps_of(client, number, 4) for number in run.schedule.rounds_of(client))
        events = [(SAMPLED(0.4, WHOLE(1.3)), steps)]
        assert claim.epsilon == pytest.approx(independent(events, 1e-5, PLDAccountant), rel=2e-3)
        # Orders of the library's own are coarser than ours, so that its bound is no smaller.
        assert claim.epsilon_rdp <= independent(events, 1e-5, RdpAccountant) * (1 + 1e-6)
    assert run.claim(1e-5).epsilon == max(claim.epsilon for claim in run.claims(1e-5))
    assert run.claims(1e-5)[run.worst].epsilon == run.claim(1e-5).epsilon


@pytest.mark.long
def test_option_one_of_scaffold_adds_a_gaussian_on_all_data_in_every_round_of_a_client():
    method = scaffold(control="gradient", control_noise_multiplier=5.0, noise_multiplier=1.3)
    schedule = RoundSchedule(((0, 1), (0,), (0, 2)))
    run = federated(method, schedule=schedule)
    for client, rounds in ((0, 3), (1, 1), (3, 0)):
        events = [(SAMPLED(0.4, WHOLE(1.3)), 4 * rounds), (WHOLE(5.0), rounds)]
        expected = independent(events, 1e-5, PLDAccountant)
        assert run.claims(1e-5)[client].epsilon == pytest.approx(expected, rel=2e-3)


@pytest.mark.long
def test_budgets_of_clients_are_charged_each_by_itself():
    run = federated(pfa(variant="full", rank=3, budgets=(0.8, 0.8, 3.0, 4.0)), schedule=EVERYBODY)
    for client, sigma in enumerate((0.8, 0.8, 3.0, 4.0)):
        expected = independent([(SAMPLED(0.4, WHOLE(sigma)), 12)], 1e-5, PLDAccountant)
        assert run.claims(1e-5)[client].epsilon == pytest.approx(expected, rel=2e-3)


@pytest.mark.long
@subtests(
    ("participants", "relation", "rounds"),
    [("poisson", "add_remove", None), ("fixed", "zero_out", 4), ("partition", "zero_out", 3)],
)
def test_a_client_as_the_unit_is_charged_by_the_participation_of_clients(participants, relation, rounds):
    federation = Federation(rounds=6, local_steps=2, participation=0.5, participants=participants)
    run = federated(dp_fed_avg(noise_multiplier=2.0), federation=federation)
    claims = run.claims(1e-5)
    assert {claim.unit for claim in claims} == {"client"} and {claim.relation for claim in claims} == {relation}
    for client, claim in enumerate(claims):
        events = [(SAMPLED(0.5, WHOLE(2.0)), 6)]
        if rounds is not None:
            own = len(run.schedule.rounds_of(client)) if participants == "fixed" else rounds
            events = [(WHOLE(2.0), own)]
        assert claim.epsilon == pytest.approx(independent(events, 1e-5, PLDAccountant), rel=2e-3)
    assert any(sentence.startswith("the server is trusted") for sentence in claims[0].assumes)


def test_noise_in_each_update_is_charged_under_replacement_of_all_of_a_clients_data():
    method = local_noise_filter(promised_epsilon=0.5)
    z = math.sqrt(2 * math.log(1.25e5)) / 0.5
    run = federated(method, schedule=RoundSchedule(((0, 1), (0, 1), (0,)), {(1, 1): 4}))
    for client, messages in ((0, 3), (1, 1), (2, 0)):
        claim = run.claims(1e-5)[client]
        expected = independent([(WHOLE(z / 2), messages)], 1e-5, PLDAccountant)
        assert claim.epsilon == pytest.approx(expected, rel=2e-3)
        assert (claim.unit, claim.relation) == ("client", "replace_one")


def test_weights_by_size_are_claimed_under_zero_out_and_a_nominal_size_keeps_sizes_private():
    method, by_size = fed_avg(noise_multiplier=1.3), replace(FEDERATION, weights="size")
    assert federated(method).claim(1e-5).relation == "add_remove"
    assert federated(method, federation=by_size).claim(1e-5).relation == "zero_out"
    nominal = federated(method, federation=by_size, recipe=Recipe(nominal_size=12))
    assert nominal.claim(1e-5).relation == "add_remove"
    assert not any("number of examples is public" in sentence for sentence in nominal.claim(1e-5).assumes)
    assert any("number of examples is public" in sentence for sentence in federated(method).claim(1e-5).assumes)
    for of_clients in (dp_fed_avg(noise_multiplier=1.0), local_noise_filter()):
        with pytest.raises(ValueError, match="weights must be 'uniform' where a client is the unit"):
            federated(of_clients, federation=by_size)


def test_the_size_of_a_client_that_is_the_unit_decides_no_rate_of_others():
    alike, method = replace(FEDERATION, equal="batch"), local_noise_filter()
    for of_clients in (dp_fed_avg(noise_multiplier=1.0), method):
        with pytest.raises(ValueError, match="equal must be 'rate' where a client is the unit, got 'batch'"):
            federated(of_clients, federation=alike)
    smaller = [*SHARDS[:3], tuple(part[:4] for part in SHARDS[3])]
    for settings in ({}, {"federation": alike, "recipe": Recipe(nominal_size=12)}):
        runs = [federated(method, shards=shards, **settings) for shards in (SHARDS, smaller)]
        first, other = ({c: m.tensors["values"] for c, m in run.rounds[0].messages.items()} for run in runs)
        assert first.keys() == other.keys()
        assert all(torch.equal(first[client], other[client]) for client in first if client != 3)


def test_a_nominal_size_hides_no_record_that_is_the_only_one_of_its_client():
    assumes = federated(fed_avg(noise_multiplier=1.3), recipe=Recipe(nominal_size=12)).claim(1e-5).assumes
    assert any("which clients have data is public" in sentence for sentence in assumes)


def test_a_trusted_server_keeps_participants_and_losses_to_itself():
    assumes = federated(dp_fed_avg(noise_multiplier=1.0)).claim(1e-5).assumes
    assert any("participants, losses and bytes of its rounds are not" in sentence for sentence in assumes)


def test_nothing_is_proved_where_local_steps_have_no_noise_or_no_bound():
    for client, reason in ((clipped_sgd(), "no noise"), (noisy_sgd(noise_multiplier=1.0), "bounded")):
        claim = federated(Federated(client=client)).claim(1e-5)
        assert math.isinf(claim.epsilon) and reason in claim.reason


def test_claims_say_what_they_assume_and_name_parts_that_are_not_ours():
    run = federated(fed_pcdp(rank=3, noise_multiplier=1.3), key=None)
    sentences = " ".join(run.claim(1e-5).assumes)
    for words in ("stays secret", "public examples are public", "those of one person at several clients compose"):
        assert words in sentences
    assert run.unverified == ()

    class Mine(Follow):
        pass

    own = federated(Federated(client=dp_sgd(noise_multiplier=1.0), rule=Mine()))
    assert own.remarks == ("unverified_rule",) and "rule" in own.claim(1e-5).unverified[0]


@pytest.mark.long
def test_noise_is_calibrated_to_the_client_with_the_most_rounds():
    federation = Federation(rounds=12, local_steps=5, participation=0.5)
    sizes = [40, 60, 80, 20, 0]
    schedule = draw_schedule(federation, [0, 1, 2, 3], seed=4, key=4)
    known = {"federation": federation, "sampling": poisson(0.1), "schedule": schedule}
    for equal in ("rate", "batch"):
        known["federation"] = replace(federation, equal=equal)
        method = calibrate_federated(fed_avg(), sizes, epsilon=2.0, delta=1e-5, **known)
        claims = [ledger.claim(1e-5) for ledger in predict_federated(method, sizes, **known)]
        worst = max(claim.epsilon for claim in claims)
        assert 1.98 < worst <= 2.0 and claims[4].epsilon == 0.0
    most = max(len(schedule.rounds_of(client)) for client in range(4))
    controls = scaffold(control="gradient", control_noise_multiplier=20.0)
    known["federation"] = federation
    method = calibrate_federated(controls, sizes, epsilon=2.0, delta=1e-5, **known)
    events = [(SAMPLED(0.1, WHOLE(method.noise_multiplier or 0.0)), 5 * most), (WHOLE(20.0), most)]
    assert 1.97 < independent(events, 1e-5, PLDAccountant) < 2.01


@pytest.mark.long
@subtests("participants", ["poisson", "fixed", "partition"])
def test_noise_of_a_server_is_calibrated_to_its_rounds(participants):
    federation = Federation(rounds=8, participation=0.25, participants=participants)
    schedule = draw_schedule(federation, list(range(8)), seed=1, key=1)
    known = {"federation": federation, "sampling": full(), "schedule": schedule}
    method = calibrate_federated(dp_fed_avg(), [5] * 8, epsilon=3.0, delta=1e-4, **known)
    worst = max(ledger.claim(1e-4).epsilon for ledger in predict_federated(method, [5] * 8, **known))
    assert 2.97 < worst <= 3.0
    limited = calibrate_federated(dp_fed_avg(), [5] * 8, advantage=0.2, **known)
    ledgers = predict_federated(limited, [5] * 8, **known)
    assert max(ledger.claim(1e-4).advantage for ledger in ledgers) == pytest.approx(0.2, abs=0.01)


def test_what_cannot_be_calibrated_is_refused():
    known = {"federation": Federation(rounds=2), "sampling": poisson(0.1), "epsilon": 1.0, "delta": 1e-5}
    with pytest.raises(ValueError, match="a client in some round, got none"):
        calibrate_federated(fed_avg(), [4], schedule=RoundSchedule(((), ())), **known)
    with pytest.raises(ValueError, match="budgets must be empty"):
        chosen = pfa(variant="full", budgets=(1.0, 2.0))
        calibrate_federated(chosen, [4, 4], schedule=every(2), **known)
    with pytest.raises(ValueError, match="proves no epsilon"):
        calibrate_federated(Federated(client=noisy_sgd()), [4], schedule=every(2), **known)


def test_predictions_refuse_what_a_run_refuses():
    noisy: dict[str, Any] = {"noise_multiplier": 1.0}
    of_server = Federated(client=sgd(), server=PrivateAverage(defense=dp_ftrl(**noisy)))
    missed = RoundSchedule(((0, 1, 2, 3), (0, 1, 2), (0, 1, 2, 3)))
    twice = RoundSchedule(((0, 1), (0, 1), (2, 3)))
    over_rounds = {"sampling": partition(0.5), "schedule": missed}
    half = replace(FEDERATION, participation=0.5, participants="partition")
    cases: list[tuple[Federated, dict[str, Any], str]] = [
        (Federated(client=dp_ftrl(tree_per_epoch=False, **noisy)), over_rounds, "must restart within a round of 4"),
        (of_server, {"schedule": missed}, "participants must be 'partition', got 'fixed'"),
        (dp_fed_avg(**noisy), {"federation": half, "schedule": twice}, "same round of every 2, got client 0"),
        (dp_fed_avg(**noisy), {"federation": replace(FEDERATION, weights="size")}, "weights must be 'uniform'"),
        (Federated(client=sgd(), server=PrivateAverage(defense=dpsur(**noisy))), {}, "a round has no trial"),
        (dp_fed_avg(**noisy), {"sampling": partition(0.2)}, "local_steps must be whole epochs of 5"),
    ]
    for method, settings, words in cases:
        usual: dict[str, Any] = {"federation": FEDERATION, "sampling": poisson(0.4), "schedule": EVERYBODY} | settings
        with pytest.raises(ValueError, match=words):
            predict_federated(method, [12] * 4, **usual)
        with pytest.raises(ValueError, match=words):
            federated(method, **usual)
    whole = {"federation": FEDERATION, "sampling": partition(0.5), "schedule": EVERYBODY}
    assert predict_federated(cases[0][0], [12] * 4, **whole)[0].steps == 12


def test_noise_is_in_one_part_of_a_method_alone():
    noisy = dp_sgd(noise_multiplier=1.0)
    places: Any = ({"server": PrivateAverage(defense=noisy)}, {"update": noisy})
    for both in places:
        with pytest.raises(ValueError, match="alone, got it in local steps and"):
            Federated(client=noisy, **both)
        with pytest.raises(ValueError, match="alone, got it in local steps and"):
            Federated(client=dp_sgd(), **both)
    with pytest.raises(ValueError, match="must be None with a private average, which bounds it itself"):
        Federated(client=sgd(), update=clipped_sgd(), server=PrivateAverage(defense=noisy))
    with pytest.raises(ValueError, match="budgets must be of clients with noise in their local steps"):
        Federated(client=sgd(), update=noisy, budgets=(1.0,))
    with pytest.raises(ValueError, match="budgets must be one for each of 4 clients, got 1"):
        federated(Federated(client=dp_sgd(), budgets=(1.0,)))
    for method in (Federated(client=noisy), dp_fed_avg(), local_noise_filter()):
        assert method.with_noise(2.5).noise_multiplier == 2.5
        assert method.with_noise(2.5).unit == method.unit


def test_subsets_of_fixed_size_are_charged_under_replacement():
    run = federated(fed_avg(noise_multiplier=2.0), sampling=fixed(0.25))
    assert run.claim(1e-5).relation == "replace_one"
    assert len(SHARDS) == len(run.ledgers)
