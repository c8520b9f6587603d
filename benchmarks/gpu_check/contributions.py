"""Longest contribution of one example to a clipped sum, as a multiple of its bound, by way of clipping and precision.

A contribution is the sum of a batch of one example, without noise. Examples are searched for as an adversary would: the
terms of whose sum a gradient consists, one a position, cancel up to a small fraction, so that rounding of the terms is
as long as the gradient. Opacus's ghost clipping takes the norm from inner products between positions, a difference of
large numbers, and the sum from another product with other roundings; its hooks, and leakbench where terms cancel, take
both from the gradient. The loss is the squared error of one layer, or of a small network, so that an example's target
chooses the derivatives behind the layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.defenses.core import Block, Engine, Everything, StepPlan, clip, seeded

from ..speed.ways import opacus_module, others_warnings
from .products import engine_settings, names, products
from .rows import CheckedFigure, CheckedRow, PartSettings

GHOST, HOOKS, OURS = "Opacus ghost", "Opacus hooks", "leakbench"
LIMIT = 1.0001
"""Largest contribution over its bound that is rounding of the sum in float32."""

_WIDTH = 64  # inputs and outputs of the linear layer
_DIFFERENCES = (2e-6, 2e-5, 2e-4, 2e-3)
_SHARES = (0.1, 0.3, 1.0, 3.0)
SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """An example's contribution.

    Attributes:
        length: over the bound.
        bound: over the length of the gradient.
        gradient: its length, in float64.
        case: example by its size, difference and seed.
    """

    length: float
    bound: float
    gradient: float
    case: str


@dataclass(frozen=True, kw_only=True)
class CancellingExample:
    """An example whose positions cancel, with the length of its gradient.

    Attributes:
        inputs: [1, ...].
        targets: as the model's outputs.
        gradient: length of the gradient, in float64.
        case: size, difference and seed.
    """

    inputs: Tensor
    targets: Tensor
    gradient: float
    case: str


def squared_error(outputs: Float[Tensor, "n ..."], targets: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """Half the squared error of each example, whose derivative by an output is output - target."""
    return (outputs - targets).square().flatten(1).sum(dim=1) / 2


def _linear() -> nn.Module:
    return nn.Linear(_WIDTH, _WIDTH, bias=False)


def _convolution() -> nn.Module:
    return nn.Conv2d(3, 16, 3, padding=1, bias=False)


def _network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 3, 3, padding=1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear layer over positions": (_linear, (1024, 4096)),
    "convolution": (_convolution, (64,)),
    "two convolutions": (_network, (64,)),
}
"""Name -> builder, sizes of examples: positions, or the height of an image of twice that width."""

SMALL_SIZES = {1024: 256, 4096: 1024, 64: 16}


def build(network: str) -> nn.Module:
    """Builds a network with the same weights in every call; torch's own generator is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator alone, as in `speed.networks`.
        torch.default_generator.manual_seed(0)
        return NETWORKS[network][0]()


def examples(network: str, model: nn.Module, sizes: tuple[int, ...], seeds: int) -> Iterator[CancellingExample]:
    """Yields examples whose positions cancel, on the CPU.

    Args:
        network: key of `NETWORKS`.
        model: of that kind, on the CPU.
        sizes: of examples.
        seeds: examples of each size and difference.
    """
    exact = copy.deepcopy(model).double()
    for size, difference, seed in product(sizes, _DIFFERENCES, range(seeds)):
        generator = torch.Generator().manual_seed(seed)
        inputs, derivatives = (
            _pairs(size, difference, generator)
            if isinstance(model, nn.Linear)
            else _halves(size, difference, generator, model)
        )
        with torch.no_grad():
            targets = model(inputs) - derivatives
        error = squared_error(exact(inputs.double()), targets.double()).sum()
        gradients = torch.autograd.grad(error, list(exact.parameters()))
        yield CancellingExample(
            inputs=inputs, targets=targets, gradient=_length(gradients), case=f"{size}, {difference:g}, seed {seed}"
        )


