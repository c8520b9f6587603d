"""Joint equations of several tensors: both branches of a sum, if neither is determined by its own gradient.

In a sum o = A h + B x the gradients of both layers are linear in their own inputs, K_A h = g_A and K_B x = g_B, and the
sum is linear in both. Each branch alone may leave dimensions undetermined that the three sets of equations determine
together. An identity skip has no gradient, and the sum gives a matching x for any h: dimensions that K_A does not
determine stay undetermined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .linear_systems import LARGEST_GRAM, Equations
from .maps import LinearMap


class SumOf(LinearMap):
    """Sum of linear maps, each of one of several tensors that are concatenated to the vector of unknowns."""

    def __init__(self, pieces: Sequence[tuple[int, LinearMap]], total: int) -> None:
        """Builds the sum of maps to a common shape.

        Args:
            pieces: (start of a tensor in the unknowns, map of it) each; several maps may share a tensor.
            total: number of unknowns, including those of tensors without a map.
        """
        super().__init__((total,), pieces[0][1].shape_out, pieces[0][1].like)
        self.pieces = [(slice(at, at + linear.unknowns), linear) for at, linear in pieces]

    def apply(self, x: Tensor) -> Tensor:
        """Returns the sum of the maps, each applied to its own tensor."""
        each = [linear.apply(x[:, own].reshape(-1, *linear.shape_in)) for own, linear in self.pieces]
        return torch.stack(each).sum(dim=0)

    def adjoint(self, y: Tensor) -> Tensor:
        """Returns the adjoints, each at its own tensor; 0 for tensors without a map."""
        x = y.new_zeros(len(y), self.unknowns)
        for own, linear in self.pieces:
            x[:, own] += linear.adjoint(y).flatten(1)
        return x

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns the normal matrix: blocks of each map, and cross products of pairs."""
        total = self.like.new_zeros(self.unknowns, self.unknowns)
        for number, (own, linear) in enumerate(self.pieces):
            total[own, own] += linear.gram(weights)
            for beside, later_piece in self.pieces[number + 1 :]:
                rows = later_piece.columns().view(-1, *later_piece.shape_out)
                cross = linear.adjoint(rows if weights is None else rows * weights).flatten(1)
                total[beside, own] += cross
                total[own, beside] += cross.T
        return total


@dataclass(frozen=True, kw_only=True)
class OpenSum:
    """Sum whose value is known and whose summands are not.

    Attributes:
        summands: (name of a tensor, linear map from it to the summand) each.
        equations: target and weights of the sum; `map` is ignored.
    """

    summands: tuple[tuple[str, LinearMap], ...]
    equations: Equations


def joint_equations(
    name: str, sums: Sequence[OpenSum], own: Callable[[str], Sequence[Equations]]
) -> list[Equations] | None:
    """Returns equations of a tensor together with all tensors that open sums connect to it, concatenated.

    Args:
        name: name of the tensor, whose entries come first.
        sums: all open sums.
        own: name of a tensor -> its own equations, possibly none.

    Returns:
        The equations; None if the tensor is in no open sum, or if all together have too many entries for a normal
        matrix.
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
        starts[each] = sum(sizes[earlier] for earlier in starts)
    equations = [replace(e, map=SumOf([(at, e.map)], total)) for each, at in starts.items() for e in own(each)]
    for open_sum in reached:
        pieces = [(starts[each], linear) for each, linear in open_sum.summands]
        equations.append(replace(open_sum.equations, map=SumOf(pieces, total)))
    return equations
