"""What is particular to inverting gradients; the duties of every attack are in test_every_attack.py."""

import math

import pytest
import torch
from torch import Tensor

from leakbench.attacks.core import Examples, Observation
from leakbench.attacks.core.search.gradient_matching import direction_mismatch, squared_distances
from leakbench.attacks.core.search.restarts import side_by_side
from leakbench.attacks.inverting_gradients import inverting_gradients

from ..parameters import subtests
from . import toys


def test_an_image_behind_a_linear_layer_is_found_to_40_db():
    shape = (1, 8, 8)
    truth = toys.examples(1, shape, seed=3)
    model = toys.linear_net(shape, seed=3)
    dim = sum(p.numel() for p in model.parameters())
    step = toys.Step(model=model, batch=truth, encoder=torch.eye(dim), noise_std=torch.zeros(dim))
    target = step.observe(labels=truth.labels, batch_size=1)
    result = inverting_gradients(target, toys.generator(0), iterations=200, tv_weight=0.0)
    assert toys.psnr(result.inputs, truth.inputs) > 40
    assert result.status == "ok"


@pytest.mark.long
def test_of_several_starts_the_one_with_the_smallest_objective_is_returned():
    target, _ = toys.conv_step(dtype=torch.float32)
    coins = toys.generator(5)
    alone = [inverting_gradients(target, coins, iterations=30).objective for _ in range(3)]
    together = inverting_gradients(target, toys.generator(5), iterations=30, restarts=3)
    assert together.objective == min(alone)
    assert together.restarts == 3
    assert together.history is not None and together.history.shape == (3, 30)


@pytest.mark.long
def test_restarts_side_by_side_give_what_they_give_in_turn():
    target, _ = toys.conv_step(dtype=torch.float32)
    turn, side = (inverting_gradients(target, toys.generator(5), iterations=12, restarts=5, at_once=n) for n in (1, 3))
    assert turn.history is not None and side.history is not None
    torch.testing.assert_close(side.history, turn.history, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(side.inputs, turn.inputs, rtol=0, atol=1e-4)
    fewer = inverting_gradients(target, toys.generator(5), iterations=12, restarts=2).history
    assert fewer is not None
    torch.testing.assert_close(side.history[:2], fewer, rtol=1e-5, atol=1e-5)


def test_fewer_starts_descend_side_by_side_where_memory_does_not_suffice():
    sizes = []

    def descend(points):
        sizes.append(len(points))
        if len(points) > 3:
            raise torch.OutOfMemoryError("of a device")
        return points.tolist()

    starts = list(torch.arange(10.0))
    assert side_by_side(starts, None, descend) == list(range(10))
    assert sizes == [8, 4, 2, 2, 2, 2, 2]
    with pytest.raises(torch.OutOfMemoryError):  # as many as were asked for, or none
        side_by_side(starts, 5, descend)


def test_the_result_is_the_best_iterate_and_lies_in_the_box():
    target, batch = toys.conv_step(dtype=torch.float32)
    result = inverting_gradients(target, toys.generator(6), iterations=50, tv_weight=0.0)
    assert result.history is not None
    assert result.objective == result.history.min().item()
    assert direction_mismatch(target)(result.inputs, batch.labels).item() == pytest.approx(result.objective, rel=1e-2)
    assert result.inputs.min() >= 0 and result.inputs.max() <= 1


@pytest.mark.long
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
    dim = toys.parameters_of_conv_net()
    found = []
    for network, data, high in ((model, batch, 1.0), (Scaled(model), wide, 255.0)):
        step = toys.Step(model=network, batch=data, encoder=torch.eye(dim), noise_std=torch.zeros(dim), high=high)
        target = step.observe(labels=data.labels, batch_size=1)
        found.append(inverting_gradients(target, toys.generator(7), iterations=50).inputs / high)
    assert toys.psnr(found[0], found[1]) > 25


def test_an_update_of_noise_is_called_degraded():
    target, _ = toys.conv_step(noise=1e3, dtype=torch.float32)
    assert inverting_gradients(target, toys.generator(8), iterations=40).status == "degraded"


def test_a_gradient_that_is_not_finite_is_called_failed():
    target, _ = toys.conv_step(dtype=torch.float32)
    broken = Observation(
        **{**vars(target), "simulate": lambda x, y: (x.sum() * math.nan).expand(toys.parameters_of_conv_net())}
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


@subtests(
    "settings, sentence",
    [
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"restarts": 0}, "restarts must be at least 1, got 0"),
        ({"tv_weight": -1.0}, r"tv_weight must be at least 0, got -1\.0"),
        ({"at_once": 0}, "at_once must be at least 1, got 0"),
        ({"lr": 0.0}, r"lr must be positive and finite, got 0\.0"),
        ({"lr": math.inf}, "lr must be positive and finite, got inf"),
        ({"iterations": 1.5}, r"iterations of inverting_gradients must be of type int, got 1\.5"),
        ({"restart": 2}, "did you mean 'restarts'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        inverting_gradients(toys.conv_step(dtype=torch.float32)[0], **settings)


def test_the_likelihood_is_the_whitened_squared_distance_and_knows_how_long_an_update_is():
    target, batch = toys.conv_step(noise=1e-3)
    length = target.residual(torch.zeros_like(target.released)).square().sum()
    distances = squared_distances(target)
    values, mismatches = distances(toys.probe()[None], batch.labels)
    away = target.residual(target.simulate(toys.probe(), batch.labels)).square().sum()
    torch.testing.assert_close(values, (away / (2 * length))[None])
    torch.testing.assert_close(mismatches, direction_mismatch(target)(toys.probe(), batch.labels)[None])
    # Twice the release has the same direction and half the distance that a release of zeros has.
    double = Observation(**{**vars(target), "simulate": lambda x, y: 2 * target.simulate(x, y), "compare_many": None})
    values, mismatches = squared_distances(double)(batch.inputs[None], batch.labels)
    assert values.item() == pytest.approx(0.5, rel=0.1) and mismatches.item() < 0.01


@pytest.mark.long
@subtests("noise", [0.0, 1e-3])
def test_an_image_is_found_by_likelihood_too_under_noise_and_without(noise):
    target, batch = toys.conv_step(noise=noise, dtype=torch.float32)
    found = inverting_gradients(target, toys.generator(1), iterations=90, objective="likelihood")
    assert toys.psnr(found.inputs, batch.inputs) > toys.psnr(torch.full((1,), 0.5), batch.inputs) + 6
    assert found.status == "ok"


def test_layers_have_no_weights_in_a_likelihood():
    target, _ = toys.conv_step(dtype=torch.float32)
    with pytest.raises(ValueError, match="weighting must be 'equal' where objective is 'likelihood', got 'exp'"):
        inverting_gradients(target, objective="likelihood", weighting="exp")
