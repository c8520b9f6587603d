"""Defenses, methods, step plans and blocks: everything that is fixed before a batch is drawn, and the context it reads.

A defense is a method and one noise multiplier. Per step the method answers with a plan: which blocks to release, in
which space, bounded how, at which share of the step's privacy. The engine alone touches data and noise.

Guarantee:
    A plan whose blocks all have a finite sensitivity, executed at noise multiplier sigma > 0, is one Gaussian
    mechanism with multiplier sigma, whatever its blocks: block b gets noise of sigma / sqrt(share_b) times
    its sensitivity, a record moves the whitened blocks by at most sqrt(sum_b share_b) / sigma = 1 / sigma,
    and all blocks see one batch.
    Relation: add or remove one record (for fixed-size samplers, its replacement by one that contributes
    zero). Assumes that plan and state depend on public things and past releases only; `Context` holds nothing
    else.
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
"""What a method remembers between steps: None, numbers, strings, tensors; tuples, lists, dicts of those."""


LEAST_MULTIPLIER, LARGEST_MULTIPLIER = 1e-6, 1e9
"""Noise multipliers that are not 0 lie between these: less noise than that is lost among the digits of a sum."""


def checked_multiplier(value: float) -> float:
    """A noise multiplier that can be drawn with and charged: exactly 0, or a number of a size that floats can add.

    Args:
        value: noise standard deviation / sensitivity.

    Raises:
        ValueError: for anything else: NaN, infinity, a negative number, or one so small that no noise would be drawn.
    """
    plain = float(value)  # a subclass may compare as one number and multiply as another
    if plain != 0 and not LEAST_MULTIPLIER <= plain <= LARGEST_MULTIPLIER:  # false for NaN
        raise ValueError(
            f"noise_multiplier must be 0 for no noise, or in [{LEAST_MULTIPLIER:g}, {LARGEST_MULTIPLIER:g}], "
            f"got {value}"
        )
    return plain


@dataclass(frozen=True, kw_only=True)
class Block:
    """One released sum: sum over examples of bound(encode(query(example))), plus noise.

    Attributes:
        codec: the space it is released in.
        bound: the L2 bound of one example's contribution, taken in that space.
        share: fraction of the step's 1 / sigma^2 that this block spends; all blocks of a plan sum to 1.
        query: what is asked of each example.
        updates: whether the decoded block is part of the update (a count, say, is not).
    """

    codec: Codec
    bound: Bound
    share: float = 1.0
    query: Query = gradient
    updates: bool = True

    def __post_init__(self) -> None:
        # A plain float: a subclass may compare as one number, and so pass the check, and multiply as another.
        object.__setattr__(self, "share", float(self.share))
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")

    def contributions(self, source: Gradients | ExampleLosses) -> Float[Tensor, "rows size"]:
        """What each example adds: query, encode, bound; the one place where rows are bounded.

        Args:
            source: gradients of the examples, or losses for a query of those.
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
    """All blocks of one step, and what happens to the update after the noise.

    Attributes:
        blocks: released from one and the same batch.
        post: map of the noisy update after its division by the expected batch.
        remarks: what a record of the run should say about this plan, as "rank_lowered_to_15".
        moves: coordinates that the optimizer may move in this step, whatever its momentum; None for all of them.
        start_at: parameters [dim] that the model is put to before the step, a function of public things and releases;
            None for where it is.
        correlated: the place of the step in a stream of noise that is correlated over steps; None for noise of its own.
        trial: decides after the step whether it stands; None where every step does.
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
        """Collects the blocks.

        Raises:
            ValueError: when there is no block that updates, when shares do not sum to 1, or when dimensions
                disagree.
        """
        if not any(block.updates for block in blocks):
            raise ValueError("a plan must have at least one block with updates=True, got none")
        total = math.fsum(block.share for block in blocks)
        if abs(total - 1) > 1e-9:  # what rounding leaves, `sensitivity` accounts for
            raise ValueError(f"the shares of a plan's blocks must sum to 1, got {total}")
        # Others may live in a space of their own: adaptive clipping's count has one dimension.
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
        """Largest norm of one record's whitened contribution at noise multiplier 1: one, or infinite."""
        if any(math.isinf(block.bound.sensitivity) for block in self.blocks):
            return math.inf
        return math.sqrt(math.fsum(block.share for block in self.blocks))

    def at(self, noise_multiplier: float) -> NoisyPlan:
        """This plan at a noise multiplier: what an engine executes, and the ledger charges."""
        return NoisyPlan(self, noise_multiplier)


