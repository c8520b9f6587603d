"""Canaries are records whose gradient is what was wanted, also inside a mask or a subspace."""

import numpy as np
import pytest
import torch

from audit.evidence.audit import audit_runs
from audit.evidence.thresholds import FixedThreshold
from audit.scoring.allowed import gaussian_epsilon
from audit.selftest.canaries import LinearLogit, as_records, unit_directions
from audit.selftest.trainers import KeptUpdates
from defenses.core import (
    Coordinates,
    Layout,
    Recipe,
    Recording,
    Subspace,
    cross_entropy,
    from_generator,
    keyed,
    per_example_gradients,
    poisson,
    train,
)
from defenses.dp_sgd import dp_sgd

DIM = 12


def coins(seed=0):
    return keyed(seed)


@pytest.mark.parametrize("kind", ["dirac", "random", "orthonormal"])
def test_a_canary_is_a_record_with_that_gradient(kind):
    directions = unit_directions(kind, 5, DIM, coins())
    records = as_records(directions, 7.0)
    model = LinearLogit(DIM)
    rows = per_example_gradients(model, cross_entropy, Layout.of(model), records, torch.zeros(5, dtype=torch.int64))
    torch.testing.assert_close(rows, -7.0 * directions)
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(5))


def test_kinds_are_what_they_are_called():
    orthonormal = unit_directions("orthonormal", DIM, DIM, coins())
    torch.testing.assert_close(orthonormal @ orthonormal.T, torch.eye(DIM), atol=1e-5, rtol=0)
    dirac = unit_directions("dirac", DIM, DIM, coins())
    assert (dirac.sum(dim=0) == 1).all() and (dirac.count_nonzero(dim=1) == 1).all()
    assert not torch.equal(unit_directions("random", 2, DIM, coins(1)), unit_directions("random", 2, DIM, coins(2)))


@pytest.mark.parametrize("kind", ["dirac", "random", "orthonormal"])
def test_canaries_of_an_epoch_lie_in_its_mask_and_survive_it_whole(kind):
    """Those of another epoch do not: they are drawn anew with the mask."""
    masks = [Coordinates(torch.randperm(DIM, generator=coins(epoch))[:5].sort().values, dim=DIM) for epoch in range(2)]
    own = unit_directions(kind, 4, DIM, coins(), codec=masks[0])
    for codec, whole in zip(masks, (True, False), strict=True):
        kept = codec.encode(own).norm(dim=1)
        assert bool(torch.isclose(kept, torch.ones(4), atol=1e-5).all()) is whole


@pytest.mark.parametrize("kind", ["random", "orthonormal"])
def test_canaries_lie_in_a_subspace(kind):
    basis = torch.linalg.qr(torch.randn(DIM, 4, generator=coins())).Q
    codec = Subspace.of(basis)
    found = unit_directions(kind, 4, DIM, coins(1), codec=codec)
    torch.testing.assert_close(found @ basis @ basis.T, found, atol=1e-5, rtol=0)
    torch.testing.assert_close(codec.encode(found).norm(dim=1), torch.ones(4), atol=1e-5, rtol=0)


def test_more_directions_than_there_are_is_refused():
    with pytest.raises(ValueError, match="there must be between 1 and 12 canaries of kind 'dirac', got 13"):
        unit_directions("dirac", 13, DIM, coins())
    with pytest.raises(ValueError, match="kind must be one of dirac, random, orthonormal, got 'dense'"):
        unit_directions("dense", 1, DIM, coins())  # type: ignore[arg-type]  # which is the mistake
    assert len(unit_directions("random", 13, DIM, coins())) == 13


@pytest.mark.parametrize(
    ("epsilon", "mu", "runs"),
    [
        pytest.param(1.0, 0.26810, 400, marks=pytest.mark.slow),
        pytest.param(4.0, 0.92490, 60, marks=pytest.mark.slow),
        (8.0, 1.66596, 12),
    ],
)
def test_the_bound_from_gradient_canaries_is_within_a_tenth_of_the_epsilon_of_dp_sgd(epsilon, mu, runs):
    """Of a linear model, in one full step; a fair coin puts each canary in, and none touches another's coordinate."""
    size, delta = 500, 1e-5
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-3)
    drawn, defense = coins(7), dp_sgd(clip_norm=1.0, noise_multiplier=1 / mu)
    scores, members = [], []
    for run in range(runs):
        directions = unit_directions("dirac", size, size, drawn)
        there = torch.rand(size, generator=drawn) < 0.5
        records = as_records(directions[there], 100.0), torch.zeros(int(there.sum()), dtype=torch.int64)
        kept = KeptUpdates()
        train(
            LinearLogit(size),
            records,
            defense,
            sampling=poisson(1.0),
            steps=1,
            noise=from_generator(drawn),
            seed=run,
            recipe=Recipe(expected_batch=1.0),
            recording=Recording(meter=kept),
        )
        scores.append(-(directions @ kept.updates[0]).numpy())
        members.append(there.numpy())
    score, member = np.concatenate(scores), np.concatenate(members)
    # Half of what a canary adds: fixed before anything is drawn.
    found = audit_runs(score[member], score[~member], method="gaussian", choice=FixedThreshold(0.5), delta=delta)
    assert 0.9 * epsilon < found.value < epsilon * 1.001
