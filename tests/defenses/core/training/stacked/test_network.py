"""Networks of convolutions as one stack: sums of bounded gradients as by autograd, and whole trainings, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leakbench.benchmarks import models as catalogue
from leakbench.defenses.core import (
    Bound,
    Defense,
    Recipe,
    Sampling,
    StackError,
    clip,
    cross_entropy,
    normalize,
    seeded,
    shuffle,
    train,
    train_stacked,
)
from leakbench.defenses.core.gradients.layerwise.cost import Strategy
from leakbench.defenses.core.training.stacked import network, terms
from leakbench.defenses.core.training.stacked.chain import chain, gains
from leakbench.defenses.core.training.stacked.network import StackedNetwork
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.nsgd import nsgd
from leakbench.defenses.random_sparsification import random_sparsification

from ..... import pretend_device
from .....parameters import subtests
from ...gradients.engines.duties import by_loop
from ...gradients.engines.modules import Problem

CPU = torch.device("cpu")
MODELS, SHAPE, CLASSES = 3, (2, 6, 7), 5
POOL = (
    torch.randn(30, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    torch.randint(0, CLASSES, (30,), generator=torch.Generator().manual_seed(1)),
)
ROWS = torch.randint(0, 30, (MODELS, 4), generator=torch.Generator().manual_seed(2))
THERE = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()

NETWORKS: dict[str, Callable[[], list[nn.Module]]] = {
    "padded and pooled": lambda: [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2, stride=1), nn.Flatten()],
    "stride, dilation and groups": lambda: [
        nn.Conv2d(2, 4, (2, 3), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2, bias=False),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Flatten()),
    ],
    "an even kernel, padded to the same size": lambda: [
        nn.Conv2d(2, 3, (2, 4), padding="same"),
        nn.Conv2d(3, 2, 1, padding="valid"),
        nn.Flatten(),
    ],
    "padded by reflection and around": lambda: [
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        nn.Sigmoid(),
        nn.Conv2d(3, 3, 3, padding=2, padding_mode="circular"),
        nn.Flatten(),
    ],
    "normalised by group": lambda: [
        nn.GroupNorm(2, 2, affine=False),
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.GroupNorm(3, 6),
        nn.GELU(),
    ],
    "averaged over all pixels": lambda: [nn.Conv2d(2, 8, 3), nn.ELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
    "few positions and many channels": lambda: [
        nn.Conv2d(2, 24, 3, stride=2),
        nn.Tanh(),
        nn.Conv2d(24, 48, 2),
        nn.Flatten(),
    ],
    "a linear layer along an axis": lambda: [nn.Linear(7, 4), nn.Tanh(), nn.Flatten()],
}


def build(name: str, seed: int) -> nn.Module:
    """A network of the table with a last linear layer, float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = nn.Sequential(*NETWORKS[name]()).double()
        model = nn.Sequential(body, nn.Linear(body(POOL[0][:2]).shape[1], CLASSES)).double()
        with torch.no_grad():
            for p in model.parameters():  # also scales and shifts of group norms
                p.add_(torch.randn_like(p) / 5)
    return model


def stack_of(models: list[nn.Module]) -> StackedNetwork:
    return StackedNetwork(models, cross_entropy, CPU, requested=True)


def expected(
    models: list[nn.Module], bound: Bound, kept: torch.Tensor | None, pool=POOL, rows=ROWS, there=THERE
) -> torch.Tensor:
    """Sums of bounded gradients by autograd, one example after another."""
    sums = []
    for number, model in enumerate(models):
        mine = rows[number][there[number]]
        gradients = by_loop(Problem(model, pool[0][mine], pool[1][mine]))
        if kept is not None:
            gradients = gradients * kept[number]
        gradients[~gradients.isfinite().all(1)] = 0.0
        sums.append((gradients * bound.scale(gradients.norm(dim=1), torch.float64)[:, None]).sum(0))
    return torch.stack(sums)


def masks_of(like: torch.Tensor) -> torch.Tensor:
    return (torch.rand(like.shape, generator=torch.Generator().manual_seed(3)) < 0.4).double()


def assert_sums(models: list[nn.Module], bound: Bound, *, masked: bool, pool=POOL, rows=ROWS, there=THERE) -> None:
    stack = stack_of(models)
    kept = masks_of(stack.parameters) if masked else None
    sums = stack.clipped_sums(stack.parameters, pool, rows, there, bound, kept)
    torch.testing.assert_close(sums, expected(models, bound, kept, pool, rows, there), rtol=1e-10, atol=1e-13)


@subtests("masked", [False, True])
@subtests("name", NETWORKS)
def test_sums_are_those_of_each_model_alone_and_rows_that_fill_batches_up_add_nothing(name, masked):
    models = [build(name, seed) for seed in range(MODELS)]
    assert_sums(models, clip(0.3), masked=masked)
    nothing = stack_of(models)
    sums = nothing.clipped_sums(nothing.parameters, POOL, ROWS, torch.zeros_like(THERE), clip(0.3), None)
    assert not sums.any()


