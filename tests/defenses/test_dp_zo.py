"""What is particular to DP-ZO: one number a step along a public direction, an unbiased estimate of the gradient."""

import pytest
import torch

from leakbench.defenses.core import Context, Subspace, release, seeded
from leakbench.defenses.dp_zo import dp_zo

from . import duties

ROWS = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))


def test_a_step_releases_one_number_and_moves_along_one_direction():
    defense = dp_zo(clip_norm=0.5, noise_multiplier=1.2)
    context = Context(step=3, steps=9, dim=50, expected_batch=8.0)
    plan = defense.plan(None, context)[1]
    (block,) = plan.blocks
    assert isinstance(block.codec, Subspace) and block.codec.size == 1
    direction = block.codec.bases[0][:, 0]
    out = release(defense, ROWS, context, noise=seeded(5))
    slopes = (ROWS @ direction).clamp(-0.5, 0.5)
    expected = slopes.sum() + float(duties.noise_of(5, 1, 1.2 * 0.5))
    assert float(out.noisy[0]) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(plan.post(out.total / 8), 50 * expected / 8 * direction)


@pytest.mark.long
def test_without_clipping_the_update_is_the_gradient_on_average():
    defense = dp_zo(clip_norm=1e6, noise_multiplier=0.0)
    rows = ROWS[:, :10]
    gradient, found = rows.sum(dim=0), []
    for step in range(800):
        context = Context(step=step, steps=800, dim=10)
        plan = defense.plan(None, context)[1]
        found.append(plan.post(release(defense, rows, context).total))
    mean, spread = torch.stack(found).mean(dim=0), torch.stack(found).std(dim=0) / 800**0.5
    assert float(((mean - gradient) / spread).abs().max()) < 5
    assert float(((0.5 * mean - gradient) / spread).abs().max()) > 5  # and half of it would be noticed
