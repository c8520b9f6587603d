"""Canaries are records whose gradient is what was wanted, also inside a mask or a subspace."""

import pytest
import torch

from leakbench.audit.plan.gradient_canaries import LinearLogit, as_records, unit_directions
from leakbench.defenses.core import Coordinates, Layout, Subspace, cross_entropy, keyed, per_example_gradients

from ...parameters import subtests

DIM = 12


def coins(seed=0):
    return keyed(seed)


@subtests("kind", ["dirac", "random", "orthonormal"])
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


@subtests("kind", ["dirac", "random", "orthonormal"])
def test_canaries_of_an_epoch_lie_in_its_mask_and_survive_it_whole(kind):
    """Those of another epoch do not: they are drawn anew with the mask."""
    masks = [Coordinates(torch.randperm(DIM, generator=coins(epoch))[:5].sort().values, dim=DIM) for epoch in range(2)]
    own = unit_directions(kind, 4, DIM, coins(), codec=masks[0])
    for codec, whole in zip(masks, (True, False), strict=True):
        kept = codec.encode(own).norm(dim=1)
        assert bool(torch.isclose(kept, torch.ones(4), atol=1e-5).all()) is whole


@subtests("kind", ["random", "orthonormal"])
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
