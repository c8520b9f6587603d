"""Symmetry of gradient deviations: whether g_i minus the mean gradient is distributed as its mirror image.

Analyses of clipping assume it (Chen, Wu & Hong, "Understanding Gradient Clipping in Private SGD: A Geometric
Perspective", NeurIPS 2020, show it in random projections to the plane). The statistic is the energy distance between
deviations and their mirror images, with a p-value from random sign flips. It is a diagnostic on the public part of a
data set; no run releases it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.benchmarks import models
from leakbench.benchmarks.core import Sizes, Splits
from leakbench.defenses.core import (
    Codec,
    Context,
    Execution,
    Layout,
    PublicGradients,
    cross_entropy,
    per_example_gradients,
    poisson,
    train,
)

from ..plan.splits_cache import load_data
from .claim import Comparison, Measured, Panel, Setup, claim

LEVEL = 0.01
"""Level of all tests together; each test gets an equal share (Bonferroni)."""
EXAMPLES, STEPS, FLIPS, PLANES = 190, 40, 399, 5


def default_data() -> str:
    """Returns MNIST if it is in the folder that LEAKBENCH_DATA names, else the digits, which need no download."""
    folder = os.environ.get("LEAKBENCH_DATA")
    return "mnist" if folder and (Path(folder).expanduser() / "MNIST").is_dir() else "digits"


def energy_distance(grams: Float[Tensor, "planes n n"]) -> float:
    """Energy distance between points and their mirror images over their mean distance, summed over planes.

    2 E|X - Y| - E|X - X'| - E|Y - Y'| with Y = -X' is twice the mean of |x_i + x_j| - |x_i - x_j|.

    Args:
        grams: inner products of the points in each plane.
    """
    squares = grams.diagonal(dim1=1, dim2=2)
    sums = squares.unsqueeze(1) + squares.unsqueeze(2)
    sums_of_pairs, differences = ((sums + sign * 2 * grams).clamp(min=0).sqrt() for sign in (1, -1))
    return 2 * float(
        ((sums_of_pairs - differences).sum(dim=(1, 2)) / (sums_of_pairs + differences).sum(dim=(1, 2))).sum()
    )


def _centred(grams: Float[Tensor, "planes n n"]) -> Float[Tensor, "planes n n"]:
    """Inner products of points minus their mean."""
    means = grams.mean(dim=1)
    return grams - means.unsqueeze(1) - means.unsqueeze(2) + means.mean(dim=1)[:, None, None]


def symmetry_p_value(planes: Float[Tensor, "planes n 2"], flips: int, generator: torch.Generator) -> float:
    """P-value of symmetry around the mean, by random signs: an example has the same sign in all planes.

    Flipped points are centred again, as the observed points were: otherwise flips would always look less symmetric.
    Centring shortens them, so the statistic is scale-free. On gradients whose signs were flipped at random, 3 of 60
    p-values were at most 0.05. Tails without a variance are rejected too often, as are moderately heavy tails in
    hundreds of dimensions, where all distances are alike: hence planes.

    Args:
        planes: projections of the same examples; need not be centred.
        flips: number of random sign patterns.
        generator: source of the signs.

    Returns:
        P-value in (0, 1]; small if the points are not symmetric.
    """
    points = planes.double()
    grams = _centred(points @ points.mT)
    observed, at_least = energy_distance(grams), 1
    for _ in range(flips):
        signs = (torch.randint(2, (grams.shape[1],), generator=generator) * 2 - 1).to(grams)
        at_least += energy_distance(_centred(grams * signs.unsqueeze(0) * signs.unsqueeze(1))) >= observed
    return at_least / (flips + 1)


def in_planes(rows: Float[Tensor, "n dim"], generator: torch.Generator) -> Float[Tensor, "planes n 2"]:
    """Projects deviations from the mean to fixed random planes, each by R of R^(2 x d) / sqrt(d)."""
    projections = torch.randn(PLANES, rows.shape[1], 2, generator=generator, dtype=torch.float64)
    rows = rows.double().cpu()
    return (rows - rows.mean(dim=0)) @ projections / math.sqrt(rows.shape[1])


def _gradients(setup: Setup, splits: Splits) -> tuple[Float[Tensor, "n dim"], dict[str, Codec]]:
    """Per-example gradients of a shortly trained model, and codecs of a projection and a mask at its parameters."""
    name = "dp_cnn_small" if min(splits.input_shape[1:], default=0) >= 16 else "mlp"
    model = models.build(name, input_shape=splits.input_shape, classes=splits.classes, seed=setup.seed)
    model = model.to(setup.device)
    half = len(splits.public) // 2
    inputs, labels = splits.public.inputs, splits.public.labels
    shown, others = (inputs[:half], labels[:half]), (inputs[half:], labels[half:])
    train(
        model,
        others,
        setup.defense("sgd", {}),
        sampling=poisson(0.25),
        steps=STEPS,
        lr=0.2,
        seed=setup.seed,
        sampler_key=setup.seed,
        execution=Execution(device=setup.device),
    )
    shape = Layout.of(model)
    return _rows(model, shape, *shown), {
        "projected by PCDP": _codec(setup, "pcdp", {"rank": 50}, model, shape, others),
        "masked to 10 %": _codec(
            setup, "random_sparsification", {"cooling": False, "final_sparsity": 0.9}, model, shape, others
        ),
    }


def _rows(model: nn.Module, shape: Layout, inputs: Tensor, labels: Tensor) -> Float[Tensor, "n dim"]:
    parts = zip(inputs.split(64), labels.split(64), strict=True)
    return torch.cat([per_example_gradients(model, cross_entropy, shape, x, y).detach() for x, y in parts])


def _codec(
    setup: Setup, name: str, settings: dict[str, object], model: nn.Module, shape: Layout, public: tuple[Tensor, Tensor]
) -> Codec:
    """Returns the codec of a method's first plan."""
    defense = setup.defense(name, settings, noise_multiplier=1.0)
    context = Context(
        step=0,
        steps=1,
        layout=shape,
        parameters=shape.read(model),
        seed=setup.seed,
        device=setup.device,
        public=PublicGradients(lambda x, y: _rows(model, shape, x, y), *public),
    )
    return defense.plan(defense.start(context), context)[1].blocks[0].codec


@claim(
    "3.8",
    "Deviations of per-example gradients from their mean are distributed symmetrically.",
    should_hold=None,
    caveat="many coordinates in a plane look Gaussian, hence symmetric, whatever they are: only a rejection says much",
)
def gradient_symmetry(setup: Setup) -> Measured:
    """Whole, projected and masked gradients, in five random planes each; the first plane is drawn."""
    data = setup.data or default_data()
    sizes = Sizes(private=1, non_member=1, public=2 * EXAMPLES)
    rows, codecs = _gradients(setup, load_data(data, 0, sizes, setup.device))
    encoded = {"whole": rows} | {title: codec.encode(rows) for title, codec in codecs.items()}
    comparisons, panels = [], []
    for title, points in encoded.items():
        planes = in_planes(points, setup.generator("planes", title))
        p = symmetry_p_value(planes, FLIPS, setup.generator("flips", title))
        panels.append(Panel(f"{title}, p = {p:.3g}", planes[0]))
        level = LEVEL / len(encoded)
        comparisons.append(
            Comparison(what=f"p-value of symmetry, {title}", measured=p, closed=level, relation=">=", n=len(rows))
        )
    remark = f"gradients of {len(rows)} public examples of {data}, after {STEPS} steps of SGD on others"
    return Measured(comparisons=tuple(comparisons), remark=remark, panels=tuple(panels))
