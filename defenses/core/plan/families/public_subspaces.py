"""Subspaces for projection, per tensor or global: spanned by public gradients or drawn at random, and refreshed.

A basis is a function of public data, of past releases (the parameters at which public gradients are taken) and of
public randomness, so it costs no privacy. It is used for `interval` steps and then recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ..codec import Subspace
from ..defense import Context
from ..implicit_subspace import Directions, FactoredBasis, ImplicitSubspace, OrderedBasis, OuterDirections
from ..layout import Layout
from ..linear_algebra.basis import gram, leading_directions, leading_shares
from ..linear_algebra.products import inner_with
from ..linear_algebra.sketch import SketchDirections
from ..public_data import GradientBatch
from ..refusals import refuse_count, refuse_unknown

_MANY = 1024  # dimension from which half as many Gaussian vectors are always well conditioned

Scope = Literal["tensor", "global"]
"""Scope of a basis: each parameter tensor has its own, or all share a global one."""

Remembered = Tensor | tuple[Tensor, ...]
"""Basis of a span, or the tensors from which its directions are rebuilt.

Tensors only, as in checkpoints: three for `OuterDirections`, two for `SketchDirections` or, if the second has more than
two whole numbers, for an `OrderedBasis`, five and more for a `FactoredBasis`.
"""

RandomKind = Literal["gaussian", "sketch"]
"""Distribution of random directions."""

Bases = tuple[Remembered, ...] | None
"""State of a subspace between two refreshes; None before the first."""


@runtime_checkable
class Subspaces(Protocol):
    """Source of a subspace for every step."""

    def at(self, bases: Bases, context: Context) -> tuple[tuple[Remembered, ...], Subspace, tuple[str, ...]]:
        """Returns the bases to keep, the subspace of a step, and remarks on it.

        Args:
            bases: bases of the previous step.
            context: context of this step.
        """
        ...


class SubspaceMemory:
    """Cache of the last step's codec, together with a basis that it may have formed, and of the last batch's bases."""

    def __init__(self) -> None:
        """Starts empty."""
        self._last: tuple[tuple[Remembered, ...], Subspace] | None = None
        self._of_batch: tuple[Callable[[], object], tuple[object, ...], tuple[Remembered, ...]] | None = None

    def bases(
        self, batch: GradientBatch, key: tuple[object, ...], form: Callable[[], tuple[Remembered, ...]]
    ) -> tuple[Remembered, ...]:
        """Returns the bases of a batch: those of the last call, if the batch is the same object.

        In federated training, all clients of a round share a batch.

        Args:
            batch: public gradients.
            key: everything else that the bases depend on.
            form: computes them.
        """
        last = self._of_batch
        if last is not None and last[0]() is batch and last[1] == key:
            return last[2]
        bases = form()
        try:
            reference = weakref.ref(batch)
            # A function of ours: a reference of the standard library would count as a part from elsewhere in claims.
            self._of_batch = (lambda: reference()), key, bases
        except TypeError:  # a batch of a type without weak references
            self._of_batch = None
        return bases

    def subspace(self, bases: tuple[Remembered, ...], spans: tuple[tuple[int, int], ...], dim: int) -> Subspace:
        """Returns the codec of these bases: the cached codec, if the bases are the same objects as in the last call."""
        last = self._last
        # Compared by identity, because a comparison of values would cost as much as the cache saves.
        if last is None or len(last[0]) != len(bases) or any(a is not b for a, b in zip(last[0], bases, strict=True)):
            last = self._last = (bases, ImplicitSubspace([_directions_of(basis) for basis in bases], spans, dim))
        return last[1]


@dataclass(frozen=True, kw_only=True)
class PublicSubspace:
    """Subspace spanned by the leading directions of per-example gradients on public data at the current parameters.

    Attributes:
        rank: largest number of directions, per tensor or global.
        scope: scope of a basis; a tensor of at most `rank` numbers is kept whole.
        interval: number of steps for which a basis is used.
        auxiliary: choice of the public examples of a refresh: `random` draws them from the whole pool each time,
            `independent` cuts the pool into disjoint blocks, a block for each refresh of the run.
        auxiliary_size: public examples of a refresh, an upper limit on the directions of a basis.
        shortage: action if the pool is too small: `refuse`, or `lower_rank`, which uses the examples available and adds
            a remark to the run.
        every_round: whether a basis is used for the local steps of a federated round, instead of `interval` steps.
    """

    rank: int
    scope: Scope = "tensor"
    interval: int = 1
    auxiliary: Literal["random", "independent"] = "random"
    auxiliary_size: int | None = None
    shortage: Literal["refuse", "lower_rank"] = "refuse"
    every_round: bool = False
    _memory: SubspaceMemory = field(default_factory=lambda: SubspaceMemory(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.rank, self.scope, self.interval)
        refuse_unknown("auxiliary", self.auxiliary, ("random", "independent"))
        refuse_unknown("shortage", self.shortage, ("refuse", "lower_rank"))
        if self.auxiliary_size is not None and self.auxiliary_size < self.rank:
            raise ValueError(
                f"auxiliary_size must be at least rank, {self.rank}, got {self.auxiliary_size}: "
                "so few gradients span no more directions; lower rank, or leave it out for as many as rank"
            )

    def at(self, bases: Bases, context: Context) -> tuple[tuple[Remembered, ...], Subspace, tuple[str, ...]]:
        """Returns the subspace of a step.

        Args:
            bases: bases of the previous step.
            context: context of this step.

        Returns:
            The bases to keep, the subspace, and remarks on it.

        Raises:
            ValueError: when there are no public data, or too few and `shortage` is `refuse`.
        """
        size, remarks = self._examples(context)
        spans, interval = _spans(context, self.scope), self._interval(context)
        if bases is None or context.step % interval == 0:
            block = context.step // interval if self.auxiliary == "independent" else None
            batch = context.public_batch(size, block=block)
            most = min(self.rank, size)
            bases = self._memory.bases(
                batch,
                (spans, most, context.device),
                lambda: tuple(
                    # Short tensors are kept whole: public gradients may span less, as those of a softmax's biases,
                    # whose entries sum to zero.
                    torch.eye(b - a, device=context.device) if b - a <= most else _directions(batch, a, b, most)
                    for a, b in spans
                ),
            )
        return bases, self._memory.subspace(bases, spans, context.dim), remarks

    def _interval(self, context: Context) -> int:
        return context.round_steps if self.every_round else self.interval

    def _examples(self, context: Context) -> tuple[int, tuple[str, ...]]:
        """Number of public examples that a refresh reads, and remarks on it."""
        count, available = self.auxiliary_size or self.rank, context.public_size
        # Checked for the whole run: a pool that ran out halfway would have spent privacy for nothing.
        refreshes = -(-context.steps // self._interval(context)) if self.auxiliary == "independent" else 1
        if count * refreshes <= available:
            return count, ()
        most = available // refreshes
        if self.shortage == "lower_rank" and most:
            return most, (f"rank_lowered_to_{most}",) if most < self.rank else (f"auxiliary_lowered_to_{most}",)
        if refreshes == 1:
            way_out = f"lower rank and auxiliary_size to {available}" if most else "give it some"
            raise ValueError(f"public data must have at least {count} examples, got {available}; {way_out}")
        longer = -(-context.steps // max(1, available // count))
        ways = [f"an interval of {longer}"] * (available >= count) + ["auxiliary = 'random'"]
        ways += [f"shortage = 'lower_rank' for a rank of {min(most, self.rank)}"] * (most > 0)
        raise ValueError(
            f"independent auxiliary batches must fit the public data: {refreshes} batches of {count} "
            f"are {count * refreshes} examples, got {available}; take {', or '.join(ways)}"
        )


@dataclass(frozen=True, kw_only=True)
class RandomSubspace:
    """Random subspace, independent of all data.

    Attributes:
        rank: number of directions, per tensor or global.
        scope: scope of a basis; a tensor of at most `rank` numbers is kept whole.
        interval: number of steps for which a basis is used.
        directions: `gaussian` for orthonormalised Gaussian vectors, which span a uniformly random subspace, or `sketch`
            for a count sketch with random signs, at the cost of a single direction.
    """

    rank: int
    scope: Scope = "tensor"
    interval: int = 1
    directions: RandomKind = "gaussian"
    _memory: SubspaceMemory = field(default_factory=lambda: SubspaceMemory(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.rank, self.scope, self.interval)
        refuse_unknown("directions", self.directions, ("gaussian", "sketch"))

    def at(self, bases: Bases, context: Context) -> tuple[tuple[Remembered, ...], Subspace, tuple[str, ...]]:
        """Returns the bases to keep, the subspace of a step, and no remarks."""
        spans = _spans(context, self.scope)
        if bases is None or context.step % self.interval == 0:
            # Keyed by the index of the refresh, so that every party with the seed draws the same basis.
            generator = context.coins(f"subspace {context.step // self.interval}")
            drawn = [self._drawn(b - a, min(self.rank, b - a), generator, context.device) for a, b in spans]
            bases = tuple(drawn)
        return bases, self._memory.subspace(bases, spans, context.dim), ()

    def _drawn(self, span: int, rank: int, generator: torch.Generator, device: torch.device) -> Remembered:
        if self.directions == "gaussian":
            return _random_basis(span, rank, generator).to(device)
        sketch = SketchDirections.drawn(span, rank, generator)
        return sketch.factors.to(device), torch.tensor([sketch.rank, sketch.turn])


def _directions_of(remembered: Remembered) -> Directions:
    """Rebuilds directions; their kind follows from the number of tensors, see `Remembered`."""
    if isinstance(remembered, Tensor):
        return remembered
    if len(remembered) == 3:
        return OuterDirections(*remembered)
    first, second, *factored = remembered
    if factored:
        spans, factors = [(int(a), int(b)) for a, b in factored[0].tolist()], factored[1:]
        return FactoredBasis(first, second, tuple(spans), tuple(zip(factors[::2], factors[1::2], strict=True)))
    numbers = second.tolist()
    return SketchDirections(first, *numbers) if len(numbers) == 2 else OrderedBasis(first, tuple(numbers))


def _directions(batch: GradientBatch, start: int, stop: int, rank: int) -> Remembered:
    """Leading directions of a span, from the gradients' factors if there are any and they are far smaller."""
    factors = batch.outer(start, stop)
    if factors is not None and 4 * sum(part.shape[1] for part in factors) < stop - start:
        directions = OuterDirections.leading(*factors, rank)
        if directions is not None:
            return directions.signals, directions.inputs, directions.weights
    made_columns = batch.made(start, stop)
    rows = batch.columns(start, stop) if made_columns is None else made_columns[0]
    if not rows.sum().isfinite():  # after training has diverged, some gradients may still be finite
        rows = torch.where(rows.isfinite().all(dim=1, keepdim=True), rows, 0.0)
    # Unordered, because bounds and noise are isotropic.
    directions = leading_directions(rows, rank, ordered=False)
    return directions if made_columns is None else (directions, torch.tensor(made_columns[1]))


