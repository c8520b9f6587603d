"""What is particular to random sparsification: its masks, their schedule, and what they do to signal and noise."""

import math

import pytest
import torch

from leakbench.defenses.core import Context, Coordinates, poisson, predict, release, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.random_sparsification import random_sparsification

from ..parameters import subtests
from . import duties

ROWS = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))


def kept(defense, step=0, *, steps=10, per_epoch=1, dim=50, seed=0):
    context = Context(step=step, steps=steps, steps_per_epoch=per_epoch, dim=dim, seed=seed)
    codec = defense.plan(None, context)[1].blocks[0].codec
    assert isinstance(codec, Coordinates)
    return codec.kept


def released(defense, step=9, rows=ROWS, seed=1):
    context = Context(step=step, steps=10, dim=rows.shape[1])
    return release(defense, rows, context, noise=seeded(seed)).total


def test_without_sparsity_it_is_dp_sgd_to_the_same_noise_draw():
    sparse = random_sparsification(clip_norm=0.7, final_sparsity=0.0, noise_multiplier=1.3)
    assert torch.equal(released(sparse), released(dp_sgd(clip_norm=0.7, noise_multiplier=1.3)))


def test_the_first_epoch_keeps_everything_and_so_does_a_single_one():
    assert kept(random_sparsification(final_sparsity=0.9)).numel() == 50
    assert kept(random_sparsification(final_sparsity=0.9), 3, steps=4, per_epoch=4).numel() == 50


def test_sparsity_grows_linearly_over_the_epochs():
    sparse = random_sparsification(final_sparsity=0.8)
    sizes = [kept(sparse, step, steps=10, per_epoch=2).numel() for step in range(10)]
    assert sizes == [50, 50, 40, 40, 30, 30, 20, 20, 10, 10]


def test_refreshes_cut_an_epoch_and_the_schedule_runs_over_all_of_them():
    # r = r* (e R + k) / (E R - 1): two epochs of six steps with three masks each, so fifths of 0.5 of 50.
    sparse = random_sparsification(final_sparsity=0.5, refreshes=3)
    masks = [kept(sparse, step, steps=12, per_epoch=6) for step in range(12)]
    assert [m.numel() for m in masks] == [50, 50, 45, 45, 40, 40, 35, 35, 30, 30, 25, 25]
    assert all(torch.equal(masks[2 * i], masks[2 * i + 1]) for i in range(6))


def test_as_many_refreshes_as_steps_draw_a_mask_a_step():
    sparse = random_sparsification(final_sparsity=0.5, refreshes=4, cooling=False)
    masks = {tuple(kept(sparse, step, steps=8, per_epoch=4).tolist()) for step in range(8)}
    assert len(masks) == 8


def test_more_refreshes_than_steps_are_one_a_step_and_end_at_the_final_sparsity():
    sparse, as_many = (random_sparsification(final_sparsity=0.5, refreshes=r) for r in (7, 4))
    for step in range(8):
        assert torch.equal(kept(sparse, step, steps=8, per_epoch=4), kept(as_many, step, steps=8, per_epoch=4))
    assert kept(sparse, 7, steps=8, per_epoch=4).numel() == 25


def test_without_cooling_sparsity_is_final_from_the_start():
    sparse = random_sparsification(final_sparsity=0.6, cooling=False)
    assert {kept(sparse, step).numel() for step in range(10)} == {20}


def test_masks_change_with_epoch_and_seed_and_with_nothing_else():
    sparse = random_sparsification(final_sparsity=0.5, cooling=False)
    assert torch.equal(kept(sparse, 2), kept(sparse, 2))
    assert not torch.equal(kept(sparse, 2), kept(sparse, 3))
    assert not torch.equal(kept(sparse, 2, seed=0), kept(sparse, 2, seed=1))


def test_dropped_coordinates_get_neither_signal_nor_noise():
    sparse = random_sparsification(clip_norm=1.0, final_sparsity=0.8, noise_multiplier=5.0)
    noisy = released(sparse)
    assert (noisy == 0).sum() == 40  # 80 % of 50, in the last epoch
    assert noisy[kept(sparse, 9)].ne(0).all()


def test_rows_are_masked_before_they_are_clipped():
    # The clip norm is spent on kept coordinates only: a long row fills it whatever was dropped.
    sparse = random_sparsification(clip_norm=2.0, final_sparsity=0.8, noise_multiplier=0.0)
    one = 100 * ROWS[:1]
    assert float(released(sparse, rows=one).norm()) == pytest.approx(2.0, rel=1e-5)
    dense_then_masked = released(dp_sgd(clip_norm=2.0, noise_multiplier=0.0), rows=one)[kept(sparse, 9)]
    assert float(dense_then_masked.norm()) < 1.5


