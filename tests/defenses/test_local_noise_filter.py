"""What is particular to the local noise filter: its noise as promised, and what a claim makes of it."""

import math

import pytest
import torch
from scipy.stats import norm

from leakbench.defenses.core import Federated, RoundSchedule, full
from leakbench.defenses.local_noise_filter import local_noise_filter, promised_std
from leakbench.defenses.sgd import sgd

from .duties import has_scale
from .federated_runs import EVERYBODY, federated


@pytest.mark.long
def test_each_message_is_a_clipped_update_with_noise_of_the_promised_scale():
    method = local_noise_filter(update_norm=0.2, sensitivity=0.3, promised_epsilon=2.0, promised_delta=1e-3)
    std = math.sqrt(2 * math.log(1250)) * 0.3 / 2.0
    plain = federated(Federated(client=sgd()), schedule=EVERYBODY)
    noise = []
    # Whole shards without noise: no key has a part in it.
    exact = federated(Federated(client=sgd()), schedule=EVERYBODY, sampling=full())
    for key in range(10):
        run = federated(method, schedule=EVERYBODY, key=key, sampling=full())
        for client in range(4):
            delta, sent = (one.rounds[0].messages[client].tensors["values"] for one in (exact, run))
            noise.append(sent - delta * min(1.0, 0.2 / float(delta.norm())))
    assert has_scale(torch.stack(noise), std) and not has_scale(torch.stack(noise), 1.5 * std)
    assert promised_std(2.0, 1e-3, 0.3) == pytest.approx(std) and plain.noise == "none"


@pytest.mark.parametrize(
    ("promised", "one", "three"), [(0.5, 0.7510, 1.3732), (1.0, 1.6103, 2.9806), (8.0, 18.899, 40.01)]
)
def test_one_message_costs_more_than_is_promised_and_three_of_them_more_still(promised, one, three):
    """A replaced update moves by twice the norm; the formula is proved for epsilon below 1; rounds compose."""
    run = federated(local_noise_filter(promised_epsilon=promised), schedule=RoundSchedule(((0, 1), (0,), (0,))))
    claims = run.claims(1e-5)
    assert [claim.epsilon for claim in claims[:2]] == pytest.approx([three, one], rel=1e-3)
    assert gaussian_epsilon(2 / (run.method.noise_multiplier or 0.0)) == pytest.approx(one, rel=1e-3)
    assert promised < one < three


def gaussian_epsilon(shift, delta=1e-5):
    """Epsilon of one Gaussian by its closed form (Balle & Wang 2018), by bisection."""
    low, high = 0.0, 200.0
    for _ in range(80):
        middle = (low + high) / 2
        reached = norm.cdf(shift / 2 - middle / shift) - math.exp(middle) * norm.cdf(-shift / 2 - middle / shift)
        low, high = (middle, high) if reached > delta else (low, middle)
    return high


def test_a_sensitivity_that_is_typed_in_too_small_is_charged_as_it_is():
    """The multiplier is relative to the norm that the update is clipped to, not to the sensitivity that is claimed."""
    honest, wrong = (local_noise_filter(update_norm=1.0, sensitivity=typed) for typed in (1.0, 0.01))
    assert wrong.noise_multiplier == pytest.approx((honest.noise_multiplier or 0.0) / 100)
    assert federated(wrong).claim(1e-5).epsilon > 50 * federated(honest).claim(1e-5).epsilon


def test_its_unit_is_a_client_against_the_server():
    claim = federated(local_noise_filter()).claim(1e-5)
    assert (claim.unit, claim.relation) == ("client", "replace_one")
    assert not any("trusted" in sentence for sentence in claim.assumes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"update_norm": 0.0}, "update_norm must be"),
        ({"sensitivity": -1.0}, "sensitivity must be"),
        ({"promised_epsilon": 0.0}, "promised_epsilon must be"),
        ({"promised_delta": 1.0}, r"promised_delta must be in \(0, 1\)"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        local_noise_filter(**settings)
