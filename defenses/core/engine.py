"""Runs a plan on a batch: the only code that holds raw rows or the secret noise.

Per block: query each example, encode, bound, sum, add noise; then decode the noisy sums. The reference engine
materialises rows with torch.func, micro-batch by micro-batch; sums accumulate in float64, so micro-batches
change nothing but memory, and noise is drawn once per step after the last of them.

Guarantee:
    Relation: add or remove one example. Released: the noisy blocks of `Release`; everything else here (rows,
    raw sums, norms) stays inside. Assumes a loss and a model under which a gradient depends on its own
    example only; layers that break this are refused when an `Engine` is made. A non-finite row counts as
    zero, by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .bound import finite_rows
from .defense import Context, Defense, State, StepPlan
from .layers import refuse_batch_norm
from .noise import GeneratorNoise, Noise
from .query import Gradients
from .rows import Layout, Loss, cross_entropy, microbatches, per_example_gradients


@dataclass(frozen=True)
class Release:
    """What leaves the engine in one step.

    Attributes:
        noisy: the undivided noisy sum of each block, in the block's released space.
        total: the decoded sum of the updating blocks [dim], undivided; a function of `noisy`.
    """

    noisy: tuple[Tensor, ...]
    total: Float[Tensor, " dim"]


def contributions(plan: StepPlan, gradients: Gradients) -> tuple[Float[Tensor, "rows _"], ...]:
    """What each example adds to each block: query, encode, bound. One tensor [rows, size] per block."""

    @cache
    def finite(point: Tensor | None) -> Tensor:
        return finite_rows(gradients(point))

    return tuple(block.bound(block.codec.encode(block.query(finite))) for block in plan.blocks)


def clipped_sums(plan: StepPlan, batches: Sequence[Gradients], like: Tensor) -> tuple[Tensor, ...]:
    """The sum of bounded contributions of each block, before any noise: private, for engine and tests.

    Args:
        plan: the step's plan.
        batches: gradients of each micro-batch; empty for an empty batch.
        like: device and dtype of the result.

    Returns:
        One vector [size] per block.
    """
    totals = [torch.zeros(b.codec.size, dtype=torch.float64, device=like.device) for b in plan.blocks]
    for gradients in batches:
        for total, rows in zip(totals, contributions(plan, gradients), strict=True):
            total += rows.sum(dim=0, dtype=torch.float64)
    return tuple(total.to(like.dtype) for total in totals)


def add_noise(plan: StepPlan, sums: Sequence[Tensor], noise_multiplier: float, noise: Noise | None) -> Release:
    """Adds each block's noise and decodes.

    Raises:
        ValueError: when the multiplier is positive and there is no source of noise.
    """
    noisy = tuple(sums)
    if noise_multiplier > 0:
        if noise is None:
            raise ValueError(f"noise must be given when noise_multiplier is positive, got None at {noise_multiplier}")
        draw = noise.normal(sum(s.numel() for s in sums), sums[0]).split([s.numel() for s in sums])
        noisy = tuple(
            s + block.noise_std(noise_multiplier) * z for s, block, z in zip(sums, plan.blocks, draw, strict=True)
        )
    decoded = [b.codec.decode(values) for b, values in zip(plan.blocks, noisy, strict=True) if b.updates]
    return Release(noisy, torch.stack(decoded).sum(dim=0))


def release(
    defense: Defense,
    rows: Float[Tensor, "rows dim"] | Callable[[Tensor | None], Tensor],
    context: Context,
    *,
    noise: Noise | torch.Generator | None = None,
    state: State = None,
) -> Release:
    """One step's release for given rows, outside of training: for tests, notebooks and audits.

    Args:
        defense: with its noise multiplier set.
        rows: per-example gradients, or a function from a parameter point to them.
        context: the step.
        noise: secret source; needed unless the multiplier is 0.
        state: the method's state; None starts it afresh.

    Returns:
        The noisy blocks and their decoded sum, undivided.
    """
    if state is None:
        state = defense.start(context)
    _, plan = defense.plan(state, context)
    gradients = (lambda _point: rows) if isinstance(rows, Tensor) else rows
    like = rows if isinstance(rows, Tensor) else rows(None)
    source = GeneratorNoise(noise, "seeded") if isinstance(noise, torch.Generator) else noise
    sums = clipped_sums(plan, [gradients], like)
    return add_noise(plan, sums, defense.calibrated_multiplier, source)


class Engine:
    """The reference engine: rows by torch.func, one micro-batch at a time.

    Attributes:
        name: what the record says of how the sums were computed.
    """

    name = "torch.func"

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss = cross_entropy,
        noise: Noise | None = None,
        microbatch: int | None = None,
    ) -> None:
        """Takes a model and the secret noise.

        Args:
            model: its trained parameters define the layout; refused when it mixes examples.
            loss: per-example loss.
            noise: secret source.
            microbatch: most examples whose rows exist at a time; None for the whole batch.

        Raises:
            ValueError: for a model with BatchNorm, or a micro-batch below 1.
        """
        refuse_batch_norm(model)
        if microbatch is not None and microbatch < 1:
            raise ValueError(f"microbatch must be at least 1 or None, got {microbatch}")
        self.model, self.loss, self.noise, self.microbatch = model, loss, noise, microbatch
        self.layout = Layout.of(model)

    def gradients(self, inputs: Tensor, targets: Tensor) -> Gradients:
        """Per-example gradients of these examples, as a function of the parameter point."""

        def at(point: Tensor | None) -> Tensor:
            return per_example_gradients(self.model, self.loss, self.layout, inputs, targets, parameters=point)

        return at

    def run(self, plan: StepPlan, inputs: Tensor, targets: Tensor, noise_multiplier: float) -> Release:
        """Executes a plan on one batch, which may be empty."""
        like = next(p for p in self.model.parameters() if p.requires_grad).detach()
        batches = [self.gradients(inputs[part], targets[part]) for part in microbatches(len(inputs), self.microbatch)]
        with torch.no_grad():
            sums = clipped_sums(plan, batches, like)
        return add_noise(plan, sums, noise_multiplier, self.noise)
