"""Equations of several tensors at once: both branches of a sum, if neither is determined by its own gradient.

In a sum o = A h + B x the gradients of both layers are linear in their own inputs, K_A h = g_A and K_B x = g_B, and the
sum is linear in both. Each branch alone may leave dimensions open that all three determine together. For a skip by the
identity nothing is shown but the sum, which gives x for any h: dimensions that K_A leaves open stay open.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .linear_systems import LARGEST_GRAM, Equations
from .maps import LinearMap


class SumOf(LinearMap):
    """Sum of maps of tensors that are concatenated in the unknowns."""

    def __init__(self, pieces: Sequence[tuple[int, LinearMap]], total: int) -> None:
        """Builds the sum of maps to a common shape.

        Args:
            pieces: start of a map's tensor in the unknowns, and the map; several may be of the same tensor.
            total: number of the unknowns, those of tensors without a map too.
        """
        super().__init__((total,), pieces[0][1].shape_out, pieces[0][1].like)
        self.pieces = [(slice(at, at + linear.unknowns), linear) for at, linear in pieces]

    def apply(self, x: Tensor) -> Tensor:
        """Adds up each map of its own tensor."""
        each = [linear.apply(x[:, own].reshape(-1, *linear.shape_in)) for own, linear in self.pieces]
        return torch.stack(each).sum(dim=0)

    def adjoint(self, y: Tensor) -> Tensor:
        """Returns each adjoint in the place of its tensor, 0 elsewhere."""
        x = y.new_zeros(len(y), self.unknowns)
        for own, linear in self.pieces:
            x[:, own] += linear.adjoint(y).flatten(1)
        return x

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns the maps' own normal matrices, and their cross products."""
        total = self.like.new_zeros(self.unknowns, self.unknowns)
        for number, (own, linear) in enumerate(self.pieces):
            total[own, own] += linear.gram(weights)
            for beside, other in self.pieces[number + 1 :]:
                rows = other.columns().view(-1, *other.shape_out)
                cross = linear.adjoint(rows if weights is None else rows * weights).flatten(1)
                total[beside, own] += cross
                total[own, beside] += cross.T
        return total


@dataclass(frozen=True, kw_only=True)
class OpenSum:
    """Sum of known value with unknown summands.

    Attributes:
        summands: (name of a tensor, linear map of it) each.
        equations: the sum of the maps, with weights; its own map is not read.
    """

    summands: tuple[tuple[str, LinearMap], ...]
    equations: Equations


def joint_equations(
    name: str, sums: Sequence[OpenSum], own: Callable[[str], Sequence[Equations]]
) -> list[Equations] | None:
    """Returns equations of a tensor and of all that it is added to, in their concatenated entries.

    Args:
        name: name of the tensor, whose entries come first.
        sums: all open sums.
        own: name of a tensor -> equations of it alone; none of some.

    Returns:
        None if the tensor is in no open sum, or all together have too many entries for a normal matrix.
    """
    sizes: dict[str, int] = {name: 0}
    reached: list[OpenSum] = []
    while True:
        reached = [open_sum for open_sum in sums if any(each in sizes for each, _ in open_sum.summands)]
        unknowns = {each: linear.unknowns for open_sum in reached for each, linear in open_sum.summands}
        grown = not unknowns.keys() <= sizes.keys()
        sizes |= unknowns
        if not grown:
            break
    total, starts = sum(sizes.values()), dict[str, int]()
    if not reached or total > LARGEST_GRAM:
        return None
    for each in sizes:
        starts[each] = sum(sizes[other] for other in starts)
    equations = [replace(e, map=SumOf([(at, e.map)], total)) for each, at in starts.items() for e in own(each)]
    for open_sum in reached:
        pieces = [(starts[each], linear) for each, linear in open_sum.summands]
        equations.append(replace(open_sum.equations, map=SumOf(pieces, total)))
    return equations