def _pairs(positions: int, difference: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns inputs equal in pairs of positions, and derivatives of opposite sign that differ by a random fraction."""
    inputs = torch.randn(positions, _WIDTH, generator=generator).abs()
    derivatives = torch.randn(positions, _WIDTH, generator=generator)
    larger = 1 + difference * torch.rand(positions // 2, 1, generator=generator)
    inputs[1::2], derivatives[1::2] = inputs[0::2], -derivatives[0::2] * larger
    return inputs.unsqueeze(0), derivatives.unsqueeze(0)


def _halves(height: int, difference: float, generator: torch.Generator, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns an image of equal halves, and derivatives of opposite sign; borders of zeros separate the halves."""
    half = torch.rand(3, height, 2 * height, generator=generator)
    half[:, 0] = half[:, -1] = 0
    image = torch.cat([half, half], dim=1).unsqueeze(0)
    with torch.no_grad():
        channels = model(image).shape[1]
    derivatives = torch.randn(channels, height, 2 * height, generator=generator)
    derivatives[:, 0] = derivatives[:, -1] = 0
    larger = 1 + difference * torch.rand(1, height, 2 * height, generator=generator)
    return image, torch.cat([derivatives, -derivatives * larger], dim=1).unsqueeze(0)


Way = Callable[[nn.Module, Tensor, Tensor, float, str], list[Tensor]]
"""(model, inputs, targets, bound, precision) -> the clipped gradient of a batch of one example, tensor by tensor."""


def _ours(model: nn.Module, inputs: Tensor, targets: Tensor, bound: float, precision: str) -> list[Tensor]:
    engine = Engine(model, loss=squared_error, noise=seeded(0), **engine_settings(precision))
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(bound)))
    return [engine.run(plan.at(0.0), inputs, targets).total]


def _opacus_hooks(model: nn.Module, inputs: Tensor, targets: Tensor, bound: float, precision: str) -> list[Tensor]:
    hooked = opacus_module("grad_sample").GradSampleModule(model)
    optimizer = opacus_module("optimizers").DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=1
    )
    squared_error(hooked(inputs), targets).mean().backward()
    optimizer.clip_and_accumulate()
    parameters: Any = list(model.parameters())
    return [parameter.summed_grad for parameter in parameters]


def _opacus_ghost(model: nn.Module, inputs: Tensor, targets: Tensor, bound: float, precision: str) -> list[Tensor]:
    fast = "fast_gradient_clipping"
    wrap = opacus_module(f"grad_sample.grad_sample_module_{fast}").GradSampleModuleFastGradientClipping
    wrapped = wrap(model, max_grad_norm=bound, use_ghost_clipping=True)
    optimizer = opacus_module(f"optimizers.optimizer_{fast}").DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=1
    )
    losses = squared_error(wrapped(inputs), targets)
    opacus_module(f"utils.{fast}_utils").DPTensorFastGradientClipping(wrapped, optimizer, losses, "mean").backward()
    parameters: Any = list(model.parameters())
    return [parameter.grad for parameter in parameters]


WAYS: dict[str, Way] = {GHOST: _opacus_ghost, HOOKS: _opacus_hooks, OURS: _ours}


def longest(
    way: str, network: str, *, device: str, precision: str, small: bool = False, seeds: int = SEEDS
) -> Contribution:
    """Returns the longest contribution, over its bound, of all examples and bounds.

    Args:
        way: key of `WAYS`.
        network: key of `NETWORKS`.
        device: "cpu" or "cuda".
        precision: as in `products`, which the caller sets.
        small: whether examples are small.
        seeds: examples of each size and difference.

    Raises:
        ModuleNotFoundError: Opacus is not installed.
    """
    model, sizes = build(network), NETWORKS[network][1]
    if small:
        sizes = tuple(SMALL_SIZES[size] for size in sizes)
    contributions: list[Contribution] = []
    with others_warnings():
        for example, share in product(examples(network, model, sizes, seeds), _SHARES):
            bound, own = share * example.gradient, copy.deepcopy(model).to(device)
            length = _length(WAYS[way](own, example.inputs.to(device), example.targets.to(device), bound, precision))
            contributions.append(
                Contribution(length=length / bound, bound=share, gradient=example.gradient, case=example.case)
            )
    # A contribution that is no number is the longest of all.
    return max(
        contributions, key=lambda contribution: math.inf if math.isnan(contribution.length) else contribution.length
    )


def measure(settings: PartSettings) -> Iterator[CheckedRow]:
    """Yields a row for each network and precision.

    Args:
        settings: of the part.
    """
    for network, precision in product(NETWORKS, names(settings.device, default=True)):
        figures: dict[str, CheckedFigure] = {}
        wrong, remarks = [], []
        for way in WAYS:
            try:
                with products(precision):
                    longest_one = longest(
                        way,
                        network,
                        device=settings.device,
                        precision=precision,
                        small=settings.small,
                        seeds=1 if settings.small else SEEDS,
                    )
            except ModuleNotFoundError as error:
                figures[way] = None
                remarks.append(str(error))
                continue
            figures[way] = longest_one.length
            if way == OURS and not longest_one.length <= LIMIT:
                wrong.append(f"an example is {longest_one.length:.6g} bounds long ({longest_one})")
        yield CheckedRow(
            name=f"{network}, {precision}", figures=figures, wrong=tuple(wrong), remarks=tuple(dict.fromkeys(remarks))
        )


def _length(tensors: Any) -> float:
    return float(torch.stack([tensor.detach().double().square().sum() for tensor in tensors]).sum().sqrt())
