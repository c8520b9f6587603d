"""R-GAP on CNN6, one image: structured inversion in float64 against dense least squares in float32.

The paper's code writes the equations of a layer as a dense matrix in float32 and solves it by singular values (LAPACK's
gelsd). The baseline here does the same, but builds the matrices from the linear maps of our inversion, which is much
faster than filling them entry by entry, and omits the rows for padded pixels, so that only the arithmetic is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakbench.attacks.core import Network, Operation
from leakbench.attacks.core.closed_form.recursion.convolution import Convolved, KernelGeometry, WeightGradient
from leakbench.attacks.core.closed_form.recursion.head import HeadGradient, candidates
from leakbench.attacks.core.closed_form.recursion.invert import inverted_inputs
from leakbench.attacks.core.closed_form.recursion.observed_gradients import LayerGradient

from .. import models
from ..models.cnn6 import SLOPE
from .part import ROUNDS, Options, SpeedPart
from .targets import SpeedTarget

SIZES, FULL_SIZES, QUICK_SIZES = (24,), (32,), (16,)
"""Heights and widths of images: a dense inversion at the paper's 32 takes minutes, at 24 about 20 s."""

DENSE, OURS = "dense float32, gelsd", "structured float64"
WAYS = (DENSE, OURS)
LARGEST_ERROR = 1e-15
"""Limit on the mean squared error of the image by the structured inversion; that of the dense one is only reported."""

Inversion = Callable[[], Tensor]
"""Inversion of a gradient; returns the image found."""


def _case(size: int, device: str) -> tuple[Network, dict[str, Tensor], Tensor]:
    """Returns CNN6 as equations, the gradient of a smooth image by name of the operation, and the image."""
    body, head = models.build("cnn6", input_shape=(3, size, size), classes=1, seed=0).double().to(device).children()
    layers = [*body.children(), head]
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, size // 4, size // 4, generator=generator, dtype=torch.float64)
    image = functional.interpolate(coarse, size=size, mode="bilinear").to(device)
    operations = [Operation(name="0", kind="input", inputs=(), shape=(3, size, size))]
    values, passing = {}, image
    for number, layer in enumerate(layers, start=1):
        passing = layer(passing)
        about: dict[str, Any] = {"settings": {"slope": SLOPE}}
        if isinstance(layer, nn.Conv2d | nn.Linear):
            values[f"weight {number}"] = layer.weight
            keys = ("kernel_size", "stride", "padding", "dilation", "groups")
            settings = {key: getattr(layer, key) for key in keys} if isinstance(layer, nn.Conv2d) else {}
            about = {"weight": f"weight {number}", "settings": settings}
        kinds = {nn.Conv2d: "conv2d", nn.LeakyReLU: "leaky_relu", nn.Flatten: "flatten", nn.Linear: "linear"}
        operations.append(
            Operation(
                name=str(number),
                kind=kinds[type(layer)],
                inputs=(str(number - 1),),
                shape=tuple(passing.shape[1:]),
                **about,
            )
        )
    gradients = torch.autograd.grad(functional.softplus(passing).sum(), list(values.values()))
    network = Network(
        operations=tuple(operations), parameters={n: v.detach() for n, v in values.items()}, loss="logistic"
    )
    names = [operation.name for operation in operations if operation.weight is not None]
    return network, dict(zip(names, gradients, strict=True)), image[0]


def build(*, size: int, way: str, device: str = "cpu") -> Inversion:
    """Builds a way to invert the gradient of an image.

    Args:
        size: height and width of the image.
        way: in `WAYS`.
        device: "cpu" or "cuda".
    """
    network, gradients, _ = _case(size, device)
    if way == DENSE:
        return lambda: _dense(network, gradients)
    shown = {
        name: LayerGradient(weight=g, observed=None, std=torch.zeros_like(g), bias=None, bias_std=None, group=0)
        for name, g in gradients.items()
    }
    return lambda: inverted_inputs(network, shown)[0].x


