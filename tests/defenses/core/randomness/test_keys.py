"""Keys of any length set generators apart, and small ones are PyTorch's own seeds."""

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats

from leakbench.defenses.core.randomness import keys as module
from leakbench.defenses.core.randomness.keys import filled, fills_states, keyed

ALARM = 1e-8


def draws(generator, count=8):
    return torch.empty(count, dtype=torch.int64).random_(generator=generator).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_small_keys_are_pytorchs_seeds(seed):
    assert draws(keyed(seed)) == draws(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("one", "other"), [(1, 1 + 2**32), (2**40, 2**41), (7 + 2**62, 7 + 2**61), (3, 3 + 2**100)])
def test_keys_that_agree_in_their_lower_bits_give_other_streams(one, other):
    assert one % 2**32 == other % 2**32
    assert draws(keyed(one)) == draws(keyed(one))
    assert not set(draws(keyed(one))) & set(draws(keyed(other)))


def test_streams_of_neighbouring_keys_are_uniform_and_independent():
    streams = [torch.rand(20_000, generator=keyed(2**50 + key), dtype=torch.float64).numpy() for key in range(4)]
    for stream in streams:
        assert stats.kstest(stream, "uniform").pvalue > ALARM
    correlation = np.corrcoef(streams) - np.eye(4)
    assert np.abs(correlation).max() < 6 / np.sqrt(20_000)


def test_a_filled_state_is_the_mersenne_twisters():
    content = bytes(range(64))
    twister = np.random.MT19937()
    state = hashlib.shake_256(content).digest(4 * 624)
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": np.frombuffer(state, dtype=np.uint32), "pos": 624},
    }
    found = torch.empty(3000, dtype=torch.int32).random_(generator=filled(content))
    assert found.tolist() == (twister.random_raw(3000) & 0x7FFFFFFF).tolist()
    assert fills_states()


def test_a_state_that_is_kept_otherwise_is_noticed(monkeypatch):
    monkeypatch.setattr(module, "_BEFORE", 32)
    assert not fills_states.__wrapped__()


def test_where_states_are_kept_otherwise_keys_still_work(monkeypatch):
    monkeypatch.setattr(module, "fills_states", lambda: False)
    assert draws(keyed(2**64 + 5)) == draws(torch.Generator().manual_seed(2**64 + 5 & (2**63 - 1)))


def test_a_negative_key_is_refused():
    with pytest.raises(ValueError, match="key must be at least 0, got -1"):
        keyed(-1)


def test_the_default_device_has_no_part_in_it():
    expected = draws(keyed(2**40))
    with torch.device("meta"):
        assert fills_states.__wrapped__()
        generator = keyed(2**40)
    assert draws(generator) == expected


def test_what_a_generator_says_of_its_seed_tells_it_from_others_and_nothing_of_its_state():
    one, other = keyed(2**40), keyed(2**41)
    assert one.initial_seed() != other.initial_seed()
    assert draws(torch.Generator().manual_seed(one.initial_seed())) != draws(one)