@pytest.mark.parametrize("refreshes", [1, 3])
def test_no_coordinate_outside_of_a_steps_mask_moves_however_the_batch_is_cut(refreshes):
    # A public script redraws its mask every `batches // refreshes` loader batches, of which two make a step: an
    # odd quotient changes the mask inside a step, and coordinates get signal without noise.
    sparse = random_sparsification(final_sparsity=0.9, refreshes=refreshes, noise_multiplier=1.0, cooling=False)
    run = duties.trained(sparse, sampling=poisson(0.25), steps=12, momentum=0.0, microbatch=1)
    after = [s.parameters for s in run.transcript.steps[1:]] + [duties.parameters(run)]
    masks = []
    for step, moved_to in zip(run.transcript.steps, after, strict=True):
        assert step.plan and step.noisy
        codec = step.plan.blocks[0].codec
        assert isinstance(codec, Coordinates)
        moved = (moved_to != step.parameters).nonzero().squeeze(1)
        assert set(moved.tolist()) <= set(codec.kept.tolist())
        assert step.noisy[0].numel() == codec.size == duties.DIM - int(0.9 * duties.DIM)
        masks.append(tuple(codec.kept.tolist()))
    assert len(set(masks)) == 3 * refreshes  # three epochs of four steps


MASKS, D = 4000, 20
U = torch.arange(1.0, D + 1, dtype=torch.float64) / D


def many_masks():
    sparse = random_sparsification(final_sparsity=0.63, cooling=False)  # floor(0.63 * 20) = 12 dropped
    masks = torch.zeros(MASKS, D, dtype=torch.float64)
    for number in range(MASKS):
        masks[number, kept(sparse, number, steps=MASKS, dim=D)] = 1.0
    return masks


def test_masks_are_uniform_and_expectations_follow_the_kept_fraction():
    masks, rho = many_masks(), 8 / D
    assert (masks.sum(dim=1) == 8).all()
    # Each coordinate is kept rho of the time.
    deviation = (masks.mean(dim=0) - rho).abs().max() / math.sqrt(rho * (1 - rho) / MASKS)
    assert deviation < 6
    # E<m.u, u> = rho ||u||^2, with the variance of sampling without replacement.
    squares = U.square()
    products = masks @ squares
    variance = rho * (1 - rho) * D / (D - 1) * float((squares - squares.mean()).square().sum())
    assert abs(float(products.mean()) - rho * float(squares.sum())) < 6 * math.sqrt(variance / MASKS)
    assert float(products.var()) == pytest.approx(variance, rel=0.15)
    # rho ||u|| <= E||m.u|| <= sqrt(rho) ||u||, strictly for a vector that is neither flat nor of one entry.
    mean_norm, norm = float(products.sqrt().mean()), float(U.norm())
    assert rho * norm < mean_norm < math.sqrt(rho) * norm


def test_noise_energy_is_the_kept_fraction():
    sparse = random_sparsification(final_sparsity=0.6, cooling=False, noise_multiplier=1.0)
    none = torch.zeros(1, 50)
    draws = torch.stack([released(sparse, rows=none, seed=seed) for seed in range(400)])
    energy = float(draws.double().square().sum(dim=1).mean())
    assert energy == pytest.approx(20, abs=6 * math.sqrt(2 * 20 / 400))
    # E||m.xi|| / E||xi|| by the chi distribution: 20 of 50 coordinates.
    expected = math.sqrt(2) * math.exp(math.lgamma(21 / 2) - math.lgamma(20 / 2))
    assert float(draws.norm(dim=1).mean()) == pytest.approx(expected, abs=6 * math.sqrt(0.5 / 400))


@subtests("sparsity", [-0.1, 1.0, 2.0, float("nan")])
def test_a_sparsity_that_leaves_nothing_is_refused(sparsity):
    with pytest.raises(ValueError, match=r"final_sparsity must be in \[0, 1\), got"):
        random_sparsification(final_sparsity=sparsity)


def test_refreshes_below_one_are_refused():
    with pytest.raises(ValueError, match="refreshes must be at least 1, got 0"):
        random_sparsification(refreshes=0)


def test_without_noise_or_clipping_the_mask_is_the_same_and_nothing_is_proved():
    context = Context(step=9, steps=10, dim=50)
    usual = random_sparsification(clip_norm=0.7, noise_multiplier=1.3).plan(None, context)[1].blocks[0]
    without_noise = random_sparsification(clip_norm=0.7, without="noise", noise_multiplier=1.3)
    without_clipping = random_sparsification(clip_norm=0.7, without="clipping", noise_multiplier=1.3)
    for defense, sigma, kind in ((without_noise, 0.0, "clip"), (without_clipping, 1.3, "unbounded")):
        (block,) = defense.plan(None, context)[1].blocks
        assert isinstance(block.codec, Coordinates) and isinstance(usual.codec, Coordinates)
        assert torch.equal(block.codec.kept, usual.codec.kept)
        assert (defense.noise_multiplier, block.bound.kind, block.bound.norm) == (sigma, kind, 0.7)
        assert predict(defense, sampling=poisson(0.1), steps=2).claim(1e-5).epsilon == math.inf
