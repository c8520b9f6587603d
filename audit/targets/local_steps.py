"""Several local steps of a client that shares only their sum, as functions of data.

Zhu, Yao & Blaschko, ICML 2023, and Geiping et al., NeurIPS 2020, Section 5.3: a client takes epochs of plain SGD and
shares theta_0 - theta_E. The release here is that difference over the learning rate, computed as the sum of the
updates, which avoids rounding to the precision of the weights; for a single step it is the update itself. Batches are
cut from the client's examples in their order, the same in every epoch; the server knows the order and the labels.

The server can simulate that sum if it knows every local step's plan without the releases of earlier local steps.
`unknown_to_server` decides this before any local step is taken: it requests the plans with a context that hides every
quantity that depends on earlier local steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.attacks.core import NotApplicable
from leakbench.defenses.core import (
    Context,
    Coordinates,
    Defense,
    Everything,
    Identity,
    Keep,
    Layout,
    Loss,
    NoisyPlan,
    Rescale,
    Scaled,
    SpanCodec,
    State,
    Step,
    StepPlan,
    ToyRows,
    UnknownToServer,
    blind,
    contributions,
    keyed,
    outputs,
    per_example_gradients,
)
from leakbench.defenses.core.federated.local_training import moved, turn

MAX_UNROLL = 64
"""Default limit on the local steps that are differentiated through: each keeps its gradients in memory."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Local training of a client before it shares its update.

    Attributes:
        epochs: passes over its examples.
        batch: examples per step; must divide their number.
        max_unroll: largest number of local steps that `Observation.simulate` unrolls; memory grows with it.
    """

    epochs: int = 1
    batch: int
    max_unroll: int = MAX_UNROLL

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "max_unroll"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of local steps must be at least 1, got {getattr(self, name)}")

    def steps_per_epoch(self, examples: int) -> int:
        """Returns the local steps per epoch.

        Raises:
            ValueError: the batch does not divide the examples.
        """
        if examples % self.batch:
            raise ValueError(f"batch of local steps must divide the client's {examples} examples, got {self.batch}")
        return examples // self.batch

    def steps(self, examples: int) -> int:
        """Returns the total number of local steps."""
        return self.epochs * self.steps_per_epoch(examples)


_TOY = Layout(("0.weight", "0.bias", "1.weight", "1.bias"), ((12, 8), (12,), (4, 12), (4,)))


def unknown_to_server(defense: Defense, state: State, context: Context, steps: int) -> str:
    """Returns the reason why a server with only the sum of local steps cannot know their plans; empty if it can.

    Args:
        defense: with its noise multiplier set.
        state: state before the first local step.
        context: context of the first local step, with the server's parameters.
        steps: number of local steps.
    """
    first = context.step
    why = f"'{defense.name}' cannot be shared as the sum of {steps} local steps, because a later one"
    out = "; share single steps, without `local`"
    # A copy: planning here must not change the state of the run.
    state, plan = defense.plan(copy.deepcopy(state), context)
    for step in range(first, first + steps):
        if plan.trial is not None or plan.correlated is not None:
            reason = "is tried, and may be taken back" if plan.trial is not None else "has noise of the steps before"
            return f"{why} {reason}{out}"
        if step + 1 == first + steps:
            break
        try:
            ones = tuple(torch.ones(b.codec.size, device=context.device) for b in plan.blocks)
            update = torch.ones(context.dim, device=context.device)
            if defense.observe(state, blind(context.at(step)), ones, update) is not state:
                return f"{why} follows from what the earlier ones released{out}"
            state, plan = defense.plan(state, blind(context.at(step + 1)))
        except UnknownToServer as asked:
            return f"{why} reads {asked}{out}"
        if plan.start_at is not None:
            return f"{why} starts at other parameters than the one before it ended at{out}"
    return ""


def why_not_summed(defense: Defense, local: LocalTraining, examples: int, *, step: int = 0) -> str:
    """Returns the answer of `unknown_to_server` for a toy layout, before model and data exist.

    Args:
        defense: at any noise multiplier.
        local: the local steps.
        examples: number of the client's examples.
        step: number of the first local step; the steps before it are executed with constant releases.
    """
    return why_unknown(defense, local.steps(examples), local.steps_per_epoch(examples), step=step)


def why_unknown(defense: Defense, steps: int, steps_per_epoch: int, *, step: int = 0, round_steps: int = 1) -> str:
    """Returns the answer of `unknown_to_server` for a toy layout.

    Args:
        defense: at any noise multiplier.
        steps: number of local steps.
        steps_per_epoch: local steps in a pass over the client's examples.
        step: number of the first local step.
        round_steps: local steps of a round; 1 in central training.
    """
    if steps == 1:
        return ""
    dim = _TOY.dim
    context = Context(
        step=0,
        steps=step + steps,
        steps_per_epoch=steps_per_epoch,
        layout=_TOY,
        parameters=torch.linspace(-1, 1, dim),
        public=ToyRows(dim),
        one_off=lambda plan, _: tuple(torch.ones(block.codec.size) for block in plan.blocks),
        noise_multiplier=defense.noise_multiplier or 1.0,
        round_steps=round_steps,
    )
    state = defense.start(context)
    for earlier in range(step):
        state, plan = defense.plan(state, context.at(earlier))
        ones = tuple(torch.ones(block.codec.size) for block in plan.blocks)
        state = defense.observe(state, context.at(earlier), ones, torch.ones(dim))
    return unknown_to_server(defense, state, context.at(step), steps)


class LocalUpdate:
    """The sum of several executed local steps as functions of data: the sum that given data would produce.

    Attributes:
        released: [m], the sum at the coordinates that can move.
        kept: [m], these coordinates.
        noise_std: [m], standard deviation of the noise in undivided units, that is, on `expected_batch * released`;
            approximate, because the noise of each step moves the parameters at which the next gradients are taken.
    """

    def __init__(
        self, steps: Sequence[Step], model: nn.Module, layout: Layout, loss: Loss, *, lr: float, max_unroll: int
    ) -> None:
        """Adds up the steps and keeps the server's knowledge of them: plans, and the parameters before the first.

        Args:
            steps: with plans and noisy blocks, in order.
            model: the architecture; its trained parameters are not read.
            layout: order of the flat vectors.
            loss: per-example loss.
            lr: learning rate of the plain SGD.
            max_unroll: largest number of steps that `simulate` takes.
        """
        self._model, self._layout, self._loss, self._lr, self._most = model, layout, loss, lr, max_unroll
        self._start, self.expected_batch = steps[0].parameters.clone(), steps[0].expected_batch
        noisy = [(step.plan, step.noisy) for step in steps if step.plan is not None and step.noisy is not None]
        self._plans = [copy.deepcopy(plan.plan) for plan, _ in noisy]
        total = sum((moved(plan.plan, sums, self.expected_batch) for plan, sums in noisy), start=self._start * 0)
        movable = torch.stack([_movable(plan, self._start) for plan in self._plans]).any(dim=0)
        self.kept = movable.nonzero().flatten()
        self.released = total.index_select(0, self.kept)
        self._lifted = total
        variances = sum((noise_variances(plan, self._start) for plan, _ in noisy), start=torch.zeros_like(self._start))
        self.noise_std = variances.sqrt().index_select(0, self.kept)
        white = self.expected_batch / self.noise_std.clamp(min=1e-30)
        self._whitening = torch.where(self.noise_std > 0, white, 1.0)

    def simulate(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, " m"]:
        """Returns the sum without noise that these data would give, step after step; differentiable.

        Raises:
            NotApplicable: more than `max_unroll` steps.
        """
        if len(self._plans) > self._most:
            raise NotApplicable(
                f"unrolling {len(self._plans)} local steps takes memory for each of them, and max_unroll of `local` "
                f"allows {self._most}; sme needs one gradient, whatever their number"
            )
        point, total = self._start, torch.zeros_like(self._start)
        for step, plan in enumerate(self._plans):
            chosen = turn(step, int(self.expected_batch), len(inputs)).to(inputs.device)
            update = self._update(plan, inputs[chosen], labels[chosen], point)
            total, point = total + update, point - self._lr * update
        return total.index_select(0, self.kept)

    def surrogate(self, inputs: Tensor, labels: Tensor, share: Tensor) -> Float[Tensor, " m"]:
        """Returns the sum with all gradients taken at a point, the fraction `share` of the way from start to end."""
        point = self._start - share * self._lr * self._lifted
        if self._are_linear:
            # Each example is in one step per epoch, so a single pass over all examples serves every step.
            passes = len(self._plans) * self.expected_batch / len(inputs)
            return passes * self._update(self._plans[0], inputs, labels, point).index_select(0, self.kept)
        rows = self._rows(inputs, labels, point)
        total = torch.zeros_like(self._start)
        for step, plan in enumerate(self._plans):
            chosen = turn(step, int(self.expected_batch), len(inputs)).to(inputs.device)
            total = total + self._update(plan, inputs[chosen], labels[chosen], point, rows[chosen])
        return total.index_select(0, self.kept)

    def contributions_between(self, inputs: Tensor, labels: Tensor, share: Tensor) -> Float[Tensor, "n m"]:
        """Returns each example's term in the undivided sum of a step, at the point of `surrogate`; not differentiable.

        Raises:
            NotApplicable: the steps transform an example differently.
        """
        if not self._are_linear:
            raise NotApplicable("what an example adds to a local step must not depend on the step, and here it does")
        plan, point = self._plans[0], self._start - share * self._lr * self._lifted
        with torch.no_grad():
            (rows,) = contributions(plan, lambda at: self._rows(inputs, labels, point if at is None else at))
            # Post maps of such plans scale every coordinate by itself and mix none.
            rows = plan.post(rows.flatten()).view_as(rows)
            return rows if rows.shape[1] == len(self.kept) else rows.index_select(1, self.kept)

    def residual(self, predicted: Float[Tensor, "*guesses m"]) -> Float[Tensor, "*guesses m"]:
        """Returns released minus predicted, approximately in noise units where there is noise."""
        return (self.released - predicted) * self._whitening

    def logits(self, inputs: Tensor) -> Tensor:
        """Returns the logits of the server's model."""
        return outputs(self._model, self._layout, inputs, parameters=self._start)

    @property
    def start(self) -> Float[Tensor, " dim"]:
        """The parameters that the server sent."""
        return self._start

    @property
    def first_plan(self) -> StepPlan:
        """The plan of the first local step."""
        return self._plans[0]

    @property
    def steps(self) -> int:
        """The number of local steps."""
        return len(self._plans)

    def _update(
        self, plan: StepPlan, inputs: Tensor, labels: Tensor, point: Tensor, rows: Tensor | None = None
    ) -> Float[Tensor, " dim"]:
        """Returns the noiseless update of a step on these examples, each bounded by itself."""
        known = self._rows(inputs, labels, point) if rows is None else rows
        each = contributions(plan, lambda at: known if at is None else self._rows(inputs, labels, at))
        return moved(plan, tuple(block.sum(dim=0) for block in each), self.expected_batch)

    def _rows(self, inputs: Tensor, labels: Tensor, point: Tensor) -> Float[Tensor, "n dim"]:
        return per_example_gradients(self._model, self._loss, self._layout, inputs, labels, parameters=point)

    @cached_property
    def _are_linear(self) -> bool:
        """True if all plans map a row in the same way and act linearly on a sum of rows."""
        first = self._plans[0]
        return all(linear_alike(first, plan) for plan in self._plans)


