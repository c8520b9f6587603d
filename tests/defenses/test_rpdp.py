"""What is particular to RPDP-SGD: directions that know nothing, how much of a gradient they keep, and the options."""

import pytest
import torch

from leakbench.defenses.core import Context, Everything, Layout, Subspace, release
from leakbench.defenses.core.plan.families import public_subspaces
from leakbench.defenses.core.plan.linear_algebra.basis import orthonormality_error
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.rpdp import rpdp

from . import duties

LAYOUT = Layout(("a.weight", "b.weight", "b.bias"), ((10, 30), (200,), (5,)))
DIM = LAYOUT.dim
ROWS = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0))


def context_at(step=0, seed=0):
    return Context(step=step, steps=400, layout=LAYOUT, seed=seed)


def subspace_of(defense, step=0, state=None, seed=0):
    state, plan = defense.plan(state, context_at(step, seed))
    codec = plan.blocks[0].codec
    assert isinstance(codec, Subspace)
    return state, codec


EITHER = pytest.mark.parametrize("directions", ["gaussian", "sketch"])


@EITHER
def test_it_reads_no_public_data_and_keeps_as_many_directions_as_asked_for(directions):
    _, subspace = subspace_of(rpdp(rank=40, directions=directions))
    assert [basis.shape for basis in subspace.bases] == [(300, 40), (200, 40), (5, 5)]
    _, over_all = subspace_of(rpdp(rank=40, scope="global", directions=directions))
    assert [basis.shape for basis in over_all.bases] == [(DIM, 40)]


def test_directions_are_orthonormal_also_where_there_are_nearly_as_many_as_numbers():
    for rank in (1, 40, 199, 299):
        for basis in subspace_of(rpdp(rank=rank))[1].bases:
            exact = basis.double()
            assert (exact.T @ exact - torch.eye(basis.shape[1])).abs().max() < 1e-5


@EITHER
def test_on_average_a_projection_keeps_rank_over_dimension_of_the_squared_norm(directions):
    defense = rpdp(rank=40, scope="global", directions=directions)
    kept = [float(subspace_of(defense, seed=seed)[1].project(ROWS).square().sum()) for seed in range(50)]
    whole = float(ROWS.square().sum())
    # Of 8 rows and 50 subspaces; the spread of one share is about sqrt(2 * 40) / 505.
    assert sum(kept) / 50 / whole == pytest.approx(40 / DIM, abs=6 * 80**0.5 / DIM / 400**0.5)


@pytest.mark.long
def test_rescaling_makes_the_update_right_on_average():
    defense = rpdp(clip_norm=1.0, rank=40, rescale=True, noise_multiplier=0.0)
    target = release(dp_sgd(clip_norm=1e9, noise_multiplier=0.0), ROWS, context_at()).total
    wide = rpdp(clip_norm=1e9, rank=40, rescale=True, noise_multiplier=0.0)

    def update(seed, method):
        context = context_at(seed=seed)
        _, plan = method.plan(None, context)
        return plan.post(release(method, ROWS, context).total)

    mean = torch.stack([update(seed, wide) for seed in range(200)]).mean(dim=0)
    assert float((mean - target).norm() / target.norm()) < 0.3
    plain = torch.stack([update(seed, rpdp(clip_norm=1e9, rank=40, noise_multiplier=0.0)) for seed in range(50)])
    assert float(plain.mean(dim=0).norm() / target.norm()) < 0.4
    assert float(update(0, defense).norm()) > 0


@EITHER
def test_directions_last_for_the_interval(directions):
    defense = rpdp(rank=10, interval=3, directions=directions)
    state, first = subspace_of(defense, 0)
    state, third = subspace_of(defense, 2, state)
    _, fourth = subspace_of(defense, 3, state)
    assert torch.equal(first.bases[0], third.bases[0])
    assert not torch.equal(third.bases[0], fourth.bases[0])
    assert not torch.equal(first.bases[0][:200, :5], first.bases[1][:200, :5])


@EITHER
def test_clipping_first_releases_the_whole_gradient(directions):
    _, plan = rpdp(rank=10, clip_first=True, directions=directions).plan(None, context_at())
    assert isinstance(plan.blocks[0].codec, Everything)
    projected = plan.post(ROWS[0])
    torch.testing.assert_close(plan.post(projected), projected, rtol=1e-4, atol=1e-5)
    assert projected.norm() < 0.6 * ROWS[0].norm()


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        rpdp(rank=0)
    with pytest.raises(ValueError, match="interval must be at least 1, got 0"):
        rpdp(interval=0)


@pytest.mark.parametrize(("numbers", "rank", "seeds"), [(6, 3, 2000), (40, 39, 100), (1024, 512, 5), (4000, 300, 2)])
def test_random_directions_are_orthonormal_also_where_vectors_are_nearly_parallel_by_chance(numbers, rank, seeds):
    for seed in range(seeds):
        basis = public_subspaces._random_basis(numbers, rank, torch.Generator().manual_seed(seed))
        assert basis.shape == (numbers, rank) and orthonormality_error(basis) < 3e-6


def sketched(noise_multiplier):
    return rpdp(rank=6, interval=2, clip_norm=0.1, directions="sketch", noise_multiplier=noise_multiplier)


@pytest.mark.long
def test_directions_of_a_sketch_have_the_duties_of_every_defense(tmp_path):
    rows = torch.randn(6, duties.DIM, generator=torch.Generator().manual_seed(7))
    for moment in duties.histories(sketched):
        for scale in (1e-3, 1.0, 1e6):
            duties.check_bound(moment.plan, scale * rows)
        duties.check_bound_is_reached(moment.plan)
    duties.check_ledger(sketched)
    for world in duties.WORLDS.values():
        duties.check_removal(sketched, world)
    duties.check_noise(sketched)
    duties.check_interruption(sketched, tmp_path)
