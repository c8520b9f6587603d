"""Runs a plan on a batch: the only code that holds raw rows or the secret noise.

Per block: query each example (or the mean of its views), encode, bound, sum, add noise; then decode the noisy sums.
How clipped sums are computed is the business of `engines`; sums of micro-batches accumulate in float64, so
micro-batches change nothing but memory, and noise is drawn once per step after the last of them.

Guarantee:
    Relation: add or remove one example. Released: the noisy blocks of `Release`; everything else here (rows,
    raw sums, norms) stays inside. Assumes a loss and a model under which a gradient depends on its own
    example only; layers that break this are refused when an `Engine` is made. A non-finite row counts as
    zero, by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .augment import Augmentation
from .defense import Context, Defense, State, StepPlan
from .engines import Choice, choose, refuse_name
from .layers import refuse_batch_norm
from .noise import GeneratorNoise, Noise
from .query import Gradients
from .rows import Layout, Loss, cross_entropy, microbatches
from .sums import clipped_sums, totals

# Of activations, their derivatives and rows at a time, unless the user says otherwise.
MEMORY_BUDGET = 2 * 2**30
# What a CPU's allocator hands out again without returning it to the system in between, roughly.
REUSED_MEMORY = 256 * 2**20


@dataclass(frozen=True)
class Release:
    """What leaves the engine in one step.

    Attributes:
        noisy: the undivided noisy sum of each block, in the block's released space.
        total: the decoded sum of the updating blocks [dim], undivided; a function of `noisy`.
    """

    noisy: tuple[Tensor, ...]
    total: Float[Tensor, " dim"]


def add_noise(plan: StepPlan, sums: Sequence[Tensor], noise_multiplier: float, noise: Noise | None) -> Release:
    """Adds each block's noise to its sum, in place, and decodes.

    Raises:
        ValueError: when the multiplier is positive and there is no source of noise.
    """
    if noise_multiplier > 0:
        if noise is None:
            raise ValueError(f"noise must be given when noise_multiplier is positive, got None at {noise_multiplier}")
        stds = [block.noise_std(noise_multiplier) for block in plan.blocks]
        if len(sums) == 1 and type(noise) is GeneratorNoise:
            noise.add(sums[0], stds[0])
        else:
            draw = noise.normal(sum(s.numel() for s in sums), sums[0]).split([s.numel() for s in sums])
            for values, z, std in zip(sums, draw, stds, strict=True):
                values.add_(z, alpha=std)
    decoded = [b.codec.decode(values) for b, values in zip(plan.blocks, sums, strict=True) if b.updates]
    return Release(tuple(sums), sum(decoded[1:], start=decoded[0]))


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
    sigma = defense.calibrated_multiplier
    if state is None:
        state = defense.start(context)
    _, plan = defense.plan(state, context)
    gradients = (lambda _point: rows) if isinstance(rows, Tensor) else rows
    like = rows if isinstance(rows, Tensor) else rows(None)
    source = GeneratorNoise(noise, "seeded") if isinstance(noise, torch.Generator) else noise
    sums = clipped_sums(plan, [gradients], like)
    return add_noise(plan, sums, sigma, source)


class Engine:
    """Plans on batches of one model: views, micro-batches, clipped sums, noise.

    Attributes:
        layout: the trained parameters, in the order of every flat vector.
        name: what the record says of how the sums were computed; before the first batch, what was asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss = cross_entropy,
        noise: Noise | None = None,
        microbatch: int | None = None,
        memory_budget: int | None = None,
        engine: str = "auto",
        augmentation: Augmentation | None = None,
    ) -> None:
        """Takes a model and the secret noise.

        Args:
            model: its trained parameters define the layout; refused when it mixes examples.
            loss: per-example loss.
            noise: secret source.
            microbatch: most examples that are worked on at a time; None for what fits the memory budget.
            memory_budget: bytes that activations, their derivatives and rows may take, roughly; 2 GiB where None.
            engine: "auto", "layerwise", "torch.func", "opacus" or "backpack"; `auto` is a static rule, our own engine
                where it knows every layer and the reference elsewhere.
            augmentation: views of each example, whose gradients are averaged and then bounded once.

        Raises:
            ValueError: for a model with BatchNorm, a micro-batch or budget below 1, or an unknown engine.
        """
        refuse_batch_norm(model)
        refuse_name(engine)
        for argument, value in (("microbatch", microbatch), ("memory_budget", memory_budget)):
            if value is not None and value < 1:
                raise ValueError(f"{argument} must be at least 1 or None, got {value}")
        self.model, self.loss, self.noise, self.microbatch = model, loss, noise, microbatch
        self.memory_budget = MEMORY_BUDGET if memory_budget is None else memory_budget
        self.augmentation = augmentation
        self.layout = Layout.of(model)
        self.name = self._asked = engine
        self._checked: dict[object, Choice] = {}

    def prepare(self, inputs: Tensor, targets: Tensor) -> Choice:
        """Chooses and checks what computes the sums, once for data of one shape and dtype, and the model's mode.

        No value of the data is looked at.

        Raises:
            ValueError: when the engine that was asked for cannot run the model.
        """
        shapes = (inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype, inputs.device)
        kind = (*shapes, *(module.training for module in self.model.modules()))
        if kind not in self._checked:
            self._checked[kind] = choose(self._asked, self.model, self.loss, self.layout, inputs, targets)
        self.name = self._checked[kind].note
        return self._checked[kind]

    def gradients(self, inputs: Tensor, targets: Tensor) -> Gradients:
        """Per-example gradients of these examples as they are, as a function of the parameter point."""
        rows = self.prepare(inputs, targets).engine.rows
        return lambda point: rows(inputs, targets, point=point)

    def run(
        self,
        plan: StepPlan,
        inputs: Tensor,
        targets: Tensor,
        noise_multiplier: float,
        *,
        coins: torch.Generator | None = None,
    ) -> Release:
        """Executes a plan on one batch, which may be empty.

        Args:
            plan: fixed before the batch was drawn.
            inputs: the batch.
            targets: of the batch.
            noise_multiplier: of the whole step.
            coins: public randomness of the views; needed where there is an augmentation.

        Raises:
            ValueError: without a source of noise or of views where one is needed.
        """
        choice, augmentation = self.prepare(inputs, targets), self.augmentation
        like = next(p for p in self.model.parameters() if p.requires_grad).detach()
        views = 1 if augmentation is None else augmentation.views
        drawn = None
        if augmentation is not None:
            if coins is None:
                raise ValueError("coins must be given where there is an augmentation, got None")
            drawn = augmentation.draw(len(inputs) * views, coins)
        sums = []
        limit = self.microbatch or self._fitting(choice, views)
        even = -(-len(inputs) // max(1, -(-len(inputs) // limit)))  # parts of one size, none of which is a remnant
        for part in microbatches(len(inputs), max(1, even)):
            x, y = inputs[part], targets[part]
            if augmentation is not None and drawn is not None:
                x, y = x.repeat_interleave(views, dim=0), y.repeat_interleave(views, dim=0)
                x = augmentation.apply(x, drawn[part.start * views : part.stop * views])
            sums.append(choice.engine.sums(plan, x, y, views=views))
        return add_noise(plan, totals(plan, sums, like), noise_multiplier, self.noise)

    def rest(self) -> None:
        """Lets go of memory that was kept from one batch to the next."""
        for choice in self._checked.values():
            choice.engine.rest()

    def _fitting(self, choice: Choice, views: int) -> int:
        """Most examples whose work fits the budget; at least one."""
        some = next(iter(self.model.parameters()))
        budget = self.memory_budget
        if some.device.type == "cpu":
            # Fresh memory has to be cleared page by page, which takes longer than most passes over it; smaller batches
            # use the same again. But every one costs passes over a vector of the parameters' length.
            budget = min(budget, max(REUSED_MEMORY, 64 * self.layout.dim * some.element_size()))
        each = views * choice.engine.bytes_per_entry(choice.activations, some.element_size())
        return max(1, budget // max(1, each))
