"""L2 bounds on an example's contribution: clip, normalize and adaptive weight, each with its sensitivity.

Sources: Abadi et al. 2016 (clip), Bu et al. 2023 AUTO-S and Yang et al. 2022 NSGD (normalize), Xia et al. 2023 DP-PSAC
(adaptive weight). All scale a row by a function of its norm, so its direction is kept.

Guarantee:
    For every row v, finite or not, the bounded row has norm at most `sensitivity` (up to float rounding) and depends on
    v and its least norm alone; a row whose scale factor overflows or underflows becomes zero. A sum of bounded rows
    therefore moves by at most `sensitivity` when a row is added or removed. This holds for `Bound` itself: a subclass
    is not checked, and a claim lists it as unverified (`training/assumptions.py`). A row that may be rounding error is
    scaled as if it had its least norm (`rounding.py`): a subclass with its own `__call__` must accept `least` too, or
    be used only with codecs and queries that do not subtract.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .linear_algebra.lengths import lengths

_WIDENED = 2**24  # numbers of rows that a GPU converts to float64 at a time


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A map that scales rows, and the norm that it guarantees.

    Attributes:
        kind: name of the map.
        norm: C, the largest norm after the map, in gradient units; for `unbounded`, no limit, but the factor between
            noise multiplier and noise standard deviation.
        regulariser: gamma of `normalize`, r of `adaptive_weight`, in gradient units.
    """

    kind: Literal["clip", "normalize", "adaptive_weight", "unbounded"]
    norm: float
    regulariser: float = 0.0

    def __post_init__(self) -> None:
        # Plain floats, because a float subclass may compare and multiply as different numbers.
        object.__setattr__(self, "norm", float(self.norm))
        object.__setattr__(self, "regulariser", float(self.regulariser))
        if not (math.isfinite(self.norm) and self.norm > 0):
            raise ValueError(f"the bound's norm must be a positive finite number, got {self.norm}")
        if not (math.isfinite(self.regulariser) and self.regulariser >= 0):
            raise ValueError(f"the bound's regulariser must be zero or a positive number, got {self.regulariser}")
        if self.kind == "adaptive_weight" and self.regulariser == 0:
            raise ValueError("regulariser must be positive, got 0; without one the bound is normalize")

    @property
    def sensitivity(self) -> float:
        """Largest change of a sum when a row is added or removed; infinite if `kind` is `unbounded`."""
        return math.inf if self.kind == "unbounded" else self.norm

    def factors(self, norms: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Computes the scale factor of each row from its norm; `factors(norms) * norms <= sensitivity`."""
        match self.kind:
            case "clip":
                # C / max(C, |v|) = min(1, C / |v|), without 0 / 0 and without a stabiliser in the divisor.
                return self.norm / norms.clamp(min=self.norm)
            case "normalize":
                # Without a regulariser, a zero row has no direction and stays zero (not 0 / 0), and so does a row whose
                # squares underflow even in float64, because its norm is unknown.
                divisor = norms + self.regulariser
                return torch.where(divisor > 1e-150, self.norm / divisor.clamp(min=1e-150), 0.0)
            case "adaptive_weight":
                # The factor is C at norm 0 and largest, C / (2 sqrt(r) - r), at norm sqrt(r) - r (for r < 1).
                return self.norm / (norms + self.regulariser / (norms + self.regulariser))
            case "unbounded":
                return torch.ones_like(norms)

    def scale(self, norms: Float[Tensor, " rows"], dtype: torch.dtype) -> Float[Tensor, " rows"]:
        """Returns the scale factors in the rows' dtype; 0 for factors that this dtype cannot represent accurately.

        Args:
            norms: norms of the rows, float64.
            dtype: dtype of the rows.
        """
        factors = self.factors(norms).to(dtype)
        # A factor outside the dtype's normal range has lost its precision or is infinite, and the product may exceed
        # the bound (a row of 3e38 in float32): such a row becomes zero.
        normal = torch.finfo(dtype)
        if factors.device.type == "cpu" and factors.numel():
            # A quick test for the usual case; on a GPU it would need a synchronisation.
            least, most = factors.detach().aminmax()
            if float(least) >= normal.tiny and float(most) <= normal.max:  # false for NaN
                return factors
        usable = (factors >= normal.tiny) & (factors <= normal.max)
        return torch.where(usable, factors, 0.0)

    def __call__(
        self, rows: Float[Tensor, "rows size"], least: Float[Tensor, " rows"] | None = None
    ) -> Float[Tensor, "rows size"]:
        """Returns the bounded rows; differentiable. A row with a non-finite entry becomes zero; others are unaffected.

        Args:
            rows: rows to bound.
            least: lower limits on the norms, float64, see `rounding.py`; None if nothing was subtracted.
        """
        rows = finite_rows(rows)
        if self.kind == "unbounded":
            return rows
        norms = row_norms(rows)
        if least is not None:
            norms = torch.maximum(norms, least)
        return rows * self.scale(norms, rows.dtype).unsqueeze(1)


def clip(norm: float) -> Bound:
    """Returns the clipping of Abadi et al.: v * min(1, C / ||v||)."""
    return Bound(kind="clip", norm=norm)


def normalize(norm: float, *, regulariser: float) -> Bound:
    """Returns the bound of AUTO-S and NSGD: C v / (||v|| + gamma)."""
    return Bound(kind="normalize", norm=norm, regulariser=regulariser)


def adaptive_weight(norm: float, *, regulariser: float) -> Bound:
    """Returns the bound of DP-PSAC: C v / (||v|| + r / (||v|| + r)); the weight at zero norm is C, not C / r."""
    return Bound(kind="adaptive_weight", norm=norm, regulariser=regulariser)


FixedBoundKind = Literal["clip", "normalize", "adaptive_weight"]
"""Bounds with the same norm in every step of a run."""

BoundKind = Literal[FixedBoundKind, "adaptive"]
"""Names of bounds in a method's settings; "adaptive" works in suites only, in Python use `adapted`."""

_REGULARISERS: dict[str, float] = {"normalize": 0.01, "adaptive_weight": 0.1}
"""Defaults from the papers: gamma of AUTO-S, r of DP-PSAC."""


def bounded(norm: float, bound: BoundKind = "clip", regulariser: float | None = None) -> Bound:
    """Returns the bound named by a method's settings.

    Args:
        norm: C, in gradient units.
        bound: name of the map.
        regulariser: gamma or r, in gradient units; None for the paper's value.

    Raises:
        ValueError: for an invalid norm or regulariser, an unknown name, or a regulariser for `clip`.
    """
    if bound == "clip":
        if regulariser is not None:
            raise ValueError(f"regulariser must be None for the bound 'clip', which has none, got {regulariser}")
        return clip(norm)
    if bound == "adaptive":
        # A bound of a single step has no state; `adapted` wraps the whole method instead.
        raise ValueError("bound 'adaptive' is by way of a suite; in Python use adapted(method) with bound 'clip'")
    if bound not in _REGULARISERS:
        raise ValueError(f"bound must be 'clip', 'normalize' or 'adaptive_weight', got {bound!r}")
    return Bound(kind=bound, norm=norm, regulariser=_REGULARISERS[bound] if regulariser is None else regulariser)


def unbounded(*, unit: float = 1.0) -> Bound:
    """Returns a map that bounds nothing; the noise, if any, has standard deviation noise_multiplier * unit."""
    return Bound(kind="unbounded", norm=unit)


def finite_rows(rows: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """Replaces rows that hold a NaN or an infinity by zero rows; the others are unchanged (NaN * 0 is not 0)."""
    # One pass suffices: a sum is finite only if every entry is. A sum that is not finite may have overflowed.
    good = torch.isfinite(rows.detach().sum(dim=1))
    if bool(good.all()):
        return rows
    doubtful = torch.nonzero(~good).flatten()
    good[doubtful] = torch.isfinite(rows.detach()[doubtful]).all(dim=1)
    return torch.where(good.unsqueeze(1), rows, 0.0)


def row_norms(
    rows: Float[Tensor, "rows size"], computed: Float[Tensor, " rows"] | None = None
) -> Float[Tensor, " rows"]:
    """Computes L2 norms in float64; differentiable.

    Args:
        rows: rows to measure.
        computed: result of `lengths(rows)`, if known.
    """
    if not rows.is_cpu:  # without a look at results, for which the device would have to be waited for
        chunks = rows.split(max(1, _WIDENED // max(1, rows.shape[1])))
        return torch.cat([torch.linalg.vector_norm(chunk, dim=1, dtype=torch.float64) for chunk in chunks])
    norms = lengths(rows) if computed is None else computed
    # A float32 square overflows above 1e19 and underflows below 1e-22, and float64 reductions are many times slower.
    if rows.dtype == torch.float64 or bool(((norms > 1e-10) & (norms < 1e15)).all()):
        return norms
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