@dataclass(frozen=True)
class NoisyPlan:
    """A plan and the noise that it is executed with: engine and ledger get the two as one, and cannot differ in them.

    Attributes:
        plan: the blocks of one step, or of a release of its own.
        noise_multiplier: of the whole release as one Gaussian; 0 for no noise.
    """

    plan: StepPlan
    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", checked_multiplier(self.noise_multiplier))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Those of the plan."""
        return self.plan.blocks

    @property
    def stds(self) -> list[float]:
        """Standard deviation of the noise on each block's released values, in the block's own units."""
        row = self.plan.correlated
        return self._stds(1.0 if row is None else row.marginal)

    @property
    def fresh_stds(self) -> list[float]:
        """The same of the noise that is drawn in this step: less, where some of it is that of earlier steps."""
        row = self.plan.correlated
        return self._stds(1.0 if row is None else row.fresh)

    def _stds(self, scale: float) -> list[float]:
        return [scale * block.noise_std(self.noise_multiplier) for block in self.blocks]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One number that is released after a step, of a sample of its own, and decides whether the step stands.

    The step has moved the parameters by then. Where it does not stand, they, the optimizer, the method's state and the
    last update are as if it had not been taken; it is charged all the same, and so is the trial.

    Attributes:
        plan: of one block that releases one number, with noise of its own.
        rate: every example joins the sample with this probability, in (0, 1], by a coin that is not the step's.
        below: the step stands if the number, divided by the expected size of the sample, is less than this.
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
    """What a method may look at when it plans a step: public things and past releases, nothing else.

    Attributes:
        step: number of the step, from 0.
        steps: planned number of steps.
        steps_per_epoch: steps in which every example is expected once.
        layout: names and shapes behind the flat vectors.
        dim: length of the flat vectors.
        parameters: the current parameters [dim] (themselves a function of releases); None outside of
            training.
        update: the last update [dim] that the optimizer got; None before the first.
        expected_batch: the public constant that sums are divided by.
        noise_multiplier: of the steps, as one Gaussian each.
        architecture: makes a copy of the model as it is, for passes that look at no data; None in a dry run.
        input_shape: of one example; () in a dry run.
        seed: key of the public randomness.
        public: per-example gradients on public data; None where there are no public data.
        one_off: executes a plan on all the data at once and charges it to a step; None where nothing can be released.
        device: where the vectors live.
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
    input_shape: tuple[int, ...] = ()
    seed: int = 0
    public: PublicRows | None = None
    one_off: Callable[[NoisyPlan, int], tuple[Tensor, ...]] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if not self.layout.names:
            object.__setattr__(self, "layout", Layout.flat(self.dim))
        object.__setattr__(self, "dim", self.layout.dim)
        if not 0 <= self.step < self.steps:
            raise ValueError(f"step must be in [0, {self.steps}), got {self.step}")

    @property
    def epoch(self) -> int:
        """Number of the epoch this step is in, from 0."""
        return self.step // self.steps_per_epoch

    @property
    def epochs(self) -> int:
        """Planned number of epochs, a begun one counted whole."""
        return -(-self.steps // self.steps_per_epoch)

    def coins(self, number: int | str) -> torch.Generator:
        """Public randomness: a fresh CPU generator, a pure function of seed and `number` (an epoch, usually).

        A run that is resumed draws the same mask, and so does anybody who knows the seed.
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
        """Per-example gradients on `n` public examples at the current parameters.

        Args:
            n: how many.
            block: which of the disjoint blocks of `n` that the pool is cut into; None draws fresh ones at random, which
                other steps may draw too.

        Raises:
            ValueError: when the run has no public data, or too few examples of them.
        """
        return self._public(self._chosen(n, block))

    def public_batch(self, n: int, *, block: int | None = None) -> GradientBatch:
        """As `public_rows`, as rows of single tensors, and factors where gradients have some."""
        chosen, factored = self._chosen(n, block), getattr(self._public, "batch", None)
        return Rows(self._public(chosen)) if factored is None else factored(chosen)

    def _chosen(self, n: int, block: int | None) -> Int64[Tensor, " n"]:
        """Positions of the examples that `public_rows` and `public_batch` read."""
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
        """A one-off release, for `start`: one plan on all the data, with its own noise, charged without sampling.

        Args:
            plan: fixed by public things, as every plan, at its own noise: `context.release(plan.at(8.0))`. The
                defense's own multiplier is for the steps; 0 adds no noise, and then nothing is proved.

        Returns:
            The undivided noisy sum of each block.

        Raises:
            TypeError: for a plan without its noise.
            ValueError: where there are no data to release anything from.
        """
        # The exact type, whose noise is the one that it is charged by.
        if type(plan) is not NoisyPlan:
            raise TypeError(f"a release must have its noise, as in release(plan.at(8.0)), got {type(plan).__name__}")
        if self.one_off is None:
            raise ValueError("a release of its own needs data, and this context has none; it works inside train")
        return self.one_off(plan, self.step)

    def at(self, step: int, **changes: Any) -> Context:
        """This context at another step."""
        return replace(self, step=step, **changes)


