"""The duties of every federated method, run over the catalogue; those of a central defense are in another file.

A method is tried on the tiny federation of `defenses/federated_runs.py`: four clients of twelve records.
"""

import importlib
import inspect
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from leakbench.audit.catalog import methods as catalog
from leakbench.defenses.core import Federation, RoundSchedule, poisson, predict_federated

from .defenses.federated_runs import EVERYBODY, FEDERATION, federated, parameters
from .parameters import subtests

NAMES = [name for name in catalog.names("defenses") if catalog.is_federated(name)]
SMALL = {"rank": 3}


def build(name, **chosen):
    function = getattr(importlib.import_module(f"leakbench.defenses.{name}"), name)
    accepted = inspect.signature(function).parameters
    settings = {key: value for key, value in SMALL.items() if key in accepted} | chosen
    return function(**{key: value for key, value in settings.items() if key in accepted})


NOISY = [name for name in NAMES if build(name).noise_multiplier is None]


@cache
def usual(name):
    return federated(build(name, noise_multiplier=1.3), schedule=EVERYBODY)


def test_the_catalogue_tells_federated_methods_from_central_ones_without_importing_them():
    assert {"fed_avg", "moon", "dp_fed_avg"} <= set(NAMES) and "dp_sgd" not in NAMES
    assert {*NAMES}.isdisjoint(catalog.central_names())
    assert len(NAMES) + len(catalog.central_names()) == len(catalog.names("defenses"))


@subtests("name", NAMES)
def test_a_method_has_its_files_name_keyword_settings_with_defaults_and_is_refused_by_central_training(name):
    method = build(name, noise_multiplier=1.3)
    assert method.name == name and isinstance(catalog.method(name), type(method))
    function = catalog.find("defenses", name)
    for setting in inspect.signature(function).parameters.values():
        assert setting.kind is inspect.Parameter.KEYWORD_ONLY and setting.default is not inspect.Parameter.empty
    with pytest.raises(catalog.FederatedMethod, match=f"{name} is a federated method, and this run has no clients"):
        catalog.defense(name)


@subtests("name", NAMES)
def test_the_ledgers_of_a_run_agree_with_the_prediction_with_losses_and_its_keys_decide_the_rest(name):
    federation = Federation(rounds=4, local_steps=4, participation=0.75, dropout=0.3)
    method = build(name, noise_multiplier=1.3)
    first, again = (federated(method, federation=federation) for _ in range(2))
    predicted = predict_federated(
        method, [12] * 4, federation=federation, sampling=poisson(0.4), schedule=first.schedule
    )
    assert [ledger.entries for ledger in predicted] == [ledger.entries for ledger in first.ledgers]
    assert first.schedule.lost and torch.equal(parameters(first), parameters(again))
    if method.noise_multiplier:
        assert not torch.equal(parameters(first), parameters(federated(method, federation=federation, key=8)))


@pytest.mark.long
@subtests("name", NAMES)
def test_what_is_proved_is_proved_for_its_unit_and_no_longer_than_rounds_last(name):
    method, run = build(name, noise_multiplier=1.3), usual(name)
    claim = run.claim(1e-5)
    assert claim.unit == run.unit == method.unit
    if not method.noise_multiplier:
        assert math.isinf(claim.epsilon) and claim.reason
        return
    assert math.isfinite(claim.epsilon) and claim.epsilon > 0
    half = federated(method, schedule=RoundSchedule(((0, 1, 2, 3), (1,), ())))
    assert half.claims(1e-5)[0].epsilon < claim.epsilon


@pytest.mark.long
@subtests("name", NOISY)
def test_a_method_without_its_noise_is_refused_and_without_any_proves_nothing(name):
    with pytest.raises(ValueError, match=r"noise_multiplier of '.*' must be set before it runs"):
        federated(build(name))
    assert math.isinf(federated(build(name, noise_multiplier=0.0)).claim(1e-5).epsilon)


@pytest.mark.long
@subtests("name", [name for name in NAMES if build(name, noise_multiplier=1.3).noise_multiplier])
def test_exact_noise_is_charged_as_what_it_is(name):
    run = federated(build(name, noise_multiplier=1.3), key=None, exact=True, schedule=EVERYBODY)
    assert run.noise == "secure" and torch.isfinite(parameters(run)).all()
    assert all(entry.exact for ledger in run.ledgers for entry in ledger.entries)


@pytest.mark.long
@subtests("name", NAMES)
def test_the_order_of_clients_changes_the_last_digits_at_most(name):
    back = federated(build(name, noise_multiplier=1.3), schedule=RoundSchedule(((2, 0, 3, 1),) * 3))
    torch.testing.assert_close(parameters(usual(name)), parameters(back), rtol=0, atol=1e-5)


@pytest.mark.long
@subtests("name", NAMES)
def test_a_client_that_is_lost_from_the_start_costs_the_others_nothing(name):
    method = build(name, noise_multiplier=1.3)
    lost = federated(method, schedule=replace(EVERYBODY, lost={(0, 2): 0}))
    without = federated(method, schedule=RoundSchedule(((0, 1, 3), (0, 1, 2, 3), (0, 1, 2, 3))))
    torch.testing.assert_close(parameters(lost), parameters(without), rtol=0, atol=1e-6)
    assert lost.losses == ("round 0: client 2 is lost before its first local step",)


@subtests("name", NAMES)
def test_bytes_are_those_of_the_messages_and_the_server_reads_what_it_needs_from_them(name):
    run = usual(name)
    for record in run.rounds:
        assert {client: message.bytes for client, message in record.messages.items()} == record.bytes_up
        assert all(0 < size <= 8 * 43 for size in record.bytes_up.values())
    assert run.bytes_up(0) > 0 and run.bytes_down(0) >= 3 * 4 * 43
    assert not run.unverified and FEDERATION.steps == 12
