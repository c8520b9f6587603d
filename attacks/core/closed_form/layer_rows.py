"""Gradient of a layer as far as an update shows it, also of coefficients in bases of single parameters.

Coordinates are read as they are. Coefficients along orthonormal directions give the projection of the gradient to their
span, which is its least-squares estimate; entries are then known up to the part outside of the span, which no
coefficient shows, unless the span is everything.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..targets.network import Structure
from ..threat_model.attack_errors import NotApplicable


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Released part of [dL/dW | dL/db] of a layer.

    Attributes:
        values: the gradient, 0 where nothing is released.
        observed: entries that are released, or in the span of released directions.
        std: standard deviation of the noise of each entry, in the unit of `values`.
        whole: whether the values are the gradient, and not its projection to fewer directions.
    """

    values: Float[Tensor, "rows columns"]
    observed: Bool[Tensor, "rows columns"]
    std: Float[Tensor, "rows columns"]
    whole: bool


def layer_rows(
    structure: Structure, names: tuple[str, str], released: Float[Tensor, " m"], std: Float[Tensor, " m"]
) -> LayerRows:
    """Returns a linear layer's gradient from an update.

    Args:
        structure: of the update.
        names: of the layer's weight [rows, inputs] and bias.
        released: the update, float64.
        std: standard deviation of its noise, in the same unit.

    Raises:
        NotApplicable: the layer's numbers are neither coordinates nor coefficients, or are released twice.
    """
    structure.check_length(released)
    dim = structure.dim
    values, variance = released.new_zeros(dim), released.new_zeros(dim)
    observed = torch.zeros(dim, dtype=torch.bool, device=released.device)
    whole = True
    for part in structure.parts:
        if not part.of_gradient or part.kind == "other":
            raise NotApplicable(
                "the update must release coordinates or coefficients of one gradient, and it releases "
                f"{part.words or part.kind}"
            )
        if part.kind == "coordinates" and part.coordinates is not None:
            at = part.coordinates.to(released.device)
            factors = torch.ones(len(at)) if part.factors is None else part.factors
            factors = factors.to(released)
            at, factors, numbers = at[factors != 0], factors[factors != 0], (factors != 0).nonzero()[:, 0] + part.start
            _refuse_twice(observed[at])
            values[at], variance[at], observed[at] = (
                released[numbers] / factors,
                (std[numbers] / factors).square(),
                True,
            )
            continue
        position = part.start
        for (first, last), basis in zip(part.spans, part.bases, strict=True):
            numbers = slice(position, position + basis.shape[1])
            position += basis.shape[1]
            basis = basis.to(released)
            _refuse_twice(observed[first:last])
            values[first:last] = basis @ released[numbers]
            variance[first:last] = basis.square() @ std[numbers].square()
            observed[first:last] = True
            whole = whole and basis.shape[1] == last - first
    by_name = {}
    sizes = [torch.Size(shape).numel() for shape in structure.shapes]
    for name, shape, *of_name in zip(
        structure.names, structure.shapes, *(x.split(sizes) for x in (values, observed, variance.sqrt())), strict=True
    ):
        by_name[name] = [x.view(shape) for x in of_name]
    joined = [torch.cat([w, b[:, None]], dim=1) for w, b in zip(by_name[names[0]], by_name[names[1]], strict=True)]
    return LayerRows(values=joined[0], observed=joined[1], std=joined[2], whole=whole)


def _refuse_twice(observed: Tensor) -> None:
    if bool(observed.any()):
        raise NotApplicable("the update must release a number once, and it releases some in two parts")