@runtime_checkable
class Method(Protocol):
    """A defense's algorithm: three functions over a plain state. It never sees private data or raw sums."""

    def start(self, context: Context) -> State:
        """The state before the first step."""
        ...

    def plan(self, state: State, context: Context) -> tuple[State, StepPlan]:
        """The plan of this step, before its batch is drawn."""
        ...

    def observe(
        self, state: State, context: Context, noisy: tuple[Tensor, ...], update: Float[Tensor, " dim"]
    ) -> State:
        """The state after the step, from its noisy blocks (undivided) and its update: releases only."""
        ...


class Stateless:
    """A `Method` without memory, of which an author writes `plan(self, context) -> StepPlan` alone.

    The plan so written becomes the method's `plan(state, context) -> (state, StepPlan)` when its class is made. Called
    with a context alone, as by `super().plan(context)`, it answers as it was written.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Wraps the `plan(context)` that a class defines into the `plan(state, context)` of a `Method`."""
        super().__init_subclass__(**keywords)
        written = cls.__dict__.get("plan")  # the class's own: an inherited plan was wrapped already
        if written is not None and _MARK not in vars(written):
            if len(inspect.signature(written).parameters) != 2:
                raise TypeError(
                    f"plan of {cls.__name__}, which is Stateless, must take (self, context), got "
                    f"{inspect.signature(written)}; one with a state is a class with start, plan and observe"
                )
            cls.plan = _without_memory(written)

    def start(self, context: Context) -> None:
        """Nothing to remember."""

    def plan(self, *arguments: Any, **keywords: Any) -> Any:
        """The plan of this step, before its batch is drawn: `plan(self, context)` where it is written."""
        raise NotImplementedError(f"{type(self).__name__} must define plan(context)")

    def observe(
        self, state: State, context: Context, noisy: tuple[Tensor, ...], update: Float[Tensor, " dim"]
    ) -> State:
        """Nothing to remember."""
        return state


