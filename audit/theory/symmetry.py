"""Symmetry of gradient deviations: whether g_i less the mean gradient is distributed as its mirror image.

Analyses of clipping assume it (Chen, Wu & Hong, "Understanding Gradient Clipping in Private SGD: A Geometric
Perspective", NeurIPS 2020, show it in random projections to the plane). The statistic is the energy distance between
deviations and their mirror images, its p-value that of random flips of their signs. A diagnostic: of the public part of
a data set here, and nothing that a run would release.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from benchmarks import data as datasets
from benchmarks import models
from benchmarks.core import Sizes, Splits
from defenses.core import (
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

from .claim import Comparison, Measured, Panel, Setup, claim

LEVEL = 0.01
"""Of all tests together: each rejects below its share."""
EXAMPLES, STEPS, FLIPS = 190, 40, 499


def default_data() -> str:
    """MNIST where the folder that LEAKBENCH_DATA names has it, else the digits, which are embedded."""
    folder = os.environ.get("LEAKBENCH_DATA")
    return "mnist" if folder and (Path(folder).expanduser() / "MNIST").is_dir() else "digits"


def energy_distance(gram: Float[Tensor, "n n"]) -> float:
    """Energy distance between points and their mirror images over their mean distance, from their inner products.

    2 E|X - Y| - E|X - X'| - E|Y - Y'| with Y = -X' is twice the mean of |x_i + x_j| - |x_i - x_j|.
    """
    squares = gram.diagonal()
    sums = squares.unsqueeze(0) + squares.unsqueeze(1)
    added, taken = ((sums + sign * 2 * gram).clamp(min=0).sqrt() for sign in (1, -1))
    return 2 * float((added - taken).sum() / (added + taken).sum())


def _centred(gram: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Inner products of points less their mean."""
    mean = gram.mean(dim=0)
    return gram - mean.unsqueeze(0) - mean.unsqueeze(1) + mean.mean()


def symmetry_p_value(points: Float[Tensor, "n 2"], flips: int, coins: torch.Generator) -> float:
    """P-value of symmetry around the mean, by random signs.

    Flipped points are centred again, as the observed ones were: else flips would always look less symmetric. Centring
    shortens them, so the statistic is free of scale. In a plane it is calibrated, for heavy tails too; in hundreds of
    dimensions, where distances are all alike, heavy tails reject far too often.

    Args:
        points: need not be centred.
        flips: random patterns of signs.
        coins: of the signs.

    Returns:
        In (0, 1]; small where the points are not symmetric.
    """
    gram = _centred(points.double() @ points.double().T)
    observed, at_least = energy_distance(gram), 1
    for _ in range(flips):
        signs = (torch.randint(2, (len(gram),), generator=coins) * 2 - 1).to(gram)
        at_least += energy_distance(_centred(gram * signs.unsqueeze(0) * signs.unsqueeze(1))) >= observed
    return at_least / (flips + 1)


def in_the_plane(rows: Float[Tensor, "n dim"], coins: torch.Generator) -> Float[Tensor, "n 2"]:
    """Deviations from the mean in a fixed random projection, of about their own length."""
    projection = torch.randn(rows.shape[1], 2, generator=coins, dtype=torch.float64) / math.sqrt(rows.shape[1])
    rows = rows.double().cpu()
    return (rows - rows.mean(dim=0)) @ projection


def _gradients(setup: Setup, splits: Splits) -> tuple[Float[Tensor, "n dim"], dict[str, Codec]]:
    """Per-example gradients of a shortly trained model, and codecs of a projection and a mask at its parameters."""
    name = "dp_cnn_small" if min(splits.input_shape[1:]) >= 16 else "mlp"
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
    setup: Setup, name: str, given: dict[str, object], model: nn.Module, shape: Layout, public: tuple[Tensor, Tensor]
) -> Codec:
    """What a method's first plan encodes with."""
    defense = setup.defense(name, given, noise_multiplier=1.0)
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
    """Whole gradients, and the same projected and masked, in a random plane each."""
    data = setup.data or default_data()
    sizes = Sizes(private=1, non_member=1, public=2 * EXAMPLES)
    rows, codecs = _gradients(setup, datasets.load(data, seed=0, sizes=sizes).to(setup.device))
    encoded = {"whole": rows} | {title: codec.encode(rows) for title, codec in codecs.items()}
    found, panels = [], []
    for title, points in encoded.items():
        plane = in_the_plane(points, setup.coins("plane", title))
        p = symmetry_p_value(plane, FLIPS, setup.coins("flips", title))
        panels.append(Panel(f"{title}, p = {p:.3g}", plane))
        level = LEVEL / len(encoded)
        found.append(
            Comparison(what=f"p-value of symmetry, {title}", measured=p, closed=level, relation=">=", n=len(rows))
        )
    remark = f"gradients of {len(rows)} public examples of {data}, after {STEPS} steps of SGD on others"
    return Measured(comparisons=tuple(found), remark=remark, panels=tuple(panels))
