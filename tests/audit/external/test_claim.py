"""Claims as their owners state them: read, held against themselves, and turned into claims of replacement."""

import math
from typing import Any

import pytest

from leakbench.audit.evidence.claim_bounds import gaussian_epsilon
from leakbench.audit.external.claim import StatedClaim

from ...parameters import subtests


def test_a_claim_is_read_with_what_is_behind_it():
    found = StatedClaim.parse("epsilon=3, delta=1e-6,sampling=poisson,sample_rate=0.01,noise_multiplier=1.1,steps=1000")
    assert (found.epsilon, found.delta, found.steps, found.sampling) == (3.0, 1e-6, 1000, "poisson")
    assert found.complete


@subtests(
    ("text", "told"),
    [
        ("delta=1e-5", "must say epsilon"),
        ("epsilon", "KEY=VALUE"),
        ("epsilon=1,epsilon=2", "twice"),
        ("epsilon=one", "must be a number"),
        ("epsilon=-1", "at least 0"),
        ("epsilon=inf", "finite"),
        ("epsilon=nan", "at least 0 and finite"),
        ("epsilon=1,delta=0", r"in \(0, 1\)"),
        ("epsilon=1,relation=swap", "add_remove or replace_one"),
        ("epsilon=1,sample_rate=2", r"in \(0, 1\]"),
        ("epsilon=1,noise_multiplier=0", "positive"),
        ("epsilon=1,steps=0", "at least 1"),
        ("epsilom=1", "did you mean 'epsilon'"),
        ("epsilon=1,sampling=poison", "did you mean 'poisson'"),
        ("epsilon=1,sampling=full,sample_rate=0.5", "must be 1 with sampling=full"),
    ],
)
def test_what_is_no_claim_is_refused(text, told):
    with pytest.raises(ValueError, match=told):
        StatedClaim.parse(text)


@pytest.mark.long
def test_a_sampling_in_capitals_is_checked_against_its_noise_as_well():
    stated = StatedClaim.parse("epsilon=1,sampling=Poisson,sample_rate=0.5,noise_multiplier=0.5,steps=10")
    assert stated.complete and stated.errors


def test_replacement_is_group_privacy_of_two_where_nothing_else_is_stated():
    epsilon, delta = StatedClaim(epsilon=1.0, delta=1e-5).of_replacement
    assert epsilon == 2.0
    assert delta == pytest.approx((1 + math.e) * 1e-5)
    assert StatedClaim(epsilon=1.0, delta=1e-5, relation="replace_one").of_replacement == (1.0, 1e-5)


def test_the_stated_noise_allows_less_than_group_privacy():
    # One Gaussian release at sigma 2: where one record replaces another the shift is twice 1 / 2.
    stated = StatedClaim(epsilon=2.0, delta=1e-5, sampling="full", noise_multiplier=2.0, steps=1)
    epsilon, delta = stated.of_replacement
    assert delta == pytest.approx((1 + math.exp(2)) * 1e-5)
    assert epsilon == pytest.approx(gaussian_epsilon(1.0, delta), rel=0.01)
    assert epsilon >= gaussian_epsilon(1.0, delta)
    assert epsilon < 4.0


def test_a_claim_below_what_its_own_noise_proves_is_in_error():
    settings: Any = {"delta": 1e-5, "sampling": "full", "noise_multiplier": 2.0, "steps": 1}
    proved = gaussian_epsilon(0.5, 1e-5)
    (told,) = StatedClaim(epsilon=proved * 0.9, **settings).errors
    assert "its own noise multiplier of 2" in told
    assert StatedClaim(epsilon=proved * 1.01, **settings).errors == ()
    # Rounded as owners round it.
    assert StatedClaim(epsilon=proved * 0.9995, **settings).errors == ()
    # Other samplers prove what these numbers do not say.
    assert StatedClaim(epsilon=0.1, **(settings | {"sampling": "shuffle"})).errors == ()
