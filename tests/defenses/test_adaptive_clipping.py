"""What is particular to adaptive clipping: what the count costs, and where the clip norm goes."""

import math

import pytest
import torch

from defenses.adaptive_clipping import adaptive_clipping
from defenses.core import Context, release
from defenses.dp_sgd import dp_sgd

from . import duties


@pytest.mark.parametrize(("sigma", "count_noise"), [(1.0, 2.0), (1.5, 1.0), (0.7, 10.0)])
def test_gradients_pay_for_the_count_by_the_formula_of_the_paper(sigma, count_noise):
    """1 / sigma^2 = 1 / z^2 + 1 / (2 s_b)^2, with s_b in examples."""
    defense = adaptive_clipping(clip_norm=0.5, share=(sigma / (2 * count_noise)) ** 2)
    gradients, count = defense.plan(0.5, Context(step=0, steps=1, dim=4))[1].blocks
    assert count.noise_std(sigma) == pytest.approx(count_noise)
    assert gradients.noise_std(sigma) == pytest.approx((sigma**-2 - (2 * count_noise) ** -2) ** -0.5 * 0.5)
    whitened = [block.noise_std(sigma) / block.bound.sensitivity for block in (gradients, count)]
    assert sum(w**-2 for w in whitened) == pytest.approx(sigma**-2)


def test_the_clip_norm_settles_at_the_quantile_of_the_norms():
    defense = adaptive_clipping(rate=0.2, quantile=0.75, noise_multiplier=0.0)
    rows = torch.eye(100) * torch.arange(1.0, 101.0)
    state = 1.0
    for step in range(400):
        context = Context(step=step, steps=400, dim=100, expected_batch=100.0)
        out = release(defense, rows, context, state=state)
        state = defense.observe(state, context, out.noisy, out.total)
    assert state == pytest.approx(75, abs=1)


def test_one_step_of_the_clip_norm_by_hand():
    # Two of four norms are within 1: a fraction of 0.5, against a wanted 0.9.
    rows = torch.tensor([[0.5, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    defense = adaptive_clipping(rate=0.2, quantile=0.9, noise_multiplier=0.0)
    context = Context(step=0, steps=1, dim=2, expected_batch=4.0)
    out = release(defense, rows, context, state=1.0)
    assert float(out.noisy[1]) == 0.0
    torch.testing.assert_close(out.total, torch.tensor([1.5, 2.0]))  # the count is no part of it
    assert defense.observe(1.0, context, out.noisy, out.total) == pytest.approx(math.exp(0.2 * 0.4))


def test_the_clip_norm_stays_within_its_range_whatever_the_noise_of_a_count_is():
    defense = adaptive_clipping(lowest=0.5, highest=2.0)
    context = Context(step=0, steps=1, dim=2, expected_batch=1e-3)
    for count, end in ((1e6, 0.5), (-1e6, 2.0)):
        assert defense.observe(1.0, context, (torch.zeros(2), torch.tensor([count])), torch.zeros(2)) == end


def test_at_rate_0_it_is_dp_sgd_at_the_noise_that_the_count_leaves():
    share = 0.19  # so that gradients have noise of sigma / 0.9
    ours = adaptive_clipping(clip_norm=0.5, rate=0.0, share=share, noise_multiplier=0.9)
    plan = ours.plan(0.5, Context(step=3, steps=4, layout=duties.LAYOUT))[1]
    theirs = dp_sgd(clip_norm=0.5, noise_multiplier=1.0).plan(None, Context(step=3, steps=4, layout=duties.LAYOUT))[1]
    assert plan.at(0.9).stds[0] == pytest.approx(theirs.at(1.0).stds[0])
    assert duties.trained(ours).state == 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"share": 1.0},
        {"share": 0.0},
        {"quantile": 1.5},
        {"rate": -0.1},
        {"clip_norm": 2e3},
        {"lowest": 0.0},
        {"highest": 1e300},
    ],
)
def test_what_makes_no_sense_is_refused(settings):
    with pytest.raises(ValueError, match="must"):
        adaptive_clipping(**settings)
