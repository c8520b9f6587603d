"""What is particular to inverting gradients; the duties of every attack are in test_every_attack.py."""

import math

import pytest
import torch
from torch import Tensor

from attacks.core import Examples, Observation
from attacks.inverting_gradients import direction_mismatch, inverting_gradients

from . import toys


def conv_step(
    encoder: Tensor | None = None,
    *,
    noise: float | Tensor = 0.0,
    count: int = 1,
    clip_norm: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Observation, Examples]:
    model = toys.conv_net(seed=seed, dtype=dtype)
    dim = sum(p.numel() for p in model.parameters())
    encoder = torch.eye(dim, dtype=dtype) if encoder is None else encoder.to(dtype)
    drawn = toys.examples(count, (1, 8, 8), seed=seed)
    batch = Examples(ids=drawn.ids, inputs=drawn.inputs.to(dtype), labels=drawn.labels)
    std = torch.as_tensor(noise, dtype=dtype).expand(len(encoder)).clone()
    step = toys.Step(model=model, batch=batch, encoder=encoder, noise_std=std, clip_norm=clip_norm, seed=seed)
    return step.observe(labels=batch.labels, batch_size=count), batch


def parameters_of_conv_net() -> int:
    return sum(p.numel() for p in toys.conv_net().parameters())


def probe(count: int = 1) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=toys.generator(70), dtype=torch.float64)


def test_an_image_behind_a_linear_layer_is_found_to_40_db():
    shape = (1, 8, 8)
    truth = toys.examples(1, shape, seed=3)
    model = toys.linear_net(shape, seed=3)
    dim = sum(p.numel() for p in model.parameters())
    step = toys.Step(model=model, batch=truth, encoder=torch.eye(dim), noise_std=torch.zeros(dim))
    target = step.observe(labels=truth.labels, batch_size=1)
    result = inverting_gradients(target, toys.generator(0), iterations=1000, tv_weight=0.0)
    assert toys.psnr(result.inputs, truth.inputs) > 40
    assert result.status == "ok"


def test_the_objective_of_a_full_mask_and_of_an_identity_basis_is_that_of_a_dense_update():
    dim = parameters_of_conv_net()
    dense, batch = conv_step()
    everything, _ = conv_step(torch.eye(dim)[torch.ones(dim, dtype=torch.bool)])
    rotated, _ = conv_step(torch.linalg.qr(torch.randn(dim, dim, generator=toys.generator(71))).Q.double())
    expected = direction_mismatch(dense, batch.labels)(probe())
    assert expected > 0.01
    assert torch.equal(direction_mismatch(everything, batch.labels)(probe()), expected)
    torch.testing.assert_close(
        direction_mismatch(rotated, batch.labels)(probe()), expected, rtol=1e-5, atol=0
    )  # a float32 rotation is orthonormal to 1e-6


def test_the_mismatch_is_one_minus_the_cosine_over_the_released_coordinates():
    dim = parameters_of_conv_net()
    kept = torch.rand(dim, generator=toys.generator(72)) < 0.2
    target, batch = conv_step(torch.eye(dim)[kept])
    simulated = target.simulate(probe(), batch.labels)
    cosine = torch.nn.functional.cosine_similarity(simulated, target.released, dim=0)
    torch.testing.assert_close(direction_mismatch(target, batch.labels)(probe()), 1 - cosine)


def test_zeros_that_a_mask_fills_in_do_not_pull_the_image():
    """Shared dense with zeros off the mask, or as kept coordinates only: the mismatch is one number."""
    dim = parameters_of_conv_net()
    kept = torch.rand(dim, generator=toys.generator(73)) < 0.3
    wire, batch = conv_step(torch.eye(dim)[kept])
    filled, _ = conv_step(torch.diag(kept.double()))
    torch.testing.assert_close(
        direction_mismatch(wire, batch.labels)(probe()), direction_mismatch(filled, batch.labels)(probe())
    )


