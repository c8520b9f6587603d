"""Cost of an informed adversary's score: inner product and norm of every example's bounded contribution.

All candidates of a step are multiplied with the same direction, its noise. The baseline is the cost of an example in
the clipped sum of a training step. The direct way forms all contributions before multiplying them, with memory
proportional to examples times parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any, Unpack

import torch
from torch import Tensor

from leakbench.defenses.core import (
    Block,
    Complement,
    Coordinates,
    Engine,
    Everything,
    StepPlan,
    Subspace,
    clip,
    contributions,
)

from .. import models
from .part import ROUNDS, Options, SpeedPart
from .targets import SpeedTarget

TRAIN, ROWS, ALONG = "training an example", "contributions", "along one direction"
WAYS = (TRAIN, ROWS, ALONG)
PLANS = ("dense", "masked", "without a subspace")
NETWORKS = {"mlp": (1, 28, 28), "dp_cnn_small": (1, 28, 28), "dp_cnn": (1, 28, 28)}
QUICK_NETWORKS = tuple(NETWORKS)[:1]
EXAMPLES = {"mlp": 256, "dp_cnn_small": 128, "dp_cnn": 64}
KEPT, RANK = 0.3, 4
MOST = 1.5
"""Limit on the ratio to the cost of training an example."""


@cache
def _case(network: str, plan: str, examples: int, device: str) -> tuple[Engine, StepPlan, Tensor, Tensor, Tensor]:
    """Builds an engine, a plan, and examples with a direction in the plan's space."""
    shape, generator = NETWORKS[network], torch.Generator().manual_seed(0)
    engine = Engine(models.build(network, input_shape=shape, classes=10, seed=0).to(device), expected_batch=examples)
    dim = engine.layout.dim
    if plan == "dense":
        codec = Everything(dim)
    elif plan == "masked":
        codec = Coordinates((torch.rand(dim, generator=generator) < KEPT).nonzero().flatten(), dim=dim)
    else:
        codec = Complement(Subspace.of(torch.linalg.qr(torch.randn(dim, RANK, generator=generator)).Q.to(device)))
    inputs = torch.rand(examples, *shape, generator=generator).to(device)
    labels = torch.randint(0, 10, (examples,), generator=generator).to(device)
    direction = torch.randn(codec.size, generator=generator).to(device)
    return engine, StepPlan(Block(codec=codec, bound=clip(1.0))), inputs, labels, direction


def build(*, network: str, plan: str, examples: int, way: str, device: str = "cpu") -> Callable[[], list[Tensor]]:
    """Builds a way: inner products and squared norms [examples], or the clipped sum.

    Args:
        network: in `NETWORKS`.
        plan: in `PLANS`.
        examples: number of examples.
        way: in `WAYS`.
        device: "cpu" or "cuda".
    """
    engine, noisy_plan, inputs, labels, direction = _case(network, plan, examples, device)

    def by_rows() -> list[Tensor]:
        with torch.no_grad():
            (rows,) = contributions(noisy_plan, engine.gradients(inputs, labels))
            return [rows @ direction, rows.square().sum(dim=1)]

    def along() -> list[Tensor]:
        (pair,) = engine.matched(noisy_plan, [direction], inputs, labels)
        return list(pair)

    return {TRAIN: lambda: list(engine.clipped_sums(noisy_plan, inputs, labels)), ROWS: by_rows, ALONG: along}[way]


def check(*, network: str, plan: str, examples: int, device: str = "cpu") -> None:
    """Raises if the two ways disagree: a wrong answer has no speed."""
    sizes = {"network": network, "plan": plan, "examples": examples, "device": device}
    for actual, expected in zip(build(**sizes, way=ALONG)(), build(**sizes, way=ROWS)(), strict=True):
        torch.testing.assert_close(actual.float(), expected, rtol=1e-4, atol=1e-5)


def measure(*, networks: Sequence[str] = (), examples: int | None = None, **options: Unpack[Options]) -> dict[str, Any]:
    """Compares the ways on every network and plan.

    Args:
        networks: names; the usual networks if empty, the smallest if quick.
        examples: number for each network; the usual number where None.
        options: see `Options`.
    """
    part = SpeedPart(__name__, options)
    for network, plan in product(networks or (QUICK_NETWORKS if part.quick else NETWORKS), PLANS):
        name = f"{network}, {plan}"
        part.say(name)
        about = {"network": network, "plan": plan, "examples": examples or EXAMPLES[network]}
        check(**about, device=part.device)
        part.compare(name, WAYS, about, peer=TRAIN)
        part.targets.append(SpeedTarget(case=name, way=ALONG, against=TRAIN, quantity="time", limit=MOST))
    return part.document(
        title="What an informed adversary's score costs",
        method=(
            f"Masks keep {KEPT:.0%}, subspaces have {RANK} directions; float32, the same examples for all. {ROUNDS}"
        ),
        settings={"kept": KEPT},
    )
