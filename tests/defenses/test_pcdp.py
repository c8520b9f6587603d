"""What is particular to PCDP-SGD: what is kept of a gradient, where the noise is, and public data that run short."""

import pytest
import torch

from leakbench.defenses.core import Context, Layout, Subspace, ToyRows, poisson, release, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.pcdp import pcdp

from ..parameters import subtests
from . import duties

LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), ((5, 8), (3,), (20,)))
DIM = LAYOUT.dim
ROWS = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0))


class Pool:
    """Public gradients that all lie in one plane of each tensor, and a note of which were read."""

    def __init__(self, size):
        self.size, self.read = size, []
        draw = torch.Generator().manual_seed(4)
        planes = [torch.randn(2, size, generator=draw) for size in LAYOUT.sizes]
        self.rows = torch.cat([torch.randn(size, 2, generator=draw) @ plane for plane in planes], dim=1)

    def __call__(self, chosen):
        self.read.append(chosen)
        return self.rows[chosen]


def context_at(step=0, *, steps=6, public=None):
    return Context(step=step, steps=steps, layout=LAYOUT, public=Pool(60) if public is None else public)


def subspace_of(defense, context, state=None):
    state, plan = defense.plan(state, context)
    codec = plan.blocks[0].codec
    assert isinstance(codec, Subspace)
    return state, codec


def test_a_full_rank_is_dp_sgd_whatever_public_gradients_span():
    context = context_at()  # they lie in planes
    found, expected = (
        release(d, ROWS, context, noise=seeded(1))
        for d in (pcdp(clip_norm=0.7, rank=50, noise_multiplier=1.3), dp_sgd(clip_norm=0.7, noise_multiplier=1.3))
    )
    torch.testing.assert_close(found.total, expected.total, rtol=1e-6, atol=1e-6)


def test_the_clip_norm_is_spent_on_the_projected_part():
    context = context_at()
    defense = pcdp(clip_norm=0.01, rank=2, noise_multiplier=0.0)
    _, subspace = subspace_of(defense, context)
    outside = ROWS - subspace.project(ROWS)
    inside = subspace.project(ROWS)
    rows = inside + 100 * outside  # however much lies outside
    expected = (0.01 * inside / inside.norm(dim=1, keepdim=True)).sum(dim=0)
    torch.testing.assert_close(release(defense, rows, context).total, expected, rtol=1e-3, atol=1e-6)


def test_noise_lies_inside_the_subspace_and_has_one_number_a_direction():
    context, defense = context_at(), pcdp(clip_norm=0.5, rank=2, noise_multiplier=3.0)
    _, subspace = subspace_of(defense, context)
    assert subspace.size == 6
    draws = [release(defense, torch.zeros(1, DIM), context, noise=seeded(i)) for i in range(400)]
    totals = torch.stack([draw.total for draw in draws])
    torch.testing.assert_close(subspace.project(totals), totals, rtol=1e-4, atol=1e-5)
    assert duties.has_scale(torch.stack([draw.noisy[0] for draw in draws]), 1.5)
    assert not duties.has_scale(torch.stack([draw.noisy[0] for draw in draws]), 1.5 * 1.15)


def test_the_directions_are_those_of_the_public_gradients():
    pool = Pool(60)
    _, subspace = subspace_of(pcdp(rank=2), context_at(public=pool))
    torch.testing.assert_close(subspace.project(pool.rows), pool.rows, rtol=1e-4, atol=1e-4)
    _, wider = subspace_of(pcdp(rank=10), context_at(public=pool))
    # Public gradients that span a plane have no further directions; the tensor of 3 numbers is kept whole.
    assert wider.size == 2 + 3 + 2


def test_one_basis_over_everything_or_one_a_tensor():
    public = ToyRows(DIM)
    _, per_tensor = subspace_of(pcdp(rank=4), context_at(public=public))
    _, over_all = subspace_of(pcdp(rank=4, scope="global"), context_at(public=public))
    assert per_tensor.size == 4 + 3 + 4  # the bias has three numbers
    assert per_tensor.spans == LAYOUT.slices
    assert (over_all.size, over_all.spans) == (4, ((0, DIM),))


def test_a_basis_is_kept_for_the_interval_and_public_gradients_are_read_at_its_start_only():
    pool, defense, state, seen = Pool(60), pcdp(rank=2, interval=3), None, []
    for step in range(6):
        state, subspace = subspace_of(defense, context_at(step, public=pool), state)
        seen.append(subspace.bases[0])
    assert len(pool.read) == 2
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[3], seen[5])
    assert not torch.equal(seen[2], seen[3])


