"""Matrix products whose rows do not go by where they lie in memory, where PyTorch computes with Intel's MKL.

MKL adds up a row in an order that goes by where in a cache line it begins. Of rows of 33 or 785 numbers each begins
elsewhere, and without the first example of a batch all others move by one place. Where a model computes a number that
is rounding alone (a ReLU's inputs that cancel, logits at the end of the number format), that turns the derivatives of
all others: without one of 64 examples that were made for it a sum moved by 54 bounds.

MKL's conditional numerical reproducibility is without that, and took no more time here. It is asked for when this file
is imported, as with the whole library: in time if MKL has not been called before, which is when it reads the variable.

Source: Intel, "Developer Guide for oneAPI Math Kernel Library", chapter on numerical reproducibility.
"""

from __future__ import annotations

import os

import torch
from torch.nn import functional as F

VARIABLE = "MKL_CBWR"
"""Which kernels MKL takes; "AUTO" for the processor's own, in a fixed order of adding."""

os.environ.setdefault(VARIABLE, "AUTO")


def sums_are_alike() -> bool:
    """Whether an example's row of a product on the CPU is the same, to the last digit, at 64 places of a batch."""
    coins = torch.Generator().manual_seed(0)
    row, weight = torch.randn(33, generator=coins), torch.randn(7, 33, generator=coins)
    rows = F.linear(row.repeat(64, 1), weight)
    return bool((rows == rows[0]).all())
