"""Dividing examples among clients: nothing lost, nothing twice, and as unlike as asked for."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.benchmarks.core import client_splits, clients_digest
from leakbench.benchmarks.core.data.client_splits import _top_up

from ...parameters import subtests

SPLITS = ("iid", "class", "shards", "dirichlet")
EVERY = pytest.mark.parametrize("split", SPLITS)
LABELS = torch.arange(10).repeat(100)
IDS = torch.arange(1000)

FROZEN = {
    "iid": [[0, 5, 8, 10], [2, 4, 9, 11]],
    "class": [[0, 3, 6, 9], [1, 4, 7, 10]],
    "shards": [[4, 6, 9, 10], [1, 5, 7, 8]],
    "dirichlet": [[0, 2, 9, 11], [1, 3, 4, 7, 10]],
}


def split_of(labels=LABELS, clients=10, *, ids=None, **settings):
    return client_splits(torch.arange(len(labels)) if ids is None else ids, labels, clients, **settings)


def shares(parts: list[torch.Tensor], labels: torch.Tensor = LABELS) -> torch.Tensor:
    """Share of each class in each client, [clients, classes]."""
    counts = torch.stack([torch.bincount(labels[part], minlength=10) for part in parts]).double()
    return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    clients=st.integers(1, 12),
    split=st.sampled_from(SPLITS),
    concentration=st.sampled_from([1e-4, 0.01, 0.5, 100.0]),
    shards=st.integers(1, 3),
    least=st.integers(0, 4),
    seed=st.integers(0, 5),
)
def test_clients_share_no_example_hold_all_of_them_and_enough_each(
    labels, clients, split, concentration, shards, least, seed
):
    classes = torch.tensor(labels)
    if clients * max(least, shards if split == "shards" else 0) > len(labels):
        return
    parts = split_of(classes, clients, split=split, seed=seed, concentration=concentration, shards=shards, least=least)
    assert len(parts) == clients
    assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))
    assert min(len(part) for part in parts) >= least
    assert all(part.dtype == torch.int64 and torch.equal(part, part.sort().values) for part in parts)
    if split == "iid":
        assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 1


@EVERY
def test_the_same_seed_gives_the_same_splits_and_another_seed_another(split):
    first, again, other = (split_of(LABELS, 7, split=split, seed=seed) for seed in (1, 1, 2))
    assert [part.tolist() for part in first] == [part.tolist() for part in again]
    assert [part.tolist() for part in first] != [part.tolist() for part in other]
    assert clients_digest(IDS, first) == clients_digest(IDS, again) != clients_digest(IDS, other)


def test_an_example_stays_with_its_client_when_the_pool_is_in_another_order():
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    for split in SPLITS:
        first = split_of(LABELS, 7, split=split, seed=0)
        other = split_of(LABELS[order], 7, ids=order, split=split, seed=0)
        assert [part.tolist() for part in first] == [order[part].sort().values.tolist() for part in other]


def test_the_splits_are_those_of_any_machine_and_release():
    """Hashes of seed and id decide; the first two clients of a small pool, as they were when this was written."""
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    parts = {split: [part.tolist() for part in split_of(labels, 3, split=split, seed=0)][:2] for split in SPLITS}
    assert parts == FROZEN


@EVERY
def test_dividing_leaves_torchs_generator_alone(split):
    before = torch.get_rng_state()
    split_of(LABELS, 7, split=split, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_clients_at_random_have_all_classes_alike():
    """Hypergeometric: standard deviation of a share below 0.03 at 100 of 1,000 examples."""
    assert (shares(split_of(split="iid", seed=0)) - 0.1).abs().max() < 0.15


@pytest.mark.parametrize(("split", "classes"), [("class", 1), ("shards", 2)])
def test_clients_by_class_hold_as_many_classes_as_asked_for(split, classes):
    """Parts of 1,000 sorted examples for 10 clients end where classes end."""
    parts = split_of(split=split, seed=3)
    assert max(len(LABELS[part].unique()) for part in parts) == classes
    assert {len(part) for part in parts} == {100}


def test_client_number_i_of_the_class_split_holds_class_i():
    assert [LABELS[part].unique().tolist() for part in split_of(split="class", seed=0)] == [[i] for i in range(10)]


def test_the_smaller_the_concentration_the_fewer_classes_a_client_has():
    """Mean over clients and 20 seeds of the largest share of one class: near 1, between, and near 1/10."""
    largest = {
        concentration: torch.stack(
            [
                shares(split_of(split="dirichlet", seed=seed, concentration=concentration)).max(dim=1).values.mean()
                for seed in range(20)
            ]
        ).mean()
        for concentration in (0.02, 0.5, 1000.0)
    }
    assert largest[0.02] > 0.7
    assert 0.25 < largest[0.5] < 0.6
    assert largest[1000.0] < 0.13


@pytest.mark.long
def test_shares_have_the_variance_of_a_dirichlet_distribution():
    """A class's share at one of 5 clients at concentration 1 is Beta(1, 4): mean 1/5, variance 4/150."""
    drawn = []
    for seed in range(300):
        parts = split_of(LABELS, 5, split="dirichlet", seed=seed, concentration=1.0, least=0)
        drawn.append(torch.stack([torch.bincount(LABELS[part], minlength=10) for part in parts]) / 100)
    spread = torch.stack(drawn).double().var()
    assert abs(spread - 4 / 150) < 0.002  # 15,000 shares, about 5 standard deviations, and rounding to 1/100


def test_at_a_tiny_concentration_a_class_is_at_one_client():
    """Gamma variables at 1e-4 are below the smallest float; their ratio is not lost."""
    parts = split_of(LABELS, 5, split="dirichlet", seed=0, concentration=1e-4, least=0)
    counts = torch.stack([torch.bincount(LABELS[part], minlength=10) for part in parts])
    assert counts.max(dim=0).values.tolist() == [100] * 10
    assert len(counts.argmax(dim=0).unique()) > 1


def test_a_client_that_chance_left_poor_is_filled_from_the_largest():
    without = split_of(LABELS, 50, split="dirichlet", seed=0, concentration=0.01, least=0)
    filled = split_of(LABELS, 50, split="dirichlet", seed=0, concentration=0.01, least=10)
    assert min(len(part) for part in without) == 0
    assert min(len(part) for part in filled) == 10


def test_who_gives_does_not_become_poor_in_turn():
    parts = [np.arange(3), np.arange(3, 6), np.arange(0)]
    _top_up(parts, 2, np.arange(6))
    assert [len(part) for part in parts] == [2, 2, 2]
    assert sorted(np.concatenate(parts).tolist()) == list(range(6))


@subtests(
    "changed, sentence",
    [
        ({"split": "random"}, "split must be one of iid, class, shards, dirichlet, got 'random'"),
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"shards": 0}, "shards must be at least 1, got 0"),
        ({"least": -1}, "least must be at least 0, got -1"),
        ({"concentration": 0.0}, "concentration must be a positive number, got 0.0"),
        ({"concentration": float("nan")}, "concentration must be a positive number, got nan"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"clients": 1001}, "clients x least must be at most the number of examples, 1000, got 1001 x 1"),
        (
            {"split": "shards", "clients": 600},
            "clients x shards must be at most the number of examples, 1000, got 600 x 2",
        ),
    ],
)
def test_a_value_out_of_range_is_refused(changed, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        split_of(**{"clients": 10, "split": "iid", "seed": 0} | changed)
