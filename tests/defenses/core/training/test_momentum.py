"""What noise does through momentum: numbers worked out by hand, PyTorch's optimizer, and runs."""

import math

import pytest
import torch

from leakbench.defenses.core import displacement_std, full, rescale_for_momentum, velocity_std
from leakbench.defenses.dp_sgd import dp_sgd

from ... import duties


def test_a_clip_norm_of_a_tenth_at_momentum_nine_tenths_is_one_without():
    assert rescale_for_momentum(0.1, momentum=0.9, to=0.0) == pytest.approx(1.0)
    assert rescale_for_momentum(1.0, momentum=0.0, to=0.9) == pytest.approx(0.1)
    assert rescale_for_momentum(0.3, momentum=0.5, to=0.5) == pytest.approx(0.3)


def test_displacements_are_those_worked_out_by_hand():
    # Two steps at momentum 1/2: the first draw is added 1 + 1/2 times, the second once; 1.5^2 + 1 = 3.25.
    assert displacement_std(2.0, momentum=0.5, lr=0.1, steps=2) == pytest.approx(0.2 * math.sqrt(3.25))
    assert displacement_std(3.0, momentum=0.0, lr=1.0, steps=16) == pytest.approx(12.0)
    # In units of sqrt(steps): 9.83 after 400 steps at momentum 0.9, on its way to 10.
    assert displacement_std(1.0, momentum=0.9, lr=1.0, steps=400) / 20 == pytest.approx(9.83, abs=0.005)
    assert displacement_std(1.0, momentum=0.9, lr=1.0, steps=10**6) / 1000 == pytest.approx(10, rel=1e-4)
    assert velocity_std(1.0, momentum=0.9) == pytest.approx(2.294, abs=5e-4)


def test_pytorchs_sgd_moves_by_them():
    coins, size = torch.Generator().manual_seed(0), 20_000
    walker = torch.zeros(size, requires_grad=True)
    optimizer = torch.optim.SGD([walker], lr=0.3, momentum=0.8)
    for _ in range(30):
        walker.grad = torch.randn(size, generator=coins)
        optimizer.step()
    # A standard deviation of 20,000 numbers is known to 0.5 %; a fresh seed is 3 % off once in a billion.
    expected = displacement_std(1.0, momentum=0.8, lr=0.3, steps=30)
    assert float(walker.detach().std()) == pytest.approx(expected, rel=0.03)
    velocity = optimizer.state[walker]["momentum_buffer"]
    assert float(velocity.std()) == pytest.approx(velocity_std(1.0, momentum=0.8), rel=0.03)


def moved(momentum, clip_norm):
    """Where a run of 100 steps goes whose gradients are all clipped, and whose noise is next to nothing."""
    defense = dp_sgd(clip_norm=clip_norm, noise_multiplier=1e-6)
    run = duties.trained(defense, momentum=momentum, steps=100, lr=1.0, sampling=full(), observer="final")
    return duties.parameters(run) - duties.LAYOUT.read(duties.network())


@pytest.mark.long
def test_clipped_gradients_move_as_far_at_another_momentum_but_for_what_it_holds_back_at_the_end():
    plain, rescaled = moved(0.0, 1e-4), moved(0.9, rescale_for_momentum(1e-4, momentum=0.0, to=0.9))
    # A step's share is 1 - 0.9^j with j steps left: of 100 steps, 9 are held back.
    torch.testing.assert_close(rescaled, 0.91 * plain, rtol=0.02, atol=2e-5)
    assert float(moved(0.9, 1e-4).norm() / plain.norm()) == pytest.approx(9.1, rel=0.02)


@pytest.mark.parametrize("bad", [{"momentum": 1.0, "to": 0.0}, {"momentum": 0.0, "to": -0.1}])
def test_momenta_outside_of_their_range_are_refused(bad):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\), got"):
        rescale_for_momentum(1.0, **bad)
