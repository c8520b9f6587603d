"""What is particular to the recipe of De et al.: updates in units of the clip norm, and parts that go together."""

import dp_accounting
import pytest
import torch

from leakbench.defenses.core import CropAndFlip, poisson, predict
from leakbench.defenses.de_recipe import de_recipe
from leakbench.defenses.dp_sgd import dp_sgd

from . import duties


@pytest.mark.parametrize("clip_norm", [0.25, 1.0])
def test_it_is_dp_sgd_at_a_learning_rate_divided_by_the_clip_norm(clip_norm):
    one = duties.trained(de_recipe(clip_norm=clip_norm, noise_multiplier=1.3), lr=0.2)
    other = duties.trained(dp_sgd(clip_norm=clip_norm, noise_multiplier=1.3), lr=0.2 / clip_norm)
    torch.testing.assert_close(duties.parameters(one), duties.parameters(other), rtol=1e-6, atol=1e-6)
    assert duties.same(one.transcript.steps[0].noisy, other.transcript.steps[0].noisy)  # what is released is the same


def test_where_every_gradient_is_clipped_the_clip_norm_does_not_matter():
    """All gradients at 1e-3 and at 1e-4 are longer, so that their directions count, and noise in the same units."""
    one, other = (duties.trained(de_recipe(clip_norm=c, noise_multiplier=0.5)) for c in (1e-3, 1e-4))
    torch.testing.assert_close(duties.parameters(one), duties.parameters(other), rtol=1e-4, atol=1e-5)
    plain = duties.trained(dp_sgd(clip_norm=1e-4, noise_multiplier=0.5))
    assert float((duties.parameters(plain) - duties.parameters(other)).norm()) > 0.01


@pytest.mark.long
def test_all_parts_together_cost_what_a_step_of_dp_sgd_costs():
    """Views, averaging and the division add no event: the recipe's epsilon is that of its subsampled Gaussians."""
    run = duties.trained(
        de_recipe(clip_norm=0.7, noise_multiplier=2.3),
        duties.DRAWN,
        sampling=poisson(0.15),
        steps=9,
        momentum=0.0,
        average=0.99,
        augmentation=CropAndFlip(views=3, padding=1),
    )
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.15, dp_accounting.GaussianDpEvent(2.3)), 9
    )
    alone = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(1e-5)
    assert run.claim(1e-5).epsilon == pytest.approx(alone, rel=2e-3)


def test_a_large_batch_spends_what_another_accountant_says():
    """Batches of 4096 of 50,000, at noise multiplier 10 for 875 steps: 0.99 by an RDP accountant, to two places."""
    claim = predict(de_recipe(noise_multiplier=10.0), sampling=poisson(4096 / 50_000), steps=875).claim(1e-5)
    assert claim.epsilon_rdp == pytest.approx(0.99, abs=0.006)
    assert claim.epsilon < claim.epsilon_rdp
