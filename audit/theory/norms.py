"""Norms of encoded gradients, which never exceed the original norm, so that the same clip norm removes less of them.

The plans are those of the second step of a run on the digits, when DPDR has a direction; the gradients are of the
examples at the parameters of that step.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from leakbench.benchmarks import models
from leakbench.benchmarks.core import Sizes
from leakbench.defenses.core import (
    Block,
    Codec,
    Execution,
    Layout,
    Recording,
    Step,
    Subspace,
    cross_entropy,
    full,
    per_example_gradients,
    train,
)

from ..plan.splits_cache import load_data
from .claim import Comparison, Measured, Setup, claim

TOLERANCE = 1e-5  # relative, of float32
EXAMPLES = 64
CLIP = 0.5  # shorter than the gradients, so that clipping is active


class _Second:
    """Second step of a run under a defense: blocks, noisy sums of the first step, gradients at its parameters.

    Attributes:
        blocks: of the executed plan.
        layout: of the model.
        before: noisy sums of the first step.
        rows: per-example gradients, float32.
    """

    def __init__(self, setup: Setup, name: str, **settings: object) -> None:
        splits = load_data("digits", 0, Sizes(), setup.device)
        model = models.build("mlp", input_shape=splits.input_shape, classes=splits.classes, seed=0, hidden=8)
        model = model.to(setup.device)
        inputs, labels = splits.private.inputs[:EXAMPLES], splits.private.labels[:EXAMPLES]
        self.layout = Layout.of(model)
        steps: list[Step] = train(
            model,
            (inputs, labels),
            setup.defense(name, settings, noise_multiplier=0.1),
            sampling=full(),
            steps=2,
            lr=0.5,
            public=(splits.public.inputs, splits.public.labels),
            noise=setup.noise("norms", name),
            seed=setup.seed,
            sampler_key=0,
            execution=Execution(device=setup.device),
            recording=Recording(observer="updates"),
        ).transcript.steps
        first, second = steps
        self.blocks: tuple[Block, ...] = () if second.plan is None else second.plan.blocks
        self.before: tuple[Tensor, ...] = () if first.noisy is None else first.noisy
        self.rows = per_example_gradients(
            model, cross_entropy, self.layout, inputs, labels, parameters=second.parameters
        ).detach()

    def encoded(self, number: int) -> Float[Tensor, "rows size"]:
        """Returns the per-example gradients in a block's space."""
        return self.blocks[number].codec.encode(self.rows)


def _same_energy(
    quantity: str, energies: Float[Tensor, " rows"], expected: Float[Tensor, " rows"], of: Tensor
) -> Comparison:
    """Largest difference of squared norms, relative to those of the whole gradients."""
    whole = of.double().square().sum(dim=1)
    return Comparison(
        what=quantity, measured=float(((energies - expected).abs() / whole).max()), closed=0.0, tolerance=TOLERANCE
    )


def _energy(rows: Float[Tensor, "rows size"]) -> Float[Tensor, " rows"]:
    return rows.double().square().sum(dim=1)


def _shorter(second: _Second, number: int = 0) -> list[Comparison]:
    """Checks that a block's encoded gradients are no longer than the gradients, and that no clip factor is smaller."""
    whole, part = second.rows.norm(dim=1).double(), second.encoded(number).norm(dim=1).double()
    bound = second.blocks[number].bound
    name = type(second.blocks[number].codec).__name__
    return [
        Comparison(
            what=f"largest ||encoded g|| / ||g||, {name}",
            measured=float((part / whole).max()),
            closed=1.0,
            relation="<=",
            tolerance=TOLERANCE,
        ),
        Comparison(
            what=f"smallest ratio of clip factors, encoded / whole, {name}",
            measured=float((bound.factors(part) / bound.factors(whole)).min()),
            closed=1.0,
            relation=">=",
            tolerance=TOLERANCE,
        ),
    ]


def _orthonormal(codec: Codec) -> Comparison:
    """Compares the columns of the bases with the identity, in float64."""
    errors = [0.0]
    if isinstance(codec, Subspace):
        for basis in codec.bases:
            exact = basis.double()
            errors.append(float((exact.T @ exact - torch.eye(exact.shape[1]).to(exact)).abs().max()))
    return Comparison(what="largest entry of |V'V - 1|", measured=max(errors), closed=0.0, tolerance=TOLERANCE)


@claim("3.6", "DPDR: ||p||^2 = ||g||^2 - sum of the squared coefficients along the last release, layer by layer.")
def norm_dpdr(setup: Setup) -> Measured:
    """The direction is recomputed in float64 from the noisy sum of the step before."""
    second = _Second(setup, "dpdr", clip_norm=CLIP)
    release, rows = second.before[0].double(), second.rows.double()
    energy_along = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for start, stop in second.layout.layers:
        unit = release[start:stop] / release[start:stop].norm()
        energy_along += (rows[:, start:stop] @ unit).square()
    expected = _energy(rows) - energy_along
    quantity = "largest error of ||p||^2, relative to ||g||^2"
    return Measured(
        comparisons=(
            _same_energy(quantity, _energy(second.encoded(0)), expected, rows),
            *_shorter(second, 0),
            *_shorter(second, 1),
        )
    )


@claim("3.6", "PCDP: ||V'g|| <= ||g||, with equality in the span of V.")
def norm_pcdp(setup: Setup) -> Measured:
    """Bases of public gradients, one per tensor; equality for random combinations of their columns."""
    second = _Second(setup, "pcdp", clip_norm=CLIP, rank=20)
    codec = second.blocks[0].codec
    coefficients = torch.randn(8, codec.size, generator=setup.generator("coefficients")).to(setup.device)
    inside = torch.stack([codec.decode(row) for row in coefficients])
    quantity = "largest error of ||V'g||^2, relative to ||g||^2, g in the span"
    same = _same_energy(quantity, _energy(codec.encode(inside)), _energy(inside), inside)
    return Measured(comparisons=(*_shorter(second), same, _orthonormal(codec)))


@claim("3.6", "Random sparsification: ||m.g|| <= ||g||.")
def norm_random_sparsification(setup: Setup) -> Measured:
    """The missing energy is that of the dropped coordinates."""
    second = _Second(setup, "random_sparsification", clip_norm=CLIP, final_sparsity=0.7, cooling=False)
    kept = second.blocks[0].codec.decode(torch.ones(second.blocks[0].codec.size, device=setup.device)) != 0
    expected = _energy(second.rows) - _energy(second.rows[:, ~kept])
    quantity = "largest error of ||m.g||^2 as ||g||^2 less the dropped"
    same = _same_energy(quantity, _energy(second.encoded(0)), expected, second.rows)
    return Measured(comparisons=(*_shorter(second), same))


@claim("3.6", "GEP: ||g||^2 = ||w||^2 + ||rest||^2.")
def norm_gep(setup: Setup) -> Measured:
    """Coefficients along public directions, and the residual."""
    second = _Second(setup, "gep", clip_norm=CLIP, clip_norm_rest=CLIP, rank=30)
    parts = _energy(second.encoded(0)) + _energy(second.encoded(1))
    quantity = "largest error of ||w||^2 + ||rest||^2, relative to ||g||^2"
    same = _same_energy(quantity, parts, _energy(second.rows), second.rows)
    return Measured(
        comparisons=(same, *_shorter(second, 0), *_shorter(second, 1), _orthonormal(second.blocks[0].codec))
    )