@pytest.mark.parametrize("way", Strategy)
@pytest.mark.parametrize("masked", [False, True])
def test_every_formula_of_a_norm_gives_the_same(monkeypatch, way, masked):
    monkeypatch.setattr(terms, "cheapest", lambda shape, device: way)
    monkeypatch.setattr(terms, "estimates", lambda shape, device: {way: 1.0, Strategy.FREE: 2.0} | {way: 1.0})
    for name in ("padded and pooled", "stride, dilation and groups"):
        assert_sums([build(name, seed) for seed in range(MODELS)], clip(0.3), masked=masked)


@pytest.mark.parametrize("name", ["dp_cnn_small", "dpdr_cnn4", "dpdr_cnn5", "lenet_sigmoid"])
def test_networks_of_the_catalogue_are_taken(name):
    shape = (1, 16, 16)
    pool = (torch.rand(6, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(6) % 3)
    models = [catalogue.build(name, input_shape=shape, classes=3, seed=seed).double() for seed in range(2)]
    assert_sums(models, clip(0.1), masked=True, pool=pool, rows=ROWS[:2] % 6, there=THERE[:2])


def test_a_row_that_is_not_finite_adds_nothing_and_one_whose_square_overflows_is_bounded():
    name = "averaged over all pixels"
    inputs, labels, there = POOL[0].float(), POOL[1].clone(), torch.ones_like(THERE)
    inputs[ROWS[0, 0]], inputs[ROWS[1, 0]] = torch.inf, torch.nan
    inputs[ROWS[2, :1]] *= 1e25
    alone = [build(name, seed).float().double() for seed in range(MODELS)]
    labels[ROWS[2, :1]] = alone[2](inputs.double()[ROWS[2, :1]]).argmin(1)
    stack = stack_of([build(name, seed).float() for seed in range(MODELS)])
    sums = stack.clipped_sums(stack.parameters, (inputs, labels), ROWS, there, clip(0.3), None)
    large = by_loop(Problem(alone[2], inputs.double()[ROWS[2, :1]], labels[ROWS[2, :1]]))
    # Its square is no number of float32, and neither are squares of the weight's inputs.
    assert 1e20 < float(large.norm()) < 1e30
    wanted = expected(alone, clip(0.3), None, (inputs.double(), labels), ROWS, there)
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-3, atol=1e-5)


def trained(one: Defense, name: str, device: torch.device = CPU, *, alone: bool, **settings) -> torch.Tensor:
    """Parameters of models that are trained one after another, or as a stack."""
    models = [build(name, seed).to(device) for seed in range(MODELS)]
    chosen = torch.stack([torch.randperm(30, generator=torch.Generator().manual_seed(s))[:20] for s in (5, 6, 7)])
    pool, sampling = (POOL[0].to(device), POOL[1].to(device)), settings.pop("sampling", shuffle(0.25))
    seeds, keys = [11, 12, 13], [21, 22, 23]
    if alone:
        for model, mine, seed, key in zip(models, chosen, seeds, keys, strict=True):
            examples = (pool[0][mine], pool[1][mine])
            train(
                model, examples, one, sampling=sampling, steps=6, lr=0.5, noise=seeded(0), seed=seed, sampler_key=key,
                **settings,
            )  # fmt: skip
    else:
        train_stacked(
            models, pool, chosen, one, sampling=sampling, steps=6, lr=0.5, noise=torch.Generator().manual_seed(4),
            seeds=seeds, sampler_keys=keys, even_if_slower=True, **settings,
        )  # fmt: skip
    return torch.stack([nn.utils.parameters_to_vector(model.parameters()).detach().cpu() for model in models])


