"""The length that a row is at least taken to have, where what the bound sees of it may be rounding.

Some codecs and queries subtract nearly equal numbers: coefficients of a row at a right angle to a subspace, what is
left of a row inside one, a difference of two gradients. What comes out is then rounding, and a bound makes that as long
as any row. It differs by who else is in the batch, because products of few rows are computed otherwise than those of
many: without one example the others would move, each by up to two bounds. Float64 would not mend it: activations and
derivatives, of which gradients are made, come from float32 passes over the batch.

So the bound takes a row v to be no shorter than a share of what it was computed from: N = max(|v|, share |g|) stands
for |v|. That is part of the mechanism, the same in every engine and batch. Those that subtract say it of themselves:

- a codec by `least(rows)`, LEAST_SHARE |g| of the rows that it is given;
- a query by `least(gradients)`, LEAST_CHANGE times the norms of all that it adds or subtracts. A codec that lengthens
  rows says by which factor at most (`gain`), which then multiplies it.

Guarantee:
    A contribution is within the bound, as without: factors(N) |v| <= factors(N) N <= norm. Where |g|, v and N are
    computed up to e |g|, it moves by at most 2 e / share norms: for every kind of bound factors(N) and N |factors'(N)|
    are at most norm / N, and N >= share |g|. Float32 has an e of a few 2^-24, so that one of this kind moves by some
    1e-3 of the norm at most, behind a query that subtracts by eight times as much. Assumes that the model computes
    gradients that well: of one that its own layers leave as rounding nothing is known.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

LEAST_SHARE = 2.0**-11
"""Of the length of what a row is computed from.

Ordinary rows are longer: along k random directions of d lies a share of sqrt(k / d), 4e-3 for 50 of 2.4 million.
"""
LEAST_CHANGE = 2.0**-14
"""The same of what is subtracted in a query.

Less, because gradients at two parameter points are meant to be alike: a step of length 1e-3 changes them by 1e-4.
"""


def least_norms(codec: Any, query: Any, answers: Tensor, source: Any) -> Float[Tensor, " rows"] | None:
    """Norms that the encoded answers of a query are at least taken to have; None where nothing is subtracted.

    Args:
        codec: of a block.
        query: of the block.
        answers: what it was answered.
        source: the gradients, or losses, that it was answered from.
    """
    own, asked = least_of(codec, answers), getattr(query, "least", None)
    if asked is None:
        return own
    sizes = gain_of(codec) * asked(source)
    return sizes if own is None else torch.maximum(own, sizes)


def least_of(codec: Any, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
    """Norms that a codec's values of these rows are at least taken to have; None where it subtracts nothing."""
    found = getattr(codec, "least", None)
    return None if found is None else found(rows)


def gain_of(codec: Any) -> float:
    """The largest factor by which a codec lengthens a row: 1 unless it says otherwise."""
    return float(getattr(codec, "gain", 1.0))
