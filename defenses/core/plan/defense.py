"""Types of a defense: method, step plan, block, and the public context from which a method plans.

A defense is a method and a noise multiplier. In each step, before the batch is drawn, the method returns a plan: the
blocks to release, each with its query, codec, bound and share of the step's privacy. Only the engine touches data and
noise.

Guarantee:
    A plan whose blocks all have a finite sensitivity, executed at noise multiplier sigma > 0, is one Gaussian mechanism
    with multiplier sigma, for any number of blocks: block b gets noise of sigma / sqrt(share_b) times its sensitivity,
    a record moves the whitened blocks by at most sqrt(sum_b share_b) / sigma = 1 / sigma, and all blocks are computed
    on the same batch.
    Relation: add or remove a record; `privacy/sampling.py` states the samplers whose guarantee is for another relation.
    Assumes that plan and state depend on public values and past releases only; `Context` holds nothing else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ..randomness.keys import keyed, seed_from
from .bound import Bound
from .codec import Codec, Coordinates
from .layout import Layout
from .noise_correlation import StrategyRow
from .post import Post, identity
from .public_data import GradientBatch, PublicRows, Rows, disjoint, draw
from .query import ExampleLosses, Gradients, Query, gradient
from .rounding import least_norms

State = Any
"""State of a method between steps: None, numbers, strings, tensors, or tuples, lists and dicts of those."""


LEAST_MULTIPLIER, LARGEST_MULTIPLIER = 1e-6, 1e9
"""Range of nonzero noise multipliers; less noise would be lost in the rounding of a sum."""


def checked_multiplier(value: float) -> float:
    """Checks a noise multiplier and returns it as a plain float: 0, or a number in the accepted range.

    Args:
        value: noise standard deviation / sensitivity.

    Raises:
        ValueError: for NaN, infinity, a negative number, or a positive number outside the accepted range.
    """
    plain = float(value)  # a float subclass may compare and multiply as different numbers
    if plain != 0 and not LEAST_MULTIPLIER <= plain <= LARGEST_MULTIPLIER:  # false for NaN
        raise ValueError(
            f"noise_multiplier must be 0 for no noise, or in [{LEAST_MULTIPLIER:g}, {LARGEST_MULTIPLIER:g}], "
            f"got {value}"
        )
    return plain


@dataclass(frozen=True, kw_only=True)
class Block:
    """A released sum: sum over examples of bound(encode(query(example))), plus noise.

    Attributes:
        codec: map to the space of the release.
        bound: L2 bound of an example's contribution, applied in that space.
        share: fraction of the step's 1 / sigma^2 spent on this block, whose own multiplier is sigma / sqrt(share); the
            shares of a plan sum to 1.
        query: map from an example's gradients or losses to its row.
        updates: whether the decoded block is part of the update; False for a count, for example.
    """

    codec: Codec
    bound: Bound
    share: float = 1.0
    query: Query = gradient
    updates: bool = True

    def __post_init__(self) -> None:
        # A plain float: a subclass could pass the check as one number and multiply as another.
        object.__setattr__(self, "share", float(self.share))
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")

    def contributions(self, source: Gradients | ExampleLosses) -> Float[Tensor, "rows size"]:
        """Computes the contribution of each example: query, encode, bound.

        Args:
            source: gradients of the examples, or losses for a query of losses.
        """
        answers = self.query(source)
        encoded, least = self.codec.encode(answers), least_norms(self.codec, self.query, answers, source)
        return self.bound(encoded) if least is None else self.bound(encoded, least)

    def noise_std(self, noise_multiplier: float) -> float:
        """Standard deviation of the noise on each released value, in the block's own units."""
        # sigma_b = sigma / sqrt(share_b): whitened, a record moves block b by at most sqrt(share_b) / sigma.
        return checked_multiplier(noise_multiplier) / math.sqrt(self.share) * self.bound.norm


