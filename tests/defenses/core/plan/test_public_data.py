"""Public examples: which are drawn, that blocks are disjoint, and that reading leaves a mark."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.defenses.core import Context, PublicGradients, PublicRows, ToyRows
from leakbench.defenses.core.plan.public_data import disjoint, draw, refuse_shared
from leakbench.defenses.dp_sgd import dp_sgd

from ... import duties


def coins(seed):
    return torch.Generator().manual_seed(seed)


@given(size=st.integers(1, 5000), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_positions_are_distinct_and_in_range_whatever_the_share(size, share, seed):
    n = int(share * size)
    drawn = draw(n, size, coins(seed))
    assert drawn.dtype == torch.int64
    assert len(drawn.unique()) == len(drawn) == n
    assert n == 0 or 0 <= int(drawn.min()) <= int(drawn.max()) < size
    assert torch.equal(drawn, draw(n, size, coins(seed)))


@pytest.mark.parametrize(("n", "size"), [(3, 8), (5, 100)])  # by permutation, and without
def test_every_position_is_as_likely_as_any_other_at_every_place(n, size):
    rounds = 4000
    drawn = torch.stack([draw(n, size, coins(seed)) for seed in range(rounds)])
    for place in range(n):
        counts = drawn[:, place].bincount(minlength=size).double()
        expected = rounds / size
        statistic = float(((counts - expected) ** 2 / expected).sum())
        # Chi-square with size - 1 degrees: six standard deviations above its mean.
        assert statistic < size - 1 + 6 * (2 * (size - 1)) ** 0.5 + 12


@given(n=st.integers(1, 30), blocks=st.integers(1, 12), spare=st.integers(0, 5), seed=st.integers(0, 9))
def test_blocks_share_no_position(n, blocks, spare, seed):
    size = n * blocks + spare
    cut = torch.cat([disjoint(n, number, size, seed) for number in range(blocks)])
    assert len(cut.unique()) == n * blocks
    assert int(cut.max()) < size


def test_blocks_are_not_cut_in_the_order_of_the_pool():
    assert not torch.equal(disjoint(50, 0, 100, 0).sort().values, torch.arange(50))


def test_a_context_reads_fresh_examples_each_step_or_its_own_block():
    public = ToyRows(4)
    at = [Context(step=step, steps=3, dim=4, public=public) for step in range(3)]
    assert not torch.equal(at[0].public_rows(5), at[1].public_rows(5))
    assert torch.equal(at[0].public_rows(5), at[0].public_rows(5))
    assert torch.equal(at[0].public_rows(5, block=1), at[2].public_rows(5, block=1))
    assert at[0].public_size == public.size


def test_a_block_beyond_the_pool_is_refused():
    pool = PublicGradients(lambda x, y: x, torch.zeros(9, 4), torch.zeros(9))
    context = Context(step=0, steps=3, dim=4, public=pool)
    assert context.public_rows(3, block=2).shape == (3, 4)
    with pytest.raises(ValueError, match="public data must have at least 12 examples, got 9"):
        context.public_rows(3, block=3)
    with pytest.raises(ValueError, match="public data must have at least 10 examples, got 9"):
        context.public_rows(10)


def test_reading_leaves_a_mark_and_asking_for_the_size_does_not():
    for pool in (PublicGradients(lambda x, y: x, torch.zeros(9, 4), torch.zeros(9)), ToyRows(4)):
        assert isinstance(pool, PublicRows)
        context = Context(step=0, steps=3, dim=4, public=pool)
        assert context.public_size >= 9
        assert not pool.used
        context.public_rows(2)
        assert pool.used


AS_COPIES = {
    "the same": lambda x: x,
    "flat": lambda x: x.flatten(1),
    "in double precision": lambda x: x.double(),
    "in half precision": lambda x: x.half(),
    "with negative zeros": lambda x: torch.where(x == 0, -0.0, x),
}


@pytest.mark.parametrize("copied", AS_COPIES.values(), ids=AS_COPIES)
def test_public_examples_that_are_private_ones_are_refused_however_they_are_stored(copied):
    private = torch.randn(30, 2, 3, generator=torch.Generator().manual_seed(0))
    private[:, 0, 0] = 0.0
    others = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1))
    refuse_shared(private, copied(others))
    with pytest.raises(ValueError, match=r"must be none of the private ones, got 2 of 7 whose inputs are the same"):
        refuse_shared(private, copied(torch.cat([others, private[[3, 29]]])))
    with pytest.raises(ValueError, match=r"got 1 of 1 whose"):
        refuse_shared(copied(private), private[7:8])


def test_whole_numbers_are_compared_with_floats_as_numbers():
    private = torch.randint(0, 256, (20, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    refuse_shared(private, private.float() + 1)
    with pytest.raises(ValueError, match="got 20 of 20"):
        refuse_shared(private, private.float())
    refuse_shared(private, private[:0].float())


def test_training_on_public_examples_that_are_private_is_refused():
    with pytest.raises(ValueError, match=r"must be none of the private ones, got 1 of 120"):
        mixed = torch.cat([duties.PUBLIC[0][1:], duties.DATA[0][5:6]])
        duties.trained(dp_sgd(noise_multiplier=1.0), public=(mixed, duties.PUBLIC[1]))
