"""Noise under momentum: its effect on the velocity and on the parameters.

Zhu & Blaschko, TMLR 2023, equations 117-118, add the coefficients mu^j of independent draws as if all draws were the
same, which gives s / (1 - mu); variances of independent draws add instead. The measurement is a run of the trainer in
which every gradient is zero, so that its parameters are noise alone: each coordinate is a draw.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.defenses.core import Execution, Recipe, Recording, full, train

from .claim import Comparison, Measured, Setup, claim, ratio_of, spread_of

MU, STEPS, LR, SIGMA, EXAMPLES = 0.9, 400, 0.5, 1.0, 4
STD = SIGMA / EXAMPLES
"""Standard deviation of the noise in a coordinate of an update, at clip norm 1."""


class _Walk(NamedTuple):
    """End of a run that starts at parameters of 0: velocity of the last step, and parameters."""

    velocity: Float[Tensor, " dim"]
    displacement: Float[Tensor, " dim"]


def _first_output(outputs: Float[Tensor, "n classes"], targets: Tensor) -> Float[Tensor, " n"]:
    """Loss of a linear model whose gradient is the input itself."""
    return outputs[:, 0]


def _walk(
    setup: Setup, momentum: float, name: str, *, clip_norm: float = 1.0, sigma: float = SIGMA, signal: bool = False
) -> _Walk:
    """Runs DP-SGD on gradients that are all zero, or all equal."""
    dim = 5 * setup.draws
    model = nn.Linear(dim, 1, bias=False)
    nn.init.zeros_(model.weight)
    inputs = torch.ones(EXAMPLES, dim) if signal else torch.zeros(EXAMPLES, dim)
    run = train(
        model.to(setup.device),
        (inputs.to(setup.device), torch.zeros(EXAMPLES, dtype=torch.int64, device=setup.device)),
        setup.defense("dp_sgd", {"clip_norm": clip_norm}, noise_multiplier=sigma),
        sampling=full(),
        steps=STEPS,
        lr=LR,
        noise=setup.noise("momentum", name),
        seed=setup.seed,
        sampler_key=0,
        recipe=Recipe(momentum=momentum, loss=_first_output),
        execution=Execution(device=setup.device),
        recording=Recording(observer="iterates", only=(STEPS - 1,)),
    )
    last = model.weight.detach().flatten().double().cpu()
    before = run.transcript.steps[-1].parameters.double().cpu()
    return _Walk((before - last) / LR, last)


def _coefficients() -> Float[Tensor, " steps"]:
    """Weight of each step's draw in the displacement, in units of lr: 1 + mu + ... to the end of the run."""
    remaining_steps = torch.arange(1, STEPS + 1, dtype=torch.float64)
    return (1 - MU**remaining_steps) / (1 - MU)


@claim(
    "3.5",
    "Momentum multiplies the noise's standard deviation in the velocity by 1 / (1 - mu) (Zhu & Blaschko, eq. 117-118).",
    should_hold=False,
    caveat="the sum of coefficients treats independent draws as one; the velocity's noise is s / sqrt(1 - mu^2)",
)
def momentum_velocity(setup: Setup) -> Measured:
    """Velocity of the last of 400 steps, momentum 0.9."""
    velocity = _walk(setup, MU, "velocity").velocity / STD
    quantity = "standard deviation of the velocity, in units of one update's noise"
    geometric = (1 - MU ** (2 * STEPS)) / (1 - MU**2)
    return Measured(
        comparisons=(spread_of(quantity, velocity, 1 / (1 - MU)),),
        instead=(spread_of(quantity, velocity, math.sqrt(geometric)),),
    )


@claim(
    "3.5",
    "After T steps noise has moved the parameters by lr s sqrt(sum_j ((1 - mu^j) / (1 - mu))^2).",
    caveat="lr s sqrt(T) / (1 - mu), which is in use, is its limit for long runs: 1.7 % more at 400 steps and mu 0.9",
)
def momentum_displacement(setup: Setup) -> Measured:
    """Parameters after 400 steps, from 0."""
    moved = _walk(setup, MU, "displacement").displacement / (LR * STD * math.sqrt(STEPS))
    closed = float(_coefficients().square().mean().sqrt())
    return Measured(comparisons=(spread_of("standard deviation, in units of lr s sqrt(T)", moved, closed),))


@claim(
    "3.5",
    "The rule C / (1 - mu) = const keeps how far noise and clipped signal move the parameters.",
    caveat="up to the start of a run, while velocity builds up: mu / (T (1 - mu)) of the signal, 2.2 % at 400 steps",
)
def momentum_rule(setup: Setup) -> Measured:
    """Momentum 0.9 at clip norm C against no momentum at C / (1 - mu): noise alone, then signal alone."""
    larger, comparisons = 1 / (1 - MU), []
    with_momentum = _walk(setup, MU, "rule, with").displacement
    without = _walk(setup, 0.0, "rule, without", clip_norm=larger).displacement
    share = _coefficients() * (1 - MU)
    quantity = "energy of displacement by noise, with momentum / without"
    comparisons.append(ratio_of(quantity, with_momentum.square(), without.square(), float(share.square().mean())))
    quiet = {"sigma": 0.0, "signal": True}
    along = _walk(setup, MU, "signal, with", **quiet).displacement.mean()
    plain = _walk(setup, 0.0, "signal, without", clip_norm=larger, **quiet).displacement.mean()
    closed = 1 - MU * (1 - MU**STEPS) / (STEPS * (1 - MU))
    comparisons.append(
        Comparison(
            what="displacement by signal, with momentum / without",
            measured=float(along / plain),
            closed=closed,
            tolerance=1e-4,  # of 400 additions in float32
        )
    )
    return Measured(comparisons=tuple(comparisons))