@dataclass(frozen=True)
class StepPlan:
    """Blocks released in a step, and the use of the noisy update.

    Attributes:
        blocks: blocks released from the same batch.
        post: map of the noisy update after its division by the expected batch.
        remarks: remarks for the record of the run, such as "rank_lowered_to_15".
        moves: coordinates that the optimizer may change in this step; the trainer restores all others, which momentum
            or weight decay may have moved. None for all.
        start_at: parameters [dim] to set before the step, a function of public values and releases; None for no change.
        correlated: position of the step in a stream of correlated noise; None for independent noise.
        trial: release after the step that decides whether the step is kept or undone; None keeps the step.
    """

    blocks: tuple[Block, ...]
    post: Post = identity
    remarks: tuple[str, ...] = ()
    moves: Coordinates | None = None
    start_at: Tensor | None = None
    correlated: StrategyRow | None = None
    trial: Trial | None = None

    def __init__(
        self,
        *blocks: Block,
        post: Post = identity,
        remarks: tuple[str, ...] = (),
        moves: Coordinates | None = None,
        start_at: Tensor | None = None,
        correlated: StrategyRow | None = None,
        trial: Trial | None = None,
    ) -> None:
        """Takes the blocks and options of a step.

        Raises:
            ValueError: when no block updates, when shares do not sum to 1, or when dimensions disagree.
        """
        if not any(block.updates for block in blocks):
            raise ValueError("a plan must have at least one block with updates=True, got none")
        total = math.fsum(block.share for block in blocks)
        if abs(total - 1) > 1e-9:  # `sensitivity` accounts for the remaining rounding error
            raise ValueError(f"the shares of a plan's blocks must sum to 1, got {total}")
        # Other blocks may have a dimension of their own: the count of adaptive clipping has a single dimension.
        if len({block.codec.dim for block in blocks if block.updates}) > 1:
            raise ValueError("all updating blocks of a plan must decode to the same dimension")
        (dim,) = {block.codec.dim for block in blocks if block.updates}
        if moves is not None and moves.dim != dim:
            raise ValueError(f"moves must be of the {dim} coordinates that the blocks decode to, got {moves.dim}")
        if start_at is not None and start_at.shape != (dim,):
            raise ValueError(f"start_at must have {dim} numbers, as the blocks decode to, got {tuple(start_at.shape)}")
        object.__setattr__(self, "blocks", tuple(blocks))
        object.__setattr__(self, "post", post)
        object.__setattr__(self, "remarks", remarks)
        object.__setattr__(self, "moves", moves)
        object.__setattr__(self, "start_at", start_at)
        object.__setattr__(self, "correlated", correlated)
        object.__setattr__(self, "trial", trial)

    @property
    def sensitivity(self) -> float:
        """Largest norm of a record's whitened contribution at noise multiplier 1: 1 or infinite."""
        if any(math.isinf(block.bound.sensitivity) for block in self.blocks):
            return math.inf
        return math.sqrt(math.fsum(block.share for block in self.blocks))

    def at(self, noise_multiplier: float) -> NoisyPlan:
        """Returns this plan at a noise multiplier, for the engine to execute and the ledger to charge."""
        return NoisyPlan(self, noise_multiplier)


