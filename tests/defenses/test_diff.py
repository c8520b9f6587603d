"""What is particular to DIFF: differences from the last update, which is added again with its noise."""

import pytest
import torch

from leakbench.defenses.core import Context, GradientLess, full, release, seeded, train
from leakbench.defenses.diff import diff
from leakbench.defenses.sgd import sgd

from . import duties

ROWS = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))


def test_without_noise_or_clipping_it_is_sgd_on_full_batches():
    run = train(
        duties.network(), duties.DATA, diff(clip_norm=1e6, noise_multiplier=0.0), sampling=full(), steps=6, lr=0.5
    )
    plain = train(duties.network(), duties.DATA, sgd(), sampling=full(), steps=6, lr=0.5)
    torch.testing.assert_close(duties.parameters(run), duties.parameters(plain), rtol=1e-4, atol=1e-5)


def test_a_step_by_hand():
    last = torch.linspace(-1, 1, 30)
    context = Context(step=1, steps=2, dim=30, update=last, expected_batch=8.0)
    defense = diff(clip_norm=0.5, noise_multiplier=1.1)
    plan = defense.plan(None, context)[1]
    (block,) = plan.blocks
    assert isinstance(block.query, GradientLess)
    away = ROWS - last
    clipped = away * (0.5 / away.norm(dim=1).clamp(min=0.5)).unsqueeze(1)
    expected = last + (clipped.sum(dim=0) + duties.noise_of(5, 30, 1.1 * 0.5)) / 8
    out = release(defense, ROWS, context, noise=seeded(5))
    torch.testing.assert_close(plan.post(out.total / 8), expected)


def test_old_noise_is_kept_where_little_of_a_correction_survives():
    """u' = (1 - a) u + a mean + noise with a = C / ||g - u|| << 1: variance 1 / (a (2 - a)) of a step's noise."""
    defense, batch, clip_norm = diff(clip_norm=0.1, noise_multiplier=1.0), 10, 0.1
    rows, noise, updates = torch.zeros(batch, 2000), seeded(3), []
    context = Context(step=0, steps=400, dim=2000, expected_batch=float(batch))
    for step in range(400):
        context = context.at(step, update=updates[-1] if updates else None)
        plan = defense.plan(None, context)[1]
        updates.append(plan.post(release(defense, rows, context, noise=noise).total / batch))
    a = clip_norm / float(updates[-1].norm())
    std = clip_norm / batch
    amplified = std * (1 / (a * (2 - a))) ** 0.5
    assert a < 0.5 and float(updates[-1].std()) == pytest.approx(amplified, rel=0.2)
    assert float(updates[-1].std()) > 1.2 * std


def test_the_first_step_has_a_clip_norm_of_its_own():
    defense = diff(clip_norm=0.5, first_clip_norm=2.0)
    assert defense.plan(None, Context(step=0, steps=2, dim=3))[1].blocks[0].bound.norm == 2.0
    later = Context(step=1, steps=2, dim=3, update=torch.ones(3))
    assert defense.plan(None, later)[1].blocks[0].bound.norm == 0.5
