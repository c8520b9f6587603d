"""What is particular to Deep Leakage from Gradients; the duties of every attack are in test_every_attack.py."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from leakbench import audit
from leakbench.attacks.core import Observation, Reconstruction
from leakbench.attacks.core.search.gradient_matching import squared_distance
from leakbench.attacks.core.search.quasi_newton import quasi_newton
from leakbench.attacks.dlg import dlg
from leakbench.benchmarks import data, models
from leakbench.defenses.core import Defense, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.rpdp import rpdp
from leakbench.defenses.sgd import sgd

from ..parameters import subtests
from . import toys


def photo_update(seed: int, side: int, defense: Defense | None = None) -> tuple[Observation, Tensor, Tensor]:
    """An update of the paper's LeNet of one crop of a photo, in float64."""
    photos = data.load("photos").private
    x, y = photos.inputs[seed : seed + 1, :, 8:, 8:].double(), photos.labels[seed : seed + 1] % 10
    if side == photos.inputs.shape[-1]:
        x = photos.inputs[seed : seed + 1].double()
    x = x[:, :, :side, :side]
    model = models.build("lenet_sigmoid", input_shape=(3, side, side), classes=10, seed=seed).double()
    observation, _ = audit.share_update(model, x, y, defense or sgd(), seed=seed, noise=seeded(seed))
    return observation, x, y


def mse(guess: Tensor, image: Tensor) -> float:
    return float((guess - image).square().mean())


@pytest.mark.long
def test_a_photo_and_its_label_are_found_from_the_papers_network():
    observation, x, y = photo_update(1, 12)
    result = dlg(observation, toys.generator(1), iterations=100)
    assert result.status == "ok" and result.labels.equal(y)
    assert mse(result.inputs, x) < 1e-4
    assert result.residual_ratio is None  # no noise, so nothing to compare with


@pytest.mark.slow
def test_how_many_of_ten_photos_are_found_at_the_papers_size():
    """Zhu, Liu & Han on 3x32x32 with weights uniform in [-1/2, 1/2]: MSE below 1e-4 counts; ten of ten, to 7e-5."""
    errors = []
    for seed in range(10):
        observation, x, _ = photo_update(seed, 32)
        errors.append(mse(dlg(observation, toys.generator(seed), iterations=3000).inputs, x))
    assert sum(error < 1e-4 for error in errors) >= 8, errors  # two are near the limit


MASKED = random_sparsification(final_sparsity=0.5, cooling=False, clip_norm=1e6, noise_multiplier=0.0)
PROJECTED = rpdp(rank=100, clip_norm=1e6, noise_multiplier=0.0)
TWO_PARTS = dpdr(noise_multiplier=0.0)


def update_of_toy(defense: Defense, *, seed: int = 0, step: int = 0, count: int = 1) -> tuple[Observation, Tensor]:
    model, batch = toys.conv_net(seed=seed, dtype=torch.float64), toys.examples(count, (1, 8, 8), seed=seed)
    inputs = batch.inputs.double()
    shared = audit.share_update(model, inputs, batch.labels, defense, seed=seed, noise=seeded(seed), step=step)
    return shared[0], inputs


@pytest.mark.long
@pytest.mark.parametrize(("defense", "step"), [(MASKED, 0), (PROJECTED, 0), (TWO_PARTS, 1)])
def test_masked_projected_and_two_part_updates_give_the_image_away(defense, step):
    observation, x = update_of_toy(defense, step=step)
    assert mse(dlg(observation, toys.generator(0), iterations=100).inputs, x) < 1e-6


def test_a_basis_of_all_axes_gives_the_distances_of_the_dense_update():
    dense, batch = toys.conv_step()
    dim = toys.parameters_of_conv_net()
    turned = torch.linalg.qr(torch.randn(dim, dim, generator=toys.generator(2), dtype=torch.float64))[0]
    axes, rotated = (toys.conv_step(basis)[0] for basis in (torch.eye(dim), turned))
    for x in (batch.inputs, toys.probe(), 3 * toys.probe()):
        expected = squared_distance(dense)(x, batch.labels)
        assert squared_distance(axes)(x, batch.labels).equal(expected)
        torch.testing.assert_close(squared_distance(rotated)(x, batch.labels), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_a_batch_of_two_is_found_in_some_order():
    observation, x = update_of_toy(sgd(), count=2, seed=1)
    found = dlg(observation, toys.generator(3), iterations=200).inputs
    assert min(mse(found, x), mse(found.flip(0), x)) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.003, 0.01])
def test_it_ends_where_noise_leaves_nothing_to_fit(noise):
    observation, _ = toys.update_target(noise=noise)
    early = dlg(observation, toys.generator(0), iterations=400)
    assert early.residual_ratio is not None and 0.9 < early.residual_ratio < 1.05
    assert early.residual_ratio == pytest.approx(early.objective / toys.parameters_of_conv_net())
    unaware = dlg(replace(observation, noise_std=torch.zeros_like(observation.released)), iterations=400)
    assert unaware.objective < early.objective  # there was more to go down, into the noise


