"""Candidates of a prior: different, exchangeable, and in an order that tells nothing of who is sought."""

import numpy as np
import pytest
import torch
from scipy import stats

from leakbench.audit.targets.candidate_prior import Prior


def images(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 3, 3, generator=draw), torch.randint(5, (count,), generator=draw)


BATCH, POOL = images(3), images(60, seed=1)


def test_the_truth_stands_at_every_place_as_often():
    places = [Prior.draw(BATCH, POOL, 5, key).place for key in range(1000)]
    assert stats.chisquare(np.bincount(places, minlength=5)).pvalue > 1e-6
    # What the test would say of a place that is a little more likely than the others.
    assert stats.chisquare(np.bincount([p if p or k % 3 else 1 for k, p in enumerate(places)])).pvalue < 1e-6
    # Nor does the place follow from whoever is sought.
    other = [Prior.draw(images(1, seed=9), POOL, 5, key).place for key in range(50)]
    assert other == places[:50]


def test_candidates_are_the_first_of_the_batch_and_different_others_of_the_pool():
    seen = set()
    for key in range(30):
        prior = Prior.draw(BATCH, POOL, 10, key)
        given = prior.given
        assert torch.equal(given.ids, torch.arange(10)) and given.inputs.dtype == BATCH[0].dtype
        assert torch.equal(given.inputs[prior.place], BATCH[0][0]) and given.labels[prior.place] == BATCH[1][0]
        rest = torch.arange(10) != prior.place
        same = (given.inputs[rest][:, None] == POOL[0][None]).flatten(2).all(2)
        assert (same.sum(1) == 1).all()
        assert torch.equal(given.labels[rest], POOL[1][same.nonzero()[:, 1]])
        seen |= set(same.nonzero()[:, 1].tolist())
        assert same.any(0).sum() == 9  # nobody twice
    assert len(seen) > 50
    again, other = Prior.draw(BATCH, POOL, 10, 3), Prior.draw(BATCH, POOL, 10, 4)
    assert torch.equal(again.given.inputs, Prior.draw(BATCH, POOL, 10, 3).given.inputs)
    assert not torch.equal(again.given.inputs, other.given.inputs)


def test_no_tensor_leads_from_the_candidates_to_the_pools():
    given = Prior.draw(BATCH, POOL, 10, 0).given
    assert given.inputs._base is None and given.inputs.untyped_storage().nbytes() == given.inputs.numel() * 4
    before = BATCH[0][0].clone()
    given.inputs.zero_()
    assert torch.equal(BATCH[0][0], before) and POOL[0].any()


def test_copies_of_the_truth_of_its_batch_and_of_one_another_are_no_candidates():
    """In a pool of six of these and four others, however they are ordered, the four others are left."""
    inputs = torch.cat([BATCH[0], BATCH[0], POOL[0][:4], POOL[0][:4]])
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    for key in range(10):
        given = Prior.draw(BATCH, (inputs, labels), 5, key).given.inputs
        assert len(given.flatten(1).unique(dim=0)) == 5
        assert not (given[:, None] == BATCH[0][None, 1:]).flatten(2).all(2).any()
    with pytest.raises(ValueError, match=r"a prior of 6 needs 5 different examples beside the batch, got 4"):
        Prior.draw(BATCH, (inputs, labels), 6, 0)


def test_who_is_not_allowed_is_no_candidate():
    allowed = torch.arange(20, 30)
    given = Prior.draw(BATCH, POOL, 11, 0, allowed=allowed).given.inputs
    left_out = torch.cat([POOL[0][:20], POOL[0][30:]])
    assert not (given[:, None] == left_out[None]).flatten(2).all(2).any()
    with pytest.raises(ValueError, match="got 10"):
        Prior.draw(BATCH, POOL, 12, 0, allowed=allowed)
    with pytest.raises(ValueError, match="at least 2 candidates, got 1"):
        Prior.draw(BATCH, POOL, 1, 0)
