"""Dividing examples among clients: nothing lost, nothing twice, and as unlike as asked for."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.benchmarks.core import client_splits
from leakbench.benchmarks.core.data.client_splits import _top_up

from ...parameters import subtests

HOWS = ("iid", "by_class", "dirichlet")
EVERY = pytest.mark.parametrize("how", HOWS)
LABELS = torch.arange(10).repeat(100)


def shares(parts: list[torch.Tensor], labels: torch.Tensor = LABELS) -> torch.Tensor:
    """Share of each class in each client, [clients, classes]."""
    counts = torch.stack([torch.bincount(labels[part], minlength=10) for part in parts]).double()
    return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    clients=st.integers(1, 12),
    how=st.sampled_from(HOWS),
    alpha=st.sampled_from([0.01, 0.5, 100.0]),
    shards=st.integers(1, 3),
    smallest=st.integers(0, 4),
    seed=st.integers(0, 5),
)
def test_clients_share_no_example_hold_all_of_them_and_enough_each(labels, clients, how, alpha, shards, smallest, seed):
    classes = torch.tensor(labels)
    if clients * max(smallest, shards if how == "by_class" else 0) > len(labels):
        return
    parts = client_splits(
        classes, clients, how=how, seed=seed, alpha=alpha, classes_per_client=shards, smallest=smallest
    )
    assert len(parts) == clients
    assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))
    assert min(len(part) for part in parts) >= smallest
    assert all(part.dtype == torch.int64 and torch.equal(part, part.sort().values) for part in parts)
    if how == "iid":
        assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 1


@EVERY
def test_the_same_seed_gives_the_same_splits_and_another_seed_another(how):
    first, again, other = (client_splits(LABELS, 7, how=how, seed=seed) for seed in (1, 1, 2))
    assert [part.tolist() for part in first] == [part.tolist() for part in again]
    assert [part.tolist() for part in first] != [part.tolist() for part in other]


@EVERY
def test_dividing_leaves_torchs_generator_alone(how):
    before = torch.get_rng_state()
    client_splits(LABELS, 7, how=how, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_clients_at_random_have_all_classes_alike():
    """Hypergeometric: standard deviation of a share below 0.03 at 100 of 1,000 examples."""
    assert (shares(client_splits(LABELS, 10, how="iid", seed=0)) - 0.1).abs().max() < 0.15


@pytest.mark.parametrize("classes_per_client", [1, 2])
def test_clients_by_class_hold_as_many_classes_as_asked_for(classes_per_client):
    """Shards of 1,000 sorted examples for 10 clients end where classes end."""
    parts = client_splits(LABELS, 10, how="by_class", seed=3, classes_per_client=classes_per_client)
    held = [len(LABELS[part].unique()) for part in parts]
    assert max(held) == classes_per_client
    assert {len(part) for part in parts} == {100}


def test_the_smaller_alpha_the_fewer_classes_a_client_has():
    """Mean over clients and 20 seeds of the largest share of one class: near 1, between, and near 1/10."""
    largest = {
        alpha: torch.stack(
            [
                shares(client_splits(LABELS, 10, how="dirichlet", seed=seed, alpha=alpha)).max(dim=1).values.mean()
                for seed in range(20)
            ]
        ).mean()
        for alpha in (0.02, 0.5, 1000.0)
    }
    assert largest[0.02] > 0.7
    assert 0.25 < largest[0.5] < 0.6
    assert largest[1000.0] < 0.13


def test_shares_have_the_variance_of_a_dirichlet_distribution():
    """A class's share at one of 5 clients at alpha 1 is Beta(1, 4): mean 1/5, variance 4/150."""
    drawn = []
    for seed in range(300):
        parts = client_splits(LABELS, 5, how="dirichlet", seed=seed, alpha=1.0, smallest=0)
        drawn.append(torch.stack([torch.bincount(LABELS[part], minlength=10) for part in parts]) / 100)
    spread = torch.stack(drawn).double().var()
    assert abs(spread - 4 / 150) < 0.002  # 15,000 shares, about 5 standard deviations, and rounding to 1/100


def test_a_client_that_chance_left_poor_is_filled_from_the_largest():
    without = client_splits(LABELS, 50, how="dirichlet", seed=0, alpha=0.01, smallest=0)
    filled = client_splits(LABELS, 50, how="dirichlet", seed=0, alpha=0.01, smallest=10)
    assert min(len(part) for part in without) == 0
    assert min(len(part) for part in filled) == 10


def test_who_gives_does_not_become_poor_in_turn():
    parts = [np.arange(3), np.arange(3, 6), np.arange(0)]
    _top_up(parts, 2, np.random.default_rng(0))
    assert [len(part) for part in parts] == [2, 2, 2]
    assert sorted(np.concatenate(parts).tolist()) == list(range(6))


@subtests(
    "changed, sentence",
    [
        ({"how": "random"}, "how must be one of iid, by_class, dirichlet, got 'random'"),
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"classes_per_client": 0}, "classes_per_client must be at least 1, got 0"),
        ({"smallest": -1}, "smallest must be at least 0, got -1"),
        ({"alpha": 0.0}, "alpha must be a positive number, got 0.0"),
        ({"alpha": float("nan")}, "alpha must be a positive number, got nan"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"clients": 1001}, "clients x smallest must be at most the number of examples, 1000, got 1001 x 1"),
        (
            {"how": "by_class", "clients": 600},
            "clients x classes_per_client must be at most the number of examples, 1000, got 600 x 2",
        ),
    ],
)
def test_a_value_out_of_range_is_refused(changed, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        client_splits(LABELS, **{"clients": 10, "how": "iid", "seed": 0} | changed)