def test_two_parts_are_weighed_by_their_noise():
    dim = parameters_of_conv_net()
    noise = torch.where(torch.arange(dim) < dim // 2, 0.1, 2.0)
    target, batch = conv_step(noise=noise)
    white_shared = target.released / noise
    white_simulated = target.simulate(probe(), batch.labels) / noise
    cosine = torch.nn.functional.cosine_similarity(white_shared, white_simulated, dim=0)
    torch.testing.assert_close(direction_mismatch(target, batch.labels)(probe()), 1 - cosine)


@pytest.mark.parametrize("release", ["dense", "masked", "projected", "noisy", "batch of two, clipped"])
def test_its_gradient_agrees_with_finite_differences(release):
    dim = parameters_of_conv_net()
    coins = toys.generator(74)
    options: dict[str, tuple[Observation, Examples]] = {
        "dense": conv_step(),
        "masked": conv_step(torch.eye(dim)[torch.rand(dim, generator=coins) < 0.1]),
        "projected": conv_step(torch.randn(40, dim, generator=coins)),
        "noisy": conv_step(noise=torch.rand(dim, generator=coins) + 0.1),
        "batch of two, clipped": conv_step(count=2, clip_norm=0.3),
    }
    target, batch = options[release]
    mismatch = direction_mismatch(target, batch.labels)
    point = probe(len(batch)).requires_grad_()
    (gradient,) = torch.autograd.grad(mismatch(point), point)
    direction = torch.randn(point.shape, generator=coins, dtype=torch.float64)
    h = 1e-5
    with torch.no_grad():
        slope = (mismatch(point + h * direction) - mismatch(point - h * direction)) / (2 * h)
    assert (gradient * direction).sum().item() == pytest.approx(slope.item(), rel=1e-5)


def test_the_scale_of_the_update_does_not_matter():
    """A cosine: neither the clip factor nor the expected_batch of the release has to be guessed."""
    plain, batch = conv_step()
    clipped, _ = conv_step(clip_norm=1e-3)
    torch.testing.assert_close(
        direction_mismatch(plain, batch.labels)(probe()), direction_mismatch(clipped, batch.labels)(probe())
    )


def test_of_several_starts_the_one_with_the_smallest_objective_is_returned():
    target, _ = conv_step(dtype=torch.float32)
    coins = toys.generator(5)
    alone = [inverting_gradients(target, coins, iterations=30).objective for _ in range(3)]
    together = inverting_gradients(target, toys.generator(5), iterations=30, restarts=3)
    assert together.objective == min(alone)
    assert together.restarts == 3
    assert together.history is not None and together.history.shape == (3, 30)


def test_the_result_is_the_best_iterate_and_lies_in_the_box():
    target, batch = conv_step(dtype=torch.float32)
    result = inverting_gradients(target, toys.generator(6), iterations=50, tv_weight=0.0)
    assert result.history is not None
    assert result.objective == result.history.min().item()
    assert direction_mismatch(target, batch.labels)(result.inputs).item() == pytest.approx(result.objective, rel=1e-2)
    assert result.inputs.min() >= 0 and result.inputs.max() <= 1


def test_the_range_of_the_inputs_is_immaterial():
    """Inputs in [0, 255] behind a model that divides by 255 are found as those in [0, 1] are."""

    class Scaled(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor) -> Tensor:
            return self.model(inputs / 255)

    batch = toys.examples(1, (1, 8, 8), seed=0)
    wide = Examples(ids=batch.ids, inputs=255 * batch.inputs, labels=batch.labels)
    model = toys.conv_net()
    dim = parameters_of_conv_net()
    found = []
    for network, data, high in ((model, batch, 1.0), (Scaled(model), wide, 255.0)):
        step = toys.Step(model=network, batch=data, encoder=torch.eye(dim), noise_std=torch.zeros(dim), high=high)
        target = step.observe(labels=data.labels, batch_size=1)
        found.append(inverting_gradients(target, toys.generator(7), iterations=100).inputs / high)
    assert toys.psnr(found[0], found[1]) > 25


def test_an_update_of_noise_is_called_degraded():
    target, _ = conv_step(noise=1e3, dtype=torch.float32)
    assert inverting_gradients(target, toys.generator(8), iterations=40).status == "degraded"


def test_a_gradient_that_is_not_finite_is_called_failed():
    target, _ = conv_step(dtype=torch.float32)
    broken = Observation(
        **{**vars(target), "simulate": lambda x, y: (x.sum() * math.nan).expand(parameters_of_conv_net())}
    )
    result = inverting_gradients(broken, toys.generator(9), iterations=5)
    assert result.status == "failed"
    assert result.inputs.isfinite().all()


def test_inputs_that_are_not_images_have_no_total_variation():
    truth = toys.examples(1, (16,), seed=4)
    model = toys.linear_net((16,), seed=4)
    dim = sum(p.numel() for p in model.parameters())
    step = toys.Step(model=model, batch=truth, encoder=torch.eye(dim), noise_std=torch.zeros(dim))
    target = step.observe(labels=truth.labels, batch_size=1)
    smooth, rough = (
        inverting_gradients(target, toys.generator(0), iterations=50, tv_weight=w).inputs for w in (10.0, 0.0)
    )
    assert torch.equal(smooth, rough)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"restarts": 0}, "restarts must be at least 1, got 0"),
        ({"tv_weight": -1.0}, r"tv_weight must be at least 0, got -1\.0"),
        ({"lr": 0.0}, r"lr must be positive, got 0\.0"),
        ({"iterations": 1.5}, r"iterations of inverting_gradients must be of type int, got 1\.5"),
        ({"restart": 2}, "did you mean 'restarts'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        inverting_gradients(conv_step(dtype=torch.float32)[0], **settings)
