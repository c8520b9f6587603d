"""Least norms: lower limits on the norm that a bound divides by, for rows that may be rounding error.

Some codecs and queries subtract nearly equal numbers: the coefficients of a row orthogonal to a subspace, the residual
of a row inside it, a difference of two gradients. The result is then rounding error, which a bound may make as long as
any other row. The error depends on who else is in the batch, because products of few rows are computed differently from
those of many: removing an example could move all others, each by up to two bounds. Float64 would not help: activations
and their derivatives come from float32 passes over the batch.

A bound therefore divides by N = max(|v|, share |g|) instead of |v|, with v the row and g the input from which it was
computed. This is part of the mechanism, the same in every engine and batch. Codecs and queries that subtract define
share |g|, the least norm:

- a codec by `least(rows)`, LEAST_SHARE times the norms of its input rows;
- a query by `least(gradients)`, LEAST_CHANGE times the sum of the norms of its terms. If the codec behind it lengthens
  rows, its largest factor (`gain`) multiplies this value.

Guarantee:
    Contributions stay within the bound: factors(N) |v| <= factors(N) N <= norm. If |g|, v and N are computed up to e
    |g|, a contribution moves by at most 2 e / share norms: for every kind of bound factors(N) and N |factors'(N)| are
    at most norm / N, and N >= share |g|. In float32 e is a few 2^-24, so that a contribution moves by about 1e-3 of the
    norm at most, and behind a query that subtracts by eight times as much. Assumes that the model computes gradients to
    that accuracy: nothing is guaranteed for a gradient that its own layers reduce to rounding error.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

LEAST_SHARE = 2.0**-11
"""Least norm of a codec's output, as a fraction of the norm of the input row.

Typical outputs are longer: in d dimensions, the projection on k random directions has a fraction sqrt(k / d) of a row's
norm, 4e-3 for k = 50 and d = 2.4 million.
"""
LEAST_CHANGE = 2.0**-14
"""Least norm of a query's row, as a fraction of the norms of its terms.

Smaller, because gradients at two parameter points are meant to be close: a step of length 1e-3 changes them by 1e-4.
"""


def least_norms(codec: Any, query: Any, answers: Tensor, source: Any) -> Float[Tensor, " rows"] | None:
    """Returns the least norms of a block's encoded rows; None if neither codec nor query subtracts.

    Args:
        codec: codec of a block.
        query: query of the block.
        answers: rows returned by the query.
        source: gradients, or losses, from which the rows were computed.
    """
    own, least_of_query = least_of(codec, answers), getattr(query, "least", None)
    if least_of_query is None:
        return own
    sizes = gain_of(codec) * least_of_query(source)
    return sizes if own is None else torch.maximum(own, sizes)


def least_of(codec: Any, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
    """Returns the least norms of a codec's output for these rows; None if it subtracts nothing."""
    least = getattr(codec, "least", None)
    return None if least is None else least(rows)


def gain_of(codec: Any) -> float:
    """Returns the largest factor by which a codec lengthens a row: 1 unless it defines `gain`."""
    return float(getattr(codec, "gain", 1.0))