@pytest.mark.long
def test_under_noise_of_private_training_nothing_is_better_than_the_floor():
    """At multiplier 1 the start explains the update as well as anything does, and that is said."""
    grey = torch.full((1,), 0.5, dtype=torch.float64)
    for seed in range(2):
        observation, x = update_of_toy(dp_sgd(noise_multiplier=1.0), seed=seed)
        result = dlg(observation, toys.generator(seed), iterations=100)
        assert result.status == "degraded"
        assert toys.psnr(result.inputs, x) < toys.psnr(grey, x) + 0.5
        assert result.residual_ratio is not None and 0.8 < result.residual_ratio < 1.2
        assert result.inputs.min() >= 0 and result.inputs.max() <= 1


def test_behind_relus_a_result_is_degraded():
    observation, _ = toys.update_target(net="relu")
    assert dlg(observation, toys.generator(0), iterations=8).status == "degraded"
    assert dlg(replace(observation, structure=None), toys.generator(0), iterations=8).status == "ok"


def test_without_a_finite_distance_the_start_is_no_result_after_ten_more_starts():
    observation, _ = toys.update_target()
    calls = []

    def broken(inputs: Tensor, labels: Tensor) -> Tensor:
        calls.append(inputs.detach().clone())
        return ((inputs.sum() + labels.sum()) * math.nan).expand_as(observation.released)

    result = dlg(replace(observation, simulate=broken), toys.generator(0), iterations=3)
    assert result.status == "failed" and result.inputs.isfinite().all()
    assert len({float(start.sum()) for start in calls[:-1]}) == 11


def test_a_start_that_diverges_is_drawn_again():
    starts = iter([torch.tensor([math.nan]), torch.tensor([math.inf]), torch.tensor([3.0])])

    def bowl(x: Tensor) -> tuple[Tensor, Tensor]:
        value = (x - 1).square().sum()
        return value, value

    found = quasi_newton(bowl, lambda: [next(starts)], iterations=20, lr=1.0)
    assert found.unknowns[0].item() == pytest.approx(1.0)
    assert found.objective < 1e-9 and found.history.shape == (20,)
    assert found.history[0] == 4 and found.history[-1] == found.objective


def test_a_descent_that_cannot_go_down_is_no_find():
    flat = quasi_newton(lambda x: (0 * x.sum() + 1, x.sum()), lambda: [torch.ones(2)], iterations=4, lr=1.0)
    assert flat.objective == math.inf


def test_the_scale_of_an_objective_is_immaterial():
    """PyTorch's L-BFGS learns nothing from gradients that change by less than 1e-10."""

    def valley(scale: float):
        def objective(x: Tensor) -> tuple[Tensor, Tensor]:
            value = scale * (100 * (x[1] - x[0].square()).square() + (1 - x[0]).square())
            return value, value

        return objective

    start = lambda: [torch.tensor([-1.2, 1.0], dtype=torch.float64)]  # noqa: E731 - a name for a point
    for scale in (1e-12, 1.0, 1e12):
        found = quasi_newton(valley(scale), start, iterations=60, lr=1.0)
        torch.testing.assert_close(found.unknowns[0], torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-6)


def test_restarts_keep_the_best():
    observation, _ = toys.conv_step()
    observation = replace(observation, noise_std=torch.zeros_like(observation.released))
    coins = toys.generator(5)
    alone = [dlg(observation, coins, iterations=8) for _ in range(3)]
    together = dlg(observation, toys.generator(5), iterations=8, restarts=3)
    best = min(alone, key=lambda one: float(one.history[0, -1]) if one.history is not None else math.inf)
    assert together.restarts == 3 and together.inputs.equal(best.inputs)


def test_the_scorer_shows_the_ratio_beside_the_objective():
    observation, truth = audit.share_update(
        toys.conv_net(), *_example(), dp_sgd(noise_multiplier=1e-3), noise=seeded(1)
    )
    result = dlg(observation, toys.generator(0), iterations=30)
    metric = audit.score(result, truth)["objective"]
    assert metric.detail["residual_ratio"] == result.residual_ratio and result.residual_ratio is not None
    with pytest.raises(ValueError, match="residual_ratio must be finite and at least 0, got nan"):
        Reconstruction(inputs=result.inputs, labels=result.labels, objective=1.0, residual_ratio=math.nan)


def _example() -> tuple[Tensor, Tensor]:
    batch = toys.examples(1, (1, 8, 8), seed=0)
    return batch.inputs, batch.labels


def test_one_logit_has_two_classes():
    class OneLogit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = toys.linear_net((1, 8, 8))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs)[:, :1]

    observation, _ = audit.share_update(OneLogit().double(), _example()[0].double(), torch.tensor([1]), sgd())
    result = dlg(observation, toys.generator(0), iterations=100)
    assert result.labels.tolist() == [1] and result.objective < 1e-9


@subtests(
    "settings, sentence",
    [
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"restarts": 0}, "restarts must be at least 1, got 0"),
        ({"lr": 0.0}, r"lr must be positive and finite, got 0\.0"),
        ({"lr": math.nan}, "lr must be positive and finite, got nan"),
    ],
)
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        dlg(toys.update_target()[0], **settings)