@pytest.mark.long
@subtests(
    ("one", "name", "settings"),
    [
        (dp_sgd(clip_norm=0.3, noise_multiplier=0.0), "padded and pooled", {}),
        (dp_sgd(clip_norm=0.3, noise_multiplier=0.0), "normalised by group", {"sampling": Sampling("full", 1.0)}),
        (
            random_sparsification(clip_norm=0.3, final_sparsity=0.8, noise_multiplier=0.0),
            "stride, dilation and groups",
            {"recipe": Recipe(momentum=0.9, schedule="cosine"), "sampling": Sampling("random_allocation", 0.2)},
        ),
        (
            random_sparsification(clip_norm=0.3, final_sparsity=0.8, noise_multiplier=0.0),
            "normalised by group",
            {"recipe": Recipe(optimizer="adam", average=0.9)},
        ),
        (
            nsgd(clip_norm=0.3, noise_multiplier=0.0),
            "averaged over all pixels",
            {"sampling": Sampling("partition", 0.3)},
        ),
    ],
)
def test_each_model_is_the_one_that_training_alone_gives(one, name, settings):
    found = [trained(one, name, alone=alone, **settings) for alone in (True, False)]
    start = torch.stack([nn.utils.parameters_to_vector(build(name, s).parameters()).detach() for s in range(MODELS)])
    assert float((found[0] - start).norm()) > 0.1
    # Adam divides by what the last digits are of.
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bound", [clip(1e-3), normalize(1e-3, regulariser=0.01)])
def test_norms_of_inner_products_that_cancel_are_those_of_the_gradients(bound):
    """Two positions that see nearly the same, and are counted against each other: 1e-8 is left of a squared norm."""
    coins, size = torch.Generator().manual_seed(0), 128
    model = nn.Sequential(nn.Linear(size, size, bias=False), nn.Flatten(), nn.Linear(2 * size, 2, bias=False))
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(torch.randn(size, size, generator=coins) * 1e-4)
        against = 3 * torch.randn(2, size, generator=coins)
        model.get_parameter("2.weight").copy_(torch.cat([against, -against], dim=1))
    first = torch.randn(12, 1, size, generator=coins)
    inputs = torch.cat([first, first + 1e-4 * torch.randn(12, 1, size, generator=coins)], dim=1)
    pool, rows, there = (inputs, torch.arange(12) % 2), torch.arange(12)[None], torch.ones(1, 12).bool()
    stack = stack_of([model])
    sums = stack.clipped_sums(stack.parameters, pool, rows, there, bound, None)
    model.double()
    wanted = expected([model], bound, None, (inputs.double(), pool[1]), rows, there)
    assert float((sums - wanted).norm() / wanted.norm()) < 0.02


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that an operation gave."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.entries = max([self.entries, *(leaf.numel() for leaf in tree_leaves(found) if torch.is_tensor(leaf))])
        return found


@pytest.mark.long
@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_bounded_whatever_the_number_of_models_and_rows(monkeypatch, masked):
    name, largest, sums = "padded and pooled", {}, {}
    rows = torch.randint(0, 30, (12, 9), generator=torch.Generator().manual_seed(2))
    models = [build(name, seed) for seed in range(12)]
    for limit in (2**30, 2**19, 2**15):  # all at once, some models, some rows of one
        monkeypatch.setitem(network.CHUNK_BYTES, "cpu", limit)
        stack = stack_of(models)
        kept = masks_of(stack.parameters) if masked else None
        with Largest() as watched:
            sums[limit] = stack.clipped_sums(stack.parameters, POOL, rows, torch.ones(12, 9).bool(), clip(0.3), kept)
        largest[limit] = 8 * watched.entries
        torch.testing.assert_close(sums[limit], sums[2**30], rtol=1e-10, atol=1e-13)
    parameters = 8 * stack.parameters.numel()
    assert largest[2**30] > max(2**19, parameters)  # the bound below is one
    assert largest[2**19] <= max(2**19, parameters)
    assert largest[2**15] <= max(2**15, parameters)


def test_a_stack_is_made_where_it_is_faster():
    """Convolutions on CUDA alone; the device is asked for its type, so no GPU is needed."""
    linear, images = [nn.Sequential(nn.Flatten(), nn.Linear(9, 5)), build("padded and pooled", 0)]
    for device in (CPU, torch.device("cuda"), torch.device("mps")):
        assert gains(chain(linear), device)
        assert gains(chain(images), device) == (device.type == "cuda")
    StackedNetwork([images], cross_entropy, torch.device("cuda"))
    with pytest.raises(StackError, match="not stacked where that is slower, as on the device cpu"):
        StackedNetwork([images], cross_entropy, CPU)


def test_a_convolution_of_what_has_no_channels_is_refused():
    stack = stack_of([nn.Sequential(nn.Conv2d(6, 3, 2), nn.Flatten(), nn.Linear(9, 5)).double()])
    with pytest.raises(StackError, match=r"of images with channels, got \[6, 7\]"):
        stack.clipped_sums(stack.parameters, (POOL[0][:, 0], POOL[1]), ROWS[:1], THERE[:1], clip(0.3), None)


MASKED = random_sparsification(clip_norm=0.3, final_sparsity=0.8, noise_multiplier=0.5)


def test_a_stack_of_convolutions_stays_on_its_device():
    with pretend_device.device() as device:
        found = [trained(MASKED, "normalised by group", where, alone=False) for where in (CPU, device)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_on_a_gpu_models_are_those_of_the_cpu(name):
    cuda = torch.device("cuda")
    found = [trained(MASKED, name, where, alone=False) for where in (CPU, cuda)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-7, atol=1e-9)
    bounded = dp_sgd(clip_norm=0.3, noise_multiplier=0.0)
    found = [trained(bounded, name, cuda, alone=alone) for alone in (True, False)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-7, atol=1e-9)
