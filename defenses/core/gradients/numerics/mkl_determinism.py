"""Matrix products whose rows do not go by where they lie in memory, where PyTorch computes with Intel's MKL.

MKL adds up a row in an order that goes by where in a cache line it begins. Of rows of 33 or 785 numbers each begins
elsewhere, and without the first example of a batch all others move by one place. Where a model computes a number that
is rounding alone (a ReLU's inputs that cancel, logits at the end of the number format), that turns the derivatives of
all others: without one of 64 examples that were made for it a sum moved by 54 bounds.

With MKL's conditional numerical reproducibility the order does not go by the place. It is asked for when this file is
imported, as with the whole library: in time if MKL has not been called before, because it reads the variable at its
first call. On Intel's processors it is asked for in its strict form, by which rows go neither by the number of rows nor
by the number of threads. Large products took as long there, small ones with 8 or 10 outputs 1.4 to 1.6 times (4 us).

On other processors the strict form has not been measured, and an order that goes by the number of rows remains. On
several threads MKL divides the work by the larger dimension: all rows are added up otherwise where there are as many
examples as outputs, or one less. Products with one column go by the number of rows on one thread, too.

Source: Intel, "Developer Guide for oneAPI Math Kernel Library", chapter on numerical reproducibility.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
from torch.nn import functional as F


def _of_intel() -> bool:
    """Returns true on a processor of Intel's, by what Linux or Windows says."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "GenuineIntel" in platform.processor()


# "AUTO": the processor's own kernels, in an order of adding that does not go by places. Without "STRICT" 171 of 2,430
# products went by places on an Intel Xeon with AMX, of up to 16 examples.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT" if _of_intel() else "AUTO")

# Inputs and outputs of products that have gone by places or by the number of examples.
_TRIED = ((33, 2), (33, 7), (33, 16), (200, 2), (200, 10), (512, 32), (784, 64), (785, 64))


def sums_are_alike() -> bool:
    """Whether an example's row of a product on the CPU is the same without one of the others.

    That is to the last digit, and as far as some products show that have two or more inputs and outputs, at 5, 9, 17
    and 64 examples and at as many as there are outputs, on as many threads as PyTorch has now.
    """
    coins = torch.Generator().manual_seed(0)

    def alike(entering: int, leaving: int, examples: int) -> bool:
        inputs, weight = (torch.randn(n, entering, generator=coins) for n in (examples, leaving))
        return torch.equal(F.linear(inputs, weight)[1:], F.linear(inputs[1:], weight))

    return all(alike(i, o, n) for i, o in _TRIED for n in (5, 9, 17, 64, max(o, 6)))
