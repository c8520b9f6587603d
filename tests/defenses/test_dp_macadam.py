"""What is particular to DP-MacAdam: centre and scales follow releases, and Adam takes what was scaled back."""

import math

import pytest
import torch

from leakbench.defenses.core import Context, release, seeded
from leakbench.defenses.dp_adam import dp_adam
from leakbench.defenses.dp_macadam import dp_macadam

from ..parameters import subtests

ROWS = torch.tensor([[0.3, -0.4], [0.1, 0.2], [-0.5, 0.1]], dtype=torch.float64)


def context_at(step):
    return Context(step=step, steps=9, dim=2, expected_batch=3.0, noise_multiplier=0.5)


def test_the_first_step_is_dp_adams():
    ours, theirs = (make(clip_norm=0.25, noise_multiplier=0.5) for make in (dp_macadam, dp_adam))
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    context = Context(step=0, steps=9, dim=40, expected_batch=6.0, noise_multiplier=0.5)
    updates = []
    for defense in (ours, theirs):
        state, plan = defense.plan(defense.start(context), context)
        updates.append(plan.post(release(defense, rows, context, noise=seeded(1), state=state).total / 6))
    torch.testing.assert_close(*updates, rtol=1e-5, atol=1e-6)


def test_three_steps_by_hand():
    """The paper's lines one by one, on two numbers."""
    beta1, beta2, sigma, batch, low, high = 0.6, 0.9, 0.5, 3.0, 1e-4, 1e3
    defense = dp_macadam(clip_norm=0.25, beta1=beta1, beta2=beta2, lowest=low, highest=high, noise_multiplier=sigma)
    state = defense.start(context_at(0))
    m, v, s = (torch.zeros(2, dtype=torch.float64) for _ in range(3))
    b, centre = torch.full((2,), 0.25, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for t in (1, 2, 3):
        context = context_at(t - 1)
        state, plan = defense.plan(state, context)
        out = release(defense, ROWS, context, noise=seeded(t), state=state)
        scaled = (ROWS - centre) / b
        noise = out.noisy[0] - (scaled / scaled.norm(dim=1, keepdim=True).clamp(min=1)).sum(dim=0)
        assert float(noise.abs().max()) < 6 * sigma  # what was released is what the paper's line says, and noise
        g = b * out.noisy[0] / batch + centre
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        before, centre = centre, m / (1 - beta1**t)
        s = beta1 * s + (1 - beta1) * (g - centre) * (g - before)
        step = centre / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        torch.testing.assert_close(plan.post(out.total / batch).double(), step, rtol=1e-4, atol=1e-6)
        if t > 1:
            kappa = 2 * (beta1 - beta1**t) / (1 + beta1)
            variance = (s / kappa - b**2 * sigma**2 / batch**2).clamp(
                low * 0.25**2 / 2, high * 0.25**2 / 2
            )  # of two numbers
            b = variance**0.25 * variance.sqrt().sum().sqrt()
        state = defense.observe(state, context, out.noisy, out.total / batch)
        torch.testing.assert_close(state["scales"].double(), b, rtol=1e-4, atol=1e-7)
    assert float((b - 0.25).abs().max()) > 0.01


def test_the_spread_over_kappa_is_the_variance_of_releases_less_that_of_the_noise():
    """Constant sums under noise of known size: nothing but noise is seen, and the estimate is 0 on average."""
    dim, sigma, batch = 20_000, 2.0, 10.0
    defense = dp_macadam(clip_norm=0.5, noise_multiplier=sigma)
    coins, state = torch.Generator().manual_seed(0), {}
    for step in range(12):
        context = Context(step=step, steps=12, dim=dim, expected_batch=batch, noise_multiplier=sigma)
        state = state or defense.start(context)
        # The same scales in every step, so that all releases have noise of one size, about one mean.
        state["scales"] = torch.full((dim,), 0.5)
        centre = state["first"] / (1 - 0.9**step) if step else state["first"]
        noisy = (0.3 - centre) * batch / 0.5 + sigma * torch.randn(dim, generator=coins)
        state = defense.observe(state, context, (noisy,), torch.zeros(dim))
        kappa = 2 * (0.9 - 0.9 ** (step + 1)) / 1.9
        if step:
            found = float(state["spread"].mean()) / kappa
            assert found == pytest.approx((0.5 * sigma / batch) ** 2, rel=0.05)
            # With squares about the centre that follows alone it would be nine tenths of that.
            assert found != pytest.approx(0.9 * (0.5 * sigma / batch) ** 2, rel=0.05)


def test_scales_are_clamped_and_add_up():
    defense = dp_macadam(clip_norm=2.0, lowest=0.01, highest=0.01, noise_multiplier=0.5)
    context, state = context_at(1), defense.start(context_at(0))
    state = defense.observe(state, context, (torch.tensor([5.0, -3.0]),), torch.zeros(2))
    # All variances are 0.01 * 2^2 / 2, so that b = 0.02^(1/4) (2 * 0.02^(1/2))^(1/2), C times the root of 0.01.
    torch.testing.assert_close(state["scales"], torch.full((2,), 0.02**0.25 * math.sqrt(2 * math.sqrt(0.02))))
    torch.testing.assert_close(state["scales"], torch.full((2,), 2.0 * 0.1))


@subtests(
    "settings",
    [{"beta1": 0.0}, {"beta2": 1.0}, {"stabiliser": 0.0}, {"lowest": 2.0, "highest": 1.0}, {"clip_norm": 0.0}],
)
def test_what_makes_no_sense_is_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        dp_macadam(**settings)
