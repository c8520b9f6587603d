"""What is particular to DP-SNIP: its release, what it costs, and what it finds."""

import math

import pytest
import torch

from leakbench.audit.targets.simulated_update import simulate_share
from leakbench.defenses.core import Context, full, poisson, predict, train
from leakbench.defenses.dp_snip import dp_snip
from leakbench.defenses.snip import snip

from . import duties


def test_each_example_is_clipped_and_the_release_has_the_noise_that_it_is_charged_by():
    """Not the score of the whole data set: that one example may move by twice its clip norm."""
    seen = []

    def one_off(plan, step):
        seen.append(plan)
        return (torch.zeros(duties.DIM),)

    weights = torch.linspace(-1, 1, duties.DIM)
    context = Context(step=0, steps=1, layout=duties.LAYOUT, parameters=weights, one_off=one_off)
    dp_snip(score_clip_norm=0.3, mask_noise_multiplier=5.0).start(context)
    (plan,) = seen
    (block,) = plan.blocks
    assert plan.noise_multiplier == 5.0 and plan.stds == [pytest.approx(5.0 * 0.3)]
    rows = torch.randn(4, duties.DIM, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block.codec.encode(rows), rows * weights)
    assert float(block.bound(block.codec.encode(100 * rows)).norm(dim=1).max()) == pytest.approx(0.3, rel=1e-5)


def test_the_mask_is_charged_in_the_ledger_of_the_steps():
    """G(8) and 100 sampled steps, composed by the accountant; the same delta for both."""
    import dp_accounting

    defense = dp_snip(mask_noise_multiplier=8.0, noise_multiplier=1.1)
    ledger = predict(defense, sampling=poisson(0.02), steps=100)
    assert [(e.one_off, e.noise_multiplier, e.steps) for e in ledger.entries] == [(True, 8.0, 1), (False, 1.1, 100)]
    event = dp_accounting.ComposedDpEvent([
        dp_accounting.GaussianDpEvent(8.0),
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.1)), 100
        ),
    ])  # fmt: skip
    alone = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(1e-5)
    assert ledger.claim(1e-5).epsilon == pytest.approx(alone, rel=2e-3)
    run = duties.trained(defense)
    assert run.ledger.entries[0].one_off and run.ledger.entries[0].sampling == full()


def test_noise_in_the_mask_alone_is_noise_of_the_run_and_an_assumption_of_its_claim():
    noisy = duties.trained(dp_snip(mask_noise_multiplier=8.0, noise_multiplier=0.0))
    assert noisy.noise == "seeded" and any("follows from a seed" in one for one in noisy.claim(1e-5).assumes)
    assert duties.trained(snip(noise_multiplier=0.0)).noise == "none"
    inputs, labels = duties.DATA
    model, both = duties.network(), []
    for defense in (dp_snip(mask_noise_multiplier=8.0, noise_multiplier=0.0), snip(noise_multiplier=0.0)):
        shared = simulate_share(model, inputs[:4], labels[:4], defense, noise=duties.seeded(0))
        both.append(shared.noise)
    assert both == ["seeded", "none"]


def test_with_little_noise_it_keeps_the_weights_that_the_loss_depends_on():
    """Inputs 3 to 5 are always zero, so that nothing depends on their weights."""
    inputs, labels = duties.DATA[0].clone(), duties.DATA[1]
    inputs[:, 3:] = 0.0
    defense = dp_snip(prune_rate=0.33, score_clip_norm=5.0, mask_noise_multiplier=1e-6, noise_multiplier=1.0)
    run = train(duties.network(), (inputs, labels), defense, sampling=full(), steps=1, lr=0.1)
    kept = torch.zeros(duties.DIM, dtype=torch.bool).index_fill(0, run.state, True)
    first = duties.LAYOUT.unflatten(kept.float())["0.weight"].bool()
    assert int((~kept).sum()) == int(0.33 * 36) == 11
    assert bool(first[:, :3].all()) and int((~first[:, 3:]).sum()) == 11


def test_with_much_noise_the_mask_is_random():
    defense = dp_snip(prune_rate=0.5, mask_noise_multiplier=1e6, noise_multiplier=1.0)
    masks = {tuple(duties.trained(defense, noise=duties.seeded(seed)).state.tolist()) for seed in range(4)}
    assert len(masks) == 4


def test_a_mask_without_noise_is_another_method():
    for wrong in (math.inf, 1e-9):
        with pytest.raises(ValueError, match="mask_noise_multiplier must be 0 for no noise, or in"):
            dp_snip(mask_noise_multiplier=wrong)
    with pytest.raises(ValueError, match=r"mask_noise_multiplier must be positive, got 0\.0; without noise it is snip"):
        dp_snip(mask_noise_multiplier=0.0)
    assert math.isfinite(predict(dp_snip(noise_multiplier=1.0), sampling=full(), steps=1).claim(1e-5).epsilon)