def _dense(network: Network, gradients: dict[str, Tensor]) -> Tensor:
    """Recursion on stacked matrices, all in float32; the root and the sign of the head are given."""
    *body, head = network.operations
    by_name = {operation.name: operation for operation in network.operations}
    weight = network.parameters[str(head.weight)]
    explained = candidates(
        HeadGradient(
            weight=weight,
            bias=weight.new_zeros(1),
            gradient=gradients[head.name],
            bias_gradient=None,
        ),
        loss="logistic",
        clipped=None,
    )
    start = next(candidate for candidate in explained if candidate.label == 0 and candidate.root == 0)
    x, k = start.x.float(), (weight.T @ start.slopes).float()
    for operation in reversed(body):
        if operation.kind == "flatten":
            x, k = (each.view(by_name[operation.inputs[0]].shape) for each in (x, k))
        elif operation.kind == "leaky_relu":
            slope = torch.where(x > 0, torch.ones_like(x), SLOPE)
            x, k = x / slope, k * slope
        elif operation.kind == "conv2d":
            below = by_name[operation.inputs[0]].shape
            kernel = network.parameters[str(operation.weight)].float()
            geometry = KernelGeometry(operation.settings, below, operation.shape, x.device)
            output = Convolved(kernel, geometry)
            equations = WeightGradient(k, geometry, tuple(kernel.shape), None)
            matrix = torch.cat([equations.columns(), output.columns()], dim=1).T
            right = torch.cat([gradients[operation.name].float().flatten(), x.flatten()])
            driver = "gelsd" if matrix.device.type == "cpu" else "gels"
            x = torch.linalg.lstsq(matrix, right[:, None], driver=driver).solution.view(below)
            k = output.adjoint(k[None])[0]
    return x


def errors(*, size: int, device: str = "cpu") -> dict[str, float]:
    """Mean squared error of the image by each way: a wrong answer has no speed.

    Raises:
        ValueError: ours is not exact, or the dense error is not finite.
    """
    _, _, image = _case(size, device)
    squared_errors = {way: float((build(size=size, way=way, device=device)() - image).square().mean()) for way in WAYS}
    if not squared_errors[OURS] < LARGEST_ERROR or not math.isfinite(squared_errors[DENSE]):
        raise ValueError(f"the image must be found to {LARGEST_ERROR}, got {squared_errors}")
    return squared_errors


def measure(*, full: bool = False, sizes: Sequence[int] = (), **options: Unpack[Options]) -> dict[str, Any]:
    """Compares the two ways at every size.

    Args:
        full: image size of the paper's networks, 32 x 32, instead of a size that takes about a minute in all.
        sizes: heights and widths of images; the usual sizes if empty. A quick run's is small, and its ratio says little
            about a large one.
        options: see `Options`.
    """
    # A dense inversion takes minutes.
    part = SpeedPart(__name__, options, rounds=3 if full else 1, quick_rounds=1, budget=1200.0)
    (paper,) = FULL_SIZES
    for size in sizes or (FULL_SIZES if full else QUICK_SIZES if part.quick else SIZES):
        name = f"CNN6, {size}x{size}"
        part.say(name if size == paper else f"{name} (smaller than the paper's {paper}: --full)")
        # The calls that compute the errors warm both ways up.
        squared_errors = errors(size=size, device=part.device)
        about = {"size": size, **{f"error of {way}": value for way, value in squared_errors.items()}}
        part.compare(name, WAYS, {"size": size}, peer=DENSE, about=about, memory_calls=1, warmup=0)
        if size in (*SIZES, paper):
            part.targets += [
                SpeedTarget(case=name, way=OURS, against=DENSE, quantity="speed-up", limit=20.0),
                SpeedTarget(case=name, way=OURS, against=DENSE, quantity="memory", limit=0.25),
            ]
    smaller = (
        f"Smaller images than the paper's {paper} x {paper}, so that it ends in about a minute; --full measures that "
        "size, where both ratios are larger."
    )
    return part.document(
        title="R-GAP on CNN6, one image",
        method=(
            "The same equations of every layer, from one gradient in float64. The dense way is told the label. "
            f"{ROUNDS} Extra memory: peak beyond network and gradient, in a process for each way. "
            + ("Of images of the paper's size." if full else smaller)
        ),
        settings={"full": full},
    )