@dataclass(frozen=True)
class NoisyPlan:
    """A plan with its noise multiplier: engine and ledger get the same object, so that charge and noise agree.

    Attributes:
        plan: blocks of a step, or of a one-off release.
        noise_multiplier: multiplier of the whole release as a single Gaussian; 0 for no noise.
    """

    plan: StepPlan
    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", checked_multiplier(self.noise_multiplier))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of the plan."""
        return self.plan.blocks

    @property
    def stds(self) -> list[float]:
        """Standard deviation of the noise on each block's released values, in the block's own units."""
        row = self.plan.correlated
        return self._stds(1.0 if row is None else row.marginal)

    @property
    def fresh_stds(self) -> list[float]:
        """Standard deviation of the newly drawn noise: below `stds` if a part of the noise comes from earlier steps."""
        row = self.plan.correlated
        return self._stds(1.0 if row is None else row.fresh)

    def _stds(self, scale: float) -> list[float]:
        return [scale * block.noise_std(self.noise_multiplier) for block in self.blocks]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Acceptance test of a step: a noisy number, released from a separate sample after the parameters have moved.

    If the step is rejected, parameters, optimizer, method state and last update are restored. The step and the trial
    are charged in either case.

    Attributes:
        plan: plan of a block that releases a single number, with its own noise.
        rate: probability with which each example joins the sample, in (0, 1], independently of the step's batch.
        below: threshold; the step is kept if the released number over the expected sample size is less than it.
    """

    plan: NoisyPlan
    rate: float
    below: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate}")
        if math.isnan(self.below):
            raise ValueError("below must be a number, got NaN")
        if type(self.plan) is not NoisyPlan:
            raise TypeError(f"plan must be one with its noise, as plan.at(2.0), got {type(self.plan).__name__}")
        inner = self.plan.plan
        if [block.codec.size for block in inner.blocks] != [1] or not (inner.trial is inner.correlated is None):
            raise ValueError(
                "a trial must have one block that releases one number, no trial of its own, and independent noise"
            )


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything that a method may read when it plans a step: public values and past releases.

    Attributes:
        step: index of the step, from 0.
        steps: planned number of steps.
        steps_per_epoch: number of steps in which each example is expected to take part once.
        layout: names and shapes of the parameters, in the order of the flat vectors.
        dim: length of the flat vectors, the number of trained parameters.
        parameters: current parameters [dim] (a function of releases); None outside training.
        update: last update [dim] that the optimizer got; None before the first.
        expected_batch: public constant by which sums are divided.
        noise_multiplier: noise multiplier of each step, all blocks together.
        architecture: returns a copy of the current model, for passes that read no data; None in a dry run.
        input_shape: shape of an example; () in a dry run, None if an example has several tensors.
        seed: key of the public randomness.
        public: per-example gradients on public data; None without public data.
        one_off: function that executes a plan on all private data and charges it, given the plan and the step; None
            without data. Methods call `release`.
        device: device of the vectors.
        round_steps: local steps of a client in a federated round; 1 in central training.
    """

    step: int
    steps: int
    dim: int = 0
    layout: Layout = field(default_factory=lambda: Layout((), ()))
    steps_per_epoch: int = 1
    parameters: Float[Tensor, " dim"] | None = None
    update: Float[Tensor, " dim"] | None = None
    expected_batch: float = 1.0
    noise_multiplier: float = 0.0
    architecture: Callable[[], nn.Module] | None = None
    input_shape: tuple[int, ...] | None = ()
    seed: int = 0
    public: PublicRows | None = None
    one_off: Callable[[NoisyPlan, int], tuple[Tensor, ...]] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    round_steps: int = 1

    def __post_init__(self) -> None:
        if not self.layout.names:
            object.__setattr__(self, "layout", Layout.flat(self.dim))
        object.__setattr__(self, "dim", self.layout.dim)
        if not 0 <= self.step < self.steps:
            raise ValueError(f"step must be in [0, {self.steps}), got {self.step}")

    @property
    def epoch(self) -> int:
        """Index of the epoch of this step, from 0."""
        return self.step // self.steps_per_epoch

    @property
    def epochs(self) -> int:
        """Planned number of epochs, rounded up."""
        return -(-self.steps // self.steps_per_epoch)

    def coins(self, number: int | str) -> torch.Generator:
        """Returns a CPU generator of public randomness, a pure function of seed and `number` (usually an epoch).

        A resumed run draws the same mask, and so does any party that knows the seed.
        """
        return keyed(seed_from(self.seed, "coins", number))

    @property
    def public_size(self) -> int:
        """Number of public examples.

        Raises:
            ValueError: when the run has no public data.
        """
        return self._public.size

    def public_rows(self, n: int, *, block: int | None = None) -> Float[Tensor, "n dim"]:
        """Returns per-example gradients of `n` public examples at the current parameters.

        Args:
            n: number of examples.
            block: index of the part to read, if the pool is cut into disjoint parts of `n`; None samples from the whole
                pool, independently of other steps.

        Raises:
            ValueError: when the run has no public data, or too few examples.
        """
        return self._public(self._chosen(n, block))

    def public_batch(self, n: int, *, block: int | None = None) -> GradientBatch:
        """Returns the gradients of `public_rows` as a `GradientBatch`, with outer-product factors if they are known."""
        chosen, factored = self._chosen(n, block), getattr(self._public, "batch", None)
        return Rows(self._public(chosen)) if factored is None else factored(chosen)

    def _chosen(self, n: int, block: int | None) -> Int64[Tensor, " n"]:
        """Positions of the examples read by `public_rows` and `public_batch`."""
        public, needed = self._public, n * (1 if block is None else block + 1)
        if needed > public.size:
            raise ValueError(f"public data must have at least {needed} examples, got {public.size}")
        if block is None:
            return draw(n, public.size, self.coins(f"public {self.step}"))
        return disjoint(n, block, public.size, seed_from(self.seed, "public order"))

    @property
    def _public(self) -> PublicRows:
        if self.public is None:
            raise ValueError("this method needs public data, got none; pass public=(inputs, labels)")
        return self.public

    def release(self, plan: NoisyPlan) -> tuple[Tensor, ...]:
        """Releases a plan on all private data at once, charged without amplification; usually called in `start`.

        Args:
            plan: plan with its own noise multiplier, a function of public values: `context.release(plan.at(8.0))`. The
                defense's multiplier applies to steps only. At 0 no noise is added, and nothing is guaranteed.

        Returns:
            The undivided noisy sum of each block.

        Raises:
            TypeError: for a plan without its noise.
            ValueError: when there are no data to release from.
        """
        # A subclass could execute other noise than the ledger charges.
        if type(plan) is not NoisyPlan:
            raise TypeError(f"a release must have its noise, as in release(plan.at(8.0)), got {type(plan).__name__}")
        if self.one_off is None:
            raise ValueError("a release of its own needs data, and this context has none; it works inside train")
        return self.one_off(plan, self.step)

    def at(self, step: int, **changes: Any) -> Context:
        """Returns this context at another step."""
        return replace(self, step=step, **changes)


@runtime_checkable
class Method(Protocol):
    """Algorithm of a defense: three functions over a serialisable state, without private data or sums without noise."""

    def start(self, context: Context) -> State:
        """Returns the state before the first step."""
        ...

    def plan(self, state: State, context: Context) -> tuple[State, StepPlan]:
        """Returns the next state and the plan of this step, before its batch is drawn."""
        ...

    def observe(
        self, state: State, context: Context, noisy: tuple[Tensor, ...], update: Float[Tensor, " dim"]
    ) -> State:
        """Returns the state after the step, given the undivided noisy sum of each block and the update."""
        ...


class Stateless:
    """A `Method` without state; a subclass defines only `plan(self, context) -> StepPlan`.

    When the subclass is created, its `plan` is wrapped to accept `plan(state, context)` and return `(state, StepPlan)`,
    as a `Method` does. Called with a context alone, as in `super().plan(context)`, it returns the plan alone.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Wraps the `plan(context)` of a subclass as the `plan(state, context)` of a `Method`."""
        super().__init_subclass__(**keywords)
        written = cls.__dict__.get("plan")  # the class's own plan: inherited plans are wrapped already
        if written is not None and _MARK not in vars(written):
            if len(inspect.signature(written).parameters) != 2:
                raise TypeError(
                    f"plan of {cls.__name__}, which is Stateless, must take (self, context), got "
                    f"{inspect.signature(written)}; one with a state is a class with start, plan and observe"
                )
            cls.plan = _without_memory(written)

    def start(self, context: Context) -> None:
        """Returns no state."""

    def plan(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the plan of this step, before its batch is drawn; subclasses define `plan(self, context)`."""
        raise NotImplementedError(f"{type(self).__name__} must define plan(context)")

    def observe(
        self, state: State, context: Context, noisy: tuple[Tensor, ...], update: Float[Tensor, " dim"]
    ) -> State:
        """Returns the state unchanged."""
        return state


def _refuse_other_arguments(method: Method | Stateless) -> None:
    """Raises `TypeError`, before a run, for a method whose functions do not accept the arguments of a `Method`."""
    called = {"start": "context", "plan": "state, context", "observe": "state, context, noisy, update"}
    for name, arguments in called.items():
        if name == "plan" and isinstance(method, Stateless):
            continue  # checked when the class was created
        try:
            # The outermost signature, because a decorator may accept other arguments than the function it wraps.
            signature = inspect.signature(getattr(method, name), follow_wrapped=False)
        except ValueError:
            continue  # functions written in C have no signature
        try:
            signature.bind(*arguments.split(", "))
        except TypeError:
            raise TypeError(
                f"{name} of {type(method).__name__} must take (self, {arguments}), got one with {signature}"
            ) from None


_MARK = "of a method"  # attribute of a wrapped plan: `dataclass(slots=True)` creates the class twice


def _without_memory(written: Callable[[Any, Context], StepPlan]) -> Callable[..., Any]:
    """Wraps `plan(context)` as `plan(state, context)`, which also returns the state, unchanged."""

    @wraps(written)
    def plan(self: Stateless, *arguments: Any) -> Any:
        *state, context = arguments
        step_plan = written(self, context)
        return (*state, step_plan) if state else step_plan

    vars(plan)[_MARK] = True
    return plan


@dataclass(frozen=True)
class Defense:
    """A method and its noise multiplier.

    Attributes:
        method: the algorithm.
        noise_multiplier: noise standard deviation / sensitivity of every step; 0 adds no noise; None is uncalibrated,
            and training refuses.
        name: name in records and tables.
    """

    method: Method | Stateless
    noise_multiplier: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        lacks = [name for name in ("start", "plan", "observe") if not callable(getattr(self.method, name, None))]
        if isinstance(self.method, type) or lacks:
            is_instance = not isinstance(self.method, type)
            type_name = (
                type(self.method).__name__ if is_instance else f"the class {getattr(self.method, '__name__', '')}"
            )
            without = f", which has no {' and no '.join(lacks)}" if lacks else ""
            raise TypeError(
                f"method must be an instance with start, plan and observe, or of a Stateless class, "
                f"got {type_name}{without}"
            )
        _refuse_other_arguments(self.method)
        if self.noise_multiplier is not None:
            object.__setattr__(self, "noise_multiplier", checked_multiplier(self.noise_multiplier))
        if not self.name:  # RandomSparsification -> random_sparsification
            words = type(self.method).__name__
            object.__setattr__(self, "name", "".join(f"_{c.lower()}" if c.isupper() else c for c in words).strip("_"))

    def with_noise(self, noise_multiplier: float) -> Defense:
        """Returns the same method at another noise multiplier."""
        return replace(self, noise_multiplier=noise_multiplier)

    @cached_property
    def calibrated_multiplier(self) -> float:
        """The noise multiplier of a calibrated defense.

        Raises:
            ValueError: when the defense has not been calibrated.
        """
        if self.noise_multiplier is None:
            raise ValueError(
                f"noise_multiplier of '{self.name}' must be set before it runs, got None; "
                "give one, or use "
                "leakbench.defenses.core.calibrate(defense, epsilon=..., delta=..., sampling=..., steps=...)"
            )
        return self.noise_multiplier

    def start(self, context: Context) -> State:
        """Returns the method's state before the first step."""
        return self.method.start(context)

    def plan(self, state: State, context: Context) -> tuple[State, StepPlan]:
        """Returns the method's next state and its plan of this step, after checks of type and dimension.

        Raises:
            TypeError: when the method returns anything but a state and a `StepPlan`.
            ValueError: when the plan's codecs have another dimension than the context.
        """
        returned = self.method.plan(state, context)
        pair = isinstance(returned, tuple) and len(returned) == 2
        if not (pair and isinstance(returned[1], StepPlan)):
            type_name = type(returned[1] if pair else returned).__name__
            rule = "a StepPlan, behind the next state where it is not Stateless"
            alone = " alone, and it has a state: return state, plan" if isinstance(returned, StepPlan) else ""
            raise TypeError(f"plan of '{self.name}' must return {rule}, got {type_name}{alone}")
        if (dim := next(block.codec.dim for block in returned[1].blocks if block.updates)) != context.dim:
            raise ValueError(
                f"plan of '{self.name}' must have codecs of the {context.dim} parameters, context.dim, got one of {dim}"
            )
        return returned

    def observe(self, state: State, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> State:
        """Returns the method's state after the step."""
        return self.method.observe(state, context, noisy, update)