def _movable(plan: StepPlan, like: Tensor) -> Tensor:
    """Returns the coordinates that a step may move [dim]; the others are exactly 0 in every update."""
    # Random probes bounded away from 0: no map in use cancels them, so a coordinate that they leave at 0 is always 0.
    generator = keyed(0)
    probes = [0.5 + torch.rand(b.codec.size, generator=generator, dtype=torch.float64) for b in plan.blocks]
    return moved(plan, tuple(probe.to(like) for probe in probes), 1.0) != 0


def noise_variances(plan: NoisyPlan, like: Tensor) -> Float[Tensor, " dim"]:
    """Returns the noise variances of a step's undivided update; averaged over movable coordinates if mixed."""
    generator, total, exact = keyed(0), torch.zeros_like(like), type(plan.plan.post) in (Identity, Keep, Rescale)
    for number, (block, std) in enumerate(zip(plan.blocks, plan.stds, strict=True)):
        if not block.updates or std == 0:
            continue
        # For signs times std, the square of an entry is its variance if coordinates are not mixed; for orthonormal
        # directions, which mix them, the squares still have the right sum.
        signs = torch.randint(0, 2, (block.codec.size,), generator=generator).to(like) * 2 - 1
        sums = [torch.zeros(b.codec.size, dtype=like.dtype, device=like.device) for b in plan.blocks]
        sums[number] = std * signs
        squares = moved(plan.plan, tuple(sums), 1.0).square()
        if not (exact and _by_coordinate(block.codec)):
            support = _movable(plan.plan, like)
            squares = torch.where(support, squares.sum() / support.sum().clamp(min=1), 0.0)
        total = total + squares
    return total


def _by_coordinate(codec: Any) -> bool:
    """True if each released number is one coordinate; exact classes only, because a subclass may encode otherwise."""
    while type(codec) is SpanCodec:
        codec = codec.codec
    return type(codec) in (Everything, Coordinates, Scaled)


def linear_alike(plan: StepPlan, other: StepPlan) -> bool:
    """True if two single-block plans act alike; decided for plain masks and linear post maps only."""
    if len(plan.blocks) != 1 or len(other.blocks) != 1 or plan.moves is not None or other.moves is not None:
        return False
    a, b = plan.blocks[0], other.blocks[0]
    alike = (a.bound, a.query, plan.post) == (b.bound, b.query, other.post)
    if not alike or type(plan.post) not in (Identity, Rescale):
        return False
    if type(a.codec) is Everything and type(b.codec) is Everything:
        return True
    if not (isinstance(a.codec, Coordinates) and isinstance(b.codec, Coordinates)):
        return False
    return type(a.codec) is type(b.codec) is Coordinates and torch.equal(a.codec.kept, b.codec.kept)
