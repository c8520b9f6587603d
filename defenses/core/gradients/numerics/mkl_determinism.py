"""Matrix products by Intel's MKL whose rows do not depend on their position in memory.

MKL's order of summation in a row depends on the position in a cache line at which the row begins. Rows of 33 or 785
numbers begin at different positions, and removing the first example of a batch shifts all others by one row. If a model
computes a number that is only rounding error (a ReLU's input whose terms cancel, logits near overflow), this changes
the gradients of all other examples: removing one of 64 examples constructed for it moved a sum by 54 bounds.

With MKL's conditional numerical reproducibility (CNR) the order does not depend on the position. `leakbench.mkl` sets
it when the library is imported. On Intel processors, where plain CNR does not suffice, it is set in its strict form,
under which rows depend neither on the number of rows nor on the number of threads. Large products took as long as
without CNR there, small ones with 8 or 10 outputs 1.4 to 1.6 times as long (4 us).

On other processors the strict form has not been measured, and the order still depends on the number of rows. On several
threads MKL divides the work along the larger dimension: all rows are added up in another order if there are as many
examples as outputs, or fewer by one. Products with one column depend on the number of rows on a single thread, too.

Source: Intel, "Developer Guide for oneAPI Math Kernel Library", chapter on numerical reproducibility.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

# (inputs, outputs) of linear layers whose rows have depended on their position or on the number of examples.
_TRIED = ((33, 2), (33, 7), (33, 16), (200, 2), (200, 10), (512, 32), (784, 64), (785, 64))


def sums_are_alike() -> bool:
    """Returns whether an example's row of a product on the CPU is unchanged by removing another example.

    The rows are compared bit for bit, for the layers in `_TRIED`, with 5, 9, 17 and 64 examples and with as many as
    there are outputs (at least 6), on PyTorch's current number of threads: a few products, so no proof.
    """
    generator = torch.Generator().manual_seed(0)

    def alike(entering: int, leaving: int, examples: int) -> bool:
        inputs, weight = (torch.randn(n, entering, generator=generator) for n in (examples, leaving))
        return torch.equal(F.linear(inputs, weight)[1:], F.linear(inputs[1:], weight))

    return all(alike(i, o, n) for i, o in _TRIED for n in (5, 9, 17, 64, max(o, 6)))