def _refuse_other_arguments(method: Method | Stateless) -> None:
    """Refuses a method whose functions cannot be called as they will be, before a run has begun."""
    called = {"start": "context", "plan": "state, context", "observe": "state, context, noisy, update"}
    for name, arguments in called.items():
        if name == "plan" and isinstance(method, Stateless):
            continue  # it was asked when its class was made
        try:
            # As it is called, not as what it wraps is: a decorator may hand on less than it takes.
            signature = inspect.signature(getattr(method, name), follow_wrapped=False)
        except ValueError:
            continue  # of something written in C, which has none to read
        try:
            signature.bind(*arguments.split(", "))
        except TypeError:
            raise TypeError(
                f"{name} of {type(method).__name__} must take (self, {arguments}), got one with {signature}"
            ) from None


_MARK = "of a method"  # on a plan that was wrapped: `dataclass(slots=True)` makes a class a second time


def _without_memory(written: Callable[[Any, Context], StepPlan]) -> Callable[..., Any]:
    """Wraps `plan(context)` as a method's `plan(state, context)`, which returns the state unchanged."""

    @wraps(written)
    def plan(self: Stateless, *arguments: Any) -> Any:
        *state, context = arguments
        found = written(self, context)
        return (*state, found) if state else found

    vars(plan)[_MARK] = True
    return plan


@dataclass(frozen=True)
class Defense:
    """A method and its one noise multiplier.

    Attributes:
        method: the algorithm.
        noise_multiplier: noise standard deviation / sensitivity of every step; 0 adds no noise; None means
            that it is yet to be calibrated, and training refuses.
        name: what records and tables call it.
    """

    method: Method | Stateless
    noise_multiplier: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        lacks = [name for name in ("start", "plan", "observe") if not callable(getattr(self.method, name, None))]
        if isinstance(self.method, type) or lacks:
            made = not isinstance(self.method, type)
            got = type(self.method).__name__ if made else f"the class {getattr(self.method, '__name__', '')}"
            without = f", which has no {' and no '.join(lacks)}" if lacks else ""
            raise TypeError(
                f"method must be an instance with start, plan and observe, or of a Stateless class, got {got}{without}"
            )
        _refuse_other_arguments(self.method)
        if self.noise_multiplier is not None:
            object.__setattr__(self, "noise_multiplier", checked_multiplier(self.noise_multiplier))
        if not self.name:  # RandomSparsification -> random_sparsification
            words = type(self.method).__name__
            object.__setattr__(self, "name", "".join(f"_{c.lower()}" if c.isupper() else c for c in words).strip("_"))

    def with_noise(self, noise_multiplier: float) -> Defense:
        """The same method at another noise multiplier."""
        return replace(self, noise_multiplier=noise_multiplier)

    @cached_property
    def calibrated_multiplier(self) -> float:
        """The noise multiplier, if there is one.

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
        """The method's state before the first step."""
        return self.method.start(context)

    def plan(self, state: State, context: Context) -> tuple[State, StepPlan]:
        """The plan of this step.

        Raises:
            TypeError: the method answered with something else.
        """
        found = self.method.plan(state, context)
        pair = isinstance(found, tuple) and len(found) == 2
        if not (pair and isinstance(found[1], StepPlan)):
            got = type(found[1] if pair else found).__name__
            wanted = "a StepPlan, behind the next state where it is not Stateless"
            alone = " alone, and it has a state: return state, plan" if isinstance(found, StepPlan) else ""
            raise TypeError(f"plan of '{self.name}' must return {wanted}, got {got}{alone}")
        if (dim := next(block.codec.dim for block in found[1].blocks if block.updates)) != context.dim:
            raise ValueError(
                f"plan of '{self.name}' must have codecs of the {context.dim} parameters, context.dim, got one of {dim}"
            )
        return found

    def observe(self, state: State, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> State:
        """The method's state after the step."""
        return self.method.observe(state, context, noisy, update)