def test_independent_batches_share_no_example_and_random_ones_may():
    for defense, disjoint in ((pcdp(rank=10, auxiliary="independent"), True), (pcdp(rank=10), False)):
        pool, state = Pool(60), None
        for step in range(6):
            state, _ = subspace_of(defense, context_at(step, public=pool), state)
        read = torch.cat(pool.read)
        assert len(read) == 60
        assert (len(read.unique()) == 60) is disjoint


def test_a_batch_may_be_larger_than_the_rank():
    pool = Pool(60)
    subspace_of(pcdp(rank=2, auxiliary_size=7), context_at(public=pool))
    assert [len(chosen) for chosen in pool.read] == [7]


def test_a_pool_that_is_too_small_is_refused_with_the_ways_out():
    with pytest.raises(ValueError, match="must have at least 61 examples, got 60; lower rank and auxiliary_size to 60"):
        subspace_of(pcdp(rank=61), context_at())
    words = r"6 batches of 20 are 120 examples, got 60; take an interval of 2, or auxiliary = 'random', or shortage"
    with pytest.raises(ValueError, match=words):
        subspace_of(pcdp(rank=20, auxiliary="independent"), context_at())
    state, _ = subspace_of(pcdp(rank=20, auxiliary="independent", interval=2), context_at())
    subspace_of(pcdp(rank=20, auxiliary="independent", interval=2), context_at(4), state)


def test_a_pool_that_is_too_small_may_lower_the_rank_and_the_run_says_so():
    lowered = pcdp(rank=20, auxiliary="independent", shortage="lower_rank", noise_multiplier=1.0)
    _, plan = lowered.plan(None, context_at(public=ToyRows(DIM)))
    assert plan.remarks == ()
    pool = Pool(60)
    _, plan = lowered.plan(None, context_at(public=pool))
    assert plan.remarks == ("rank_lowered_to_10",)
    assert [len(chosen) for chosen in pool.read] == [10]
    few = duties.trained(pcdp(rank=30, auxiliary="independent", shortage="lower_rank", noise_multiplier=1.0))
    assert few.remarks == ("rank_lowered_to_20",)
    assert few.public_used
    assert duties.trained(pcdp(rank=3, noise_multiplier=1.0)).remarks == ()


def test_a_larger_batch_is_cut_down_before_the_rank_is():
    lowered = pcdp(rank=5, auxiliary="independent", auxiliary_size=30, shortage="lower_rank")
    _, plan = lowered.plan(None, context_at())
    assert plan.remarks == ("auxiliary_lowered_to_10",)


def test_without_public_data_nothing_is_planned():
    with pytest.raises(ValueError, match="needs public data, got none"):
        duties.trained(pcdp(rank=3, noise_multiplier=1.0), public=None)


def test_public_gradients_that_are_not_finite_count_for_nothing():
    pool = Pool(60)
    pool.rows[::2] = torch.nan
    _, subspace = subspace_of(pcdp(rank=2, auxiliary_size=20), context_at(public=pool))
    torch.testing.assert_close(subspace.project(pool.rows[1::2]), pool.rows[1::2], rtol=1e-4, atol=1e-4)


def test_what_it_proves_does_not_depend_on_the_rank():
    from leakbench.defenses.core import predict

    def claimed(defense, steps):
        return predict(defense, sampling=poisson(0.025), steps=steps).claim(1e-5).epsilon

    assert claimed(pcdp(rank=3, noise_multiplier=22.0), 20) == claimed(dp_sgd(noise_multiplier=22.0), 20)
    # By PLD; the paper's 0.31 is the classic conversion.
    assert claimed(dp_sgd(noise_multiplier=22.0), 3200) == pytest.approx(0.21, abs=0.005)


@subtests(
    ("settings", "words"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"interval": 0}, "interval must be at least 1, got 0"),
        ({"scope": "layer"}, "scope"),
        ({"auxiliary": "fresh"}, "auxiliary"),
        ({"shortage": "ignore"}, "shortage"),
        ({"rank": 10, "auxiliary_size": 9}, "auxiliary_size must be at least rank, 10, got 9"),
        ({"clip_norm": 0.0}, "norm must be a positive"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(Exception, match=words):  # a wrong choice is refused by the type checker of the tests, too
        pcdp(**settings)
