"""Objectives of gradient matching: what they compare, and that they can be descended."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from leakbench.attacks.core import Examples, NotApplicable, Observation
from leakbench.attacks.core.search.gradient_matching import (
    direction_mismatch,
    direction_mismatches,
    layer_weights,
    squared_distance,
)

from ..parameters import subtests
from . import toys


def test_the_objective_of_a_full_mask_and_of_an_identity_basis_is_that_of_a_dense_update():
    dim = toys.parameters_of_conv_net()
    dense, batch = toys.conv_step()
    everything, _ = toys.conv_step(torch.eye(dim)[torch.ones(dim, dtype=torch.bool)])
    rotated, _ = toys.conv_step(torch.linalg.qr(torch.randn(dim, dim, generator=toys.generator(71))).Q.double())
    expected = direction_mismatch(dense)(toys.probe(), batch.labels)
    assert expected > 0.01
    assert torch.equal(direction_mismatch(everything)(toys.probe(), batch.labels), expected)
    torch.testing.assert_close(
        direction_mismatch(rotated)(toys.probe(), batch.labels), expected, rtol=1e-5, atol=0
    )  # a float32 rotation is orthonormal to 1e-6


def test_the_mismatch_is_one_minus_the_cosine_over_the_released_coordinates():
    dim = toys.parameters_of_conv_net()
    kept = torch.rand(dim, generator=toys.generator(72)) < 0.2
    target, batch = toys.conv_step(torch.eye(dim)[kept])
    simulated = target.simulate(toys.probe(), batch.labels)
    cosine = torch.nn.functional.cosine_similarity(simulated, target.released, dim=0)
    torch.testing.assert_close(direction_mismatch(target)(toys.probe(), batch.labels), 1 - cosine)


def test_an_update_of_zeros_matches_nothing():
    dim = toys.parameters_of_conv_net()
    target, batch = toys.conv_step(torch.eye(dim)[: dim // 2])
    nothing = replace(target, released=0 * target.released, residual=lambda predicted: -predicted, compare_many=None)
    probes = torch.stack([toys.probe(), toys.probe()])
    assert float(direction_mismatch(nothing)(toys.probe(), batch.labels)) == pytest.approx(1)
    assert direction_mismatches(nothing)(probes, batch.labels).tolist() == pytest.approx([1, 1])
    silent = replace(target, simulate=lambda x, y: 0 * target.simulate(x, y))
    assert float(direction_mismatch(silent)(toys.probe(), batch.labels)) == pytest.approx(1)


def test_zeros_that_a_mask_fills_in_do_not_pull_the_image():
    """Shared dense with zeros off the mask, or as kept coordinates only: the mismatch is one number."""
    dim = toys.parameters_of_conv_net()
    kept = torch.rand(dim, generator=toys.generator(73)) < 0.3
    wire, batch = toys.conv_step(torch.eye(dim)[kept])
    filled, _ = toys.conv_step(torch.diag(kept.double()))
    torch.testing.assert_close(
        direction_mismatch(wire)(toys.probe(), batch.labels), direction_mismatch(filled)(toys.probe(), batch.labels)
    )


def test_two_parts_are_weighed_by_their_noise():
    dim = toys.parameters_of_conv_net()
    noise = torch.where(torch.arange(dim) < dim // 2, 0.1, 2.0)
    target, batch = toys.conv_step(noise=noise)
    white_shared = target.released / noise
    white_simulated = target.simulate(toys.probe(), batch.labels) / noise
    cosine = torch.nn.functional.cosine_similarity(white_shared, white_simulated, dim=0)
    torch.testing.assert_close(direction_mismatch(target)(toys.probe(), batch.labels), 1 - cosine)


def test_the_squared_distance_is_in_units_of_the_noise_and_takes_class_probabilities():
    target, batch = toys.conv_step(noise=0.5)
    sure = torch.nn.functional.one_hot(batch.labels, target.classes).double()
    expected = ((target.released - target.simulate(toys.probe(), batch.labels)) / 0.5).square().sum()
    torch.testing.assert_close(squared_distance(target)(toys.probe(), batch.labels), expected)
    torch.testing.assert_close(squared_distance(target)(toys.probe(), sure), expected)
    assert squared_distance(toys.conv_step()[0])(batch.inputs, batch.labels) == 0


@subtests("objective", [direction_mismatch, squared_distance])
@subtests("release", ["dense", "masked", "projected", "noisy", "batch of two, clipped"])
def test_its_gradient_agrees_with_finite_differences(release, objective):
    dim = toys.parameters_of_conv_net()
    coins = toys.generator(74)
    options: dict[str, tuple[Observation, Examples]] = {
        "dense": toys.conv_step(),
        "masked": toys.conv_step(torch.eye(dim)[torch.rand(dim, generator=coins) < 0.1]),
        "projected": toys.conv_step(torch.randn(40, dim, generator=coins)),
        "noisy": toys.conv_step(noise=torch.rand(dim, generator=coins) + 0.1),
        "batch of two, clipped": toys.conv_step(count=2, clip_norm=0.3),
    }
    target, batch = options[release]
    mismatch = partial(objective(target), labels=batch.labels)
    point = toys.probe(len(batch)).requires_grad_()
    (gradient,) = torch.autograd.grad(mismatch(point), point)
    direction = torch.randn(point.shape, generator=coins, dtype=torch.float64)
    h = 1e-5
    with torch.no_grad():
        slope = (mismatch(point + h * direction) - mismatch(point - h * direction)) / (2 * h)
    assert (gradient * direction).sum().item() == pytest.approx(slope.item(), rel=1e-5)


def test_the_scale_of_the_update_does_not_matter():
    """A cosine: neither the clip factor nor the expected_batch of the release has to be guessed."""
    plain, batch = toys.conv_step()
    clipped, _ = toys.conv_step(clip_norm=1e-3)
    torch.testing.assert_close(
        direction_mismatch(plain)(toys.probe(), batch.labels), direction_mismatch(clipped)(toys.probe(), batch.labels)
    )


@pytest.mark.parametrize(("kind", "of_last"), [("linear", 1 / 6), ("exp", 2.718281828459045**-5)])
def test_weights_by_layer_are_those_of_products_and_squares(kind, of_last):
    dim = toys.parameters_of_conv_net()
    kept = torch.rand(dim, generator=toys.generator(75)) < 0.5
    target, batch = toys.conv_step(torch.eye(dim)[kept])
    weights = layer_weights(target, kind)
    assert weights is not None and weights[0] == 1 and weights[-1] == pytest.approx(of_last)
    simulated, released = target.simulate(toys.probe(), batch.labels), target.released
    inner = (weights * simulated * released).sum()
    norms = (weights * simulated.square()).sum().sqrt() * (weights * released.square()).sum().sqrt()
    found = direction_mismatches(target, weights)(toys.probe()[None], batch.labels)
    torch.testing.assert_close(found, (1 - inner / norms)[None])
    plain = direction_mismatch(target)(toys.probe(), batch.labels)
    assert abs(found.item() - plain.item()) > 1e-3


def test_weights_by_layer_of_coefficients_are_refused():
    dim = toys.parameters_of_conv_net()
    rotated, _ = toys.conv_step(torch.linalg.qr(torch.randn(dim, dim, generator=toys.generator(71))).Q.double())
    assert layer_weights(rotated, "equal") is None
    with pytest.raises(NotApplicable, match="weighting 'exp' needs released coordinates"):
        layer_weights(rotated, "exp")