def group_directions(
    batch: GradientBatch,
    layout: Layout,
    span: tuple[int, int],
    rows: Callable[[], Float[Tensor, "m dim"]],
    rank: int,
    *,
    generator: torch.Generator,
    passes: int,
) -> Remembered:
    """Returns leading directions of a span of coordinates, whose gradients may partly be outer products.

    Args:
        batch: public gradients.
        layout: layout of the parameters; the span may cut a parameter.
        span: (start, stop) of the coordinates.
        rows: returns the gradients as rows, if needed.
        rank: largest number of directions.
        generator: public generator, as for `leading_directions` with method `randomized`, without oversampling.
        passes: power iterations.
    """
    start, stop = span
    state = generator.get_state()  # so that rows get the same random numbers as without factors
    directions = _by_factors(batch, layout, span, rank, generator, passes)
    if directions is not None:
        return directions
    generator.set_state(state)
    return leading_directions(
        rows()[:, start:stop],
        rank,
        method="randomized",
        generator=generator,
        oversampling=0,
        passes=passes,
        ordered=False,
    )


@torch.no_grad()
def _by_factors(
    batch: GradientBatch, layout: Layout, span: tuple[int, int], rank: int, generator: torch.Generator, passes: int
) -> tuple[Tensor, ...] | None:
    """Tensors of a `FactoredBasis`; None if there are no factors, if they do not pay, or if rounding is too large."""
    first, last = span
    spans: list[tuple[int, int]] = []
    factors: list[tuple[Tensor, Tensor]] = []
    moments: list[Tensor] = []
    rest_of: list[tuple[int, int, slice]] = []
    for a, b in layout.slices:
        low, high = max(a, first), min(b, last)
        if low >= high:
            continue
        pair = batch.outer(a, b)
        # The cost of inner products with all gradients, in float64, against that of products with all directions.
        if pair is not None and 2 * len(pair[0]) * sum(part.shape[1] for part in pair) < rank * (high - low):
            spans.append((a - first, b - first))
            factors.append(pair)
            moments += inner_with(*pair, [(low - a, high - a, *pair)])
        else:
            rest_of.append((a, b, slice(low - a, high - a)))
    if not spans:
        return None
    others = [batch.columns(a, b)[:, part] for a, b, part in rest_of]
    unfactored = torch.cat(others, dim=1) if others else factors[0][0].new_zeros(len(factors[0][0]), 0)
    total = sum(moments, start=gram(unfactored, torch.float64))
    shares = leading_shares(total, last - first, rank, generator=generator, passes=passes)
    if shares is None:
        return None
    basis = FactoredBasis.formed(unfactored, last - first, shares, tuple(spans), tuple(factors))
    return basis.basis, basis.weights, torch.tensor(spans), *(part for pair in factors for part in pair)


