"""Adaptive clipping for any method with a single block: the clip norm follows a quantile of the norms.

Andrew, Thakkar, McMahan & Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021, Algorithm
1. A second block on the same batch counts the examples whose contribution is within the clip norm before it is bounded,
as +1/2 or -1/2 each (interpolated just beyond it), so that an example moves the count by at most 1/2; the clip norm
then moves geometrically towards the quantile. The count uses the norms of encoded rows, such as coefficients in a
subspace. The wrapped method gets the context with the noise multiplier of its own block and, in its field `bound`, the
clip norm of the step, so that quantities derived from these are right, such as the variance that dp_adam_bc subtracts.
A method whose state is in units of its clip norm does not support this: it is refused with the reason that it gives in
`not_adapted`.

Guarantee:
    The method's blocks spend the fraction 1 - share of a step's 1 / sigma^2 and the count the fraction share: together
    a single Gaussian at sigma, as without adaptation. The clip norm is a function of releases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..bound import Bound, clip, row_norms
from ..codec import Codec, Everything
from ..defense import Block, Context, Defense, Method, Stateless, StepPlan
from ..query import Gradient, Gradients, NormWithin, Query
from ..rounding import LEAST_SHARE, least_norms


@dataclass(frozen=True, eq=False)
class EncodedNormWithin:
    """Indicator, as +1/2 or -1/2, that the norm of an encoded row, before its bound, is at most a threshold.

    Attributes:
        within: indicator of a norm.
        codec: codec of the block.
        query: query of the block.
    """

    within: NormWithin
    codec: Codec
    query: Query
    linear: bool = False

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows 1"]:
        """Returns the centred indicators, at most 1/2 in absolute value for any example."""
        rows = self.query(gradients)
        norms = row_norms(self.codec.encode(rows))
        least = least_norms(self.codec, self.query, rows, gradients)
        own = LEAST_SHARE * norms
        return self.within.answers(norms, own if least is None else torch.maximum(own, least)).to(rows.dtype)


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A method wrapped with an adaptive clip norm; state: the clip norm (None at first) and the method's state.

    Attributes:
        method: method with a single updating block, whose clip norm is the initial value.
        quantile: target fraction of contributions within the clip norm.
        rate: eta_C, rate of the geometric update; 0 keeps the clip norm.
        share: fraction of a step's 1 / sigma^2 spent on the count.
        lowest: lower limit of the clip norm, in gradient units; fixed beforehand.
        highest: upper limit of the clip norm, in gradient units; fixed beforehand.
    """

    method: Method | Stateless
    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.01
    lowest: float = 1e-3
    highest: float = 1e3

    def __post_init__(self) -> None:
        if reason := getattr(self.method, "not_adapted", ""):
            raise ValueError(f"the clip norm of {type(self.method).__name__} must stay what it is: {reason}")
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile must be in [0, 1], got {self.quantile}")
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise ValueError(f"rate must be at least 0, got {self.rate}")
        if not 1e-6 <= self.share <= 1 - 1e-6:
            raise ValueError(f"share must be in [1e-6, 1 - 1e-6], got {self.share}")
        # Noise can be drawn for every clip norm in this range, whatever the releases.
        if not 1e-9 <= self.lowest <= self.highest <= 1e9:
            raise ValueError(
                f"lowest and highest must be in this order and in [1e-9, 1e9], got {self.lowest} and {self.highest}"
            )

    def start(self, context: Context) -> dict[str, Any]:
        """Returns the state without a clip norm, and with the method's own start."""
        return {"norm": None, "own": self.method.start(self._told(context))}

    def plan(self, state: dict[str, Any], context: Context) -> tuple[dict[str, Any], StepPlan]:
        """Returns the method's plan at the current clip norm, plus a block that counts the norms within it."""
        own, plan = self._method(state["norm"]).plan(state["own"], self._told(context))
        updating = [block for block in plan.blocks if block.updates]
        if len(updating) != 1 or math.isinf(plan.sensitivity):
            raise ValueError(
                f"a method whose clip norm adapts must have one bounded block that updates, got {len(updating)}"
            )
        (bounded,) = updating
        norm = bounded.bound.norm if state["norm"] is None else state["norm"]
        if not self.lowest <= norm <= self.highest:
            raise ValueError(
                f"clip_norm must lie between lowest and highest, got {norm}, {self.lowest}, {self.highest}"
            )
        blocks = [
            replace(
                block,
                share=block.share * (1 - self.share),
                bound=replace(block.bound, norm=norm) if block is bounded else block.bound,
            )
            for block in plan.blocks
        ]
        within = NormWithin(norm)
        # For gradients without a codec: the engines have a faster way for `NormWithin`.
        plain = type(bounded.codec) is Everything and type(bounded.query) is Gradient
        query = within if plain else EncodedNormWithin(within, bounded.codec, bounded.query)
        count = Block(codec=Everything(1), bound=clip(0.5), share=self.share, query=query, updates=False)
        changed = StepPlan(
            *blocks,
            count,
            post=plan.post,
            remarks=plan.remarks,
            moves=plan.moves,
            start_at=plan.start_at,
            correlated=plan.correlated,
            trial=plan.trial,
        )
        return {"norm": norm, "own": own}, changed

    def observe(
        self, state: dict[str, Any], context: Context, noisy: tuple[Tensor, ...], update: Float[Tensor, " dim"]
    ) -> dict[str, Any]:
        """Updates the clip norm: C exp(-rate (fraction within C - quantile))."""
        within = float(noisy[-1]) / context.expected_batch + 0.5
        # Clamped, because a count with large noise could overflow the exponential.
        moved = state["norm"] * math.exp(min(max(-self.rate * (within - self.quantile), -50.0), 50.0))
        method = self._method(state["norm"])
        own = method.observe(state["own"], self._told(context), noisy[:-1], update)
        return {"norm": min(max(moved, self.lowest), self.highest), "own": own}

    def _method(self, norm: float | None) -> Method | Stateless:
        """Returns the method with the step's clip norm in `bound`; unchanged in the first step or without `bound`."""
        method, bound = self.method, getattr(self.method, "bound", None)
        if norm is None or not is_dataclass(method) or not isinstance(bound, Bound) or bound.norm == norm:
            return method
        adapted: Any = replace(method, bound=replace(bound, norm=norm))
        for field in fields(method):
            if not field.init:  # caches between steps
                object.__setattr__(adapted, field.name, getattr(method, field.name))
        return adapted

    def _told(self, context: Context) -> Context:
        """Returns the context with the noise multiplier of the method's own blocks, sigma / sqrt(1 - share)."""
        return replace(context, noise_multiplier=context.noise_multiplier / math.sqrt(1 - self.share))


def adapted(defense: Defense, **settings: float) -> Defense:
    """Wraps a defense with an adaptive clip norm: `adapted(pcdp(rank=50), quantile=0.5)`.

    Args:
        defense: defense with a single bounded block that updates.
        settings: settings of `Adapted`.
    """
    return Defense(Adapted(method=defense.method, **settings), defense.noise_multiplier, f"adapted_{defense.name}")