def _check(rank: int, scope: str, interval: int) -> None:
    refuse_count("rank", rank)
    refuse_unknown("scope", scope, ("tensor", "global"))
    refuse_count("interval", interval)


def _spans(context: Context, scope: Scope) -> tuple[tuple[int, int], ...]:
    return context.layout.slices if scope == "tensor" else ((0, context.dim),)


def _random_basis(dim: int, rank: int, generator: torch.Generator) -> Float[Tensor, "dim rank"]:
    """Orthonormal columns with the span of as many Gaussian vectors."""
    if rank == dim:
        return torch.eye(dim)
    # Cholesky is many times faster than Householder QR. The closer to square a Gaussian matrix is, the worse its
    # condition, and a few short vectors may by chance be nearly parallel: only then are float64 and a second pass
    # needed. Otherwise the condition number is below 6, and float32 leaves an error of 1e-6.
    careful = 2 * rank > dim or dim < _MANY
    vectors = torch.randn(rank, dim, generator=generator).to(torch.float64 if careful else torch.float32)
    for _ in range(2 if careful else 1):
        factor = torch.linalg.cholesky(gram(vectors, vectors.dtype))
        # By the inverse, a product: for factors so well conditioned it is as exact, and takes a third of the time.
        inverse = torch.linalg.solve_triangular(factor, torch.eye(rank, dtype=factor.dtype), upper=False)
        vectors = inverse.to(vectors.dtype) @ vectors
    return vectors.float().T  # transpose of a contiguous matrix, like leading directions
