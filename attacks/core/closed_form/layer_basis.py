"""Released coefficients of a layer's gradient in bases of this layer alone, as linear maps of the gradient."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..targets.network import Structure
from ..threat_model.attack_errors import NotApplicable


@dataclass(frozen=True, kw_only=True)
class LayerBasis:
    """Linear map coefficients = of_weight^T dL/dW + of_bias^T dL/db.

    Attributes:
        coefficients: the released coefficients.
        of_weight: rows of the bases that belong to the entries of dL/dW.
        of_bias: rows of the bases that belong to dL/db.
        places: indices of the coefficients in the release.
    """

    coefficients: Float[Tensor, " k"]
    of_weight: Float[Tensor, "rows columns k"]
    of_bias: Float[Tensor, "rows k"]
    places: Int[Tensor, " k"]


def layer_basis(structure: Structure, names: tuple[str, str], released: Float[Tensor, " m"]) -> LayerBasis:
    """Returns the released coefficients of a linear layer, and their bases.

    Args:
        structure: structure of the update.
        names: names of the layer's weight [rows, columns] and bias.
        released: float64.

    Raises:
        NotApplicable: a basis mixes the layer with others, the layer is bounded in two parts, or nothing of it is
            released.
    """
    sizes = dict(zip(structure.names, structure.shapes, strict=True))
    starts, at = {}, 0
    for name, shape in sizes.items():
        starts[name], at = at, at + torch.Size(shape).numel()
    (rows, columns), weight, bias = sizes[names[0]], starts[names[0]], starts[names[1]]
    spans = ((weight, weight + rows * columns), (bias, bias + rows))
    parts, weights, biases, places = [], [], [], []
    for part in structure.parts:
        if part.kind != "directions" or not part.of_gradient:
            continue
        position = part.start
        for (first, last), basis in zip(part.spans, part.bases, strict=True):
            part_start, position = position, position + basis.shape[1]
            inside = [max(0, min(last, stop) - max(first, start)) for start, stop in spans]
            if not any(inside):
                continue
            if sum(inside) < last - first:
                raise NotApplicable(
                    "a basis must be of the first layer alone to be inverted, and the update's mixes it with other "
                    "parameters; inverting_gradients attacks any update"
                )
            if parts and parts[0] is not part:
                raise NotApplicable(
                    "the first layer's coefficients must be bounded together, and they are in two parts"
                )
            parts.append(part)
            whole = released.new_zeros(2, rows * columns, basis.shape[1])
            for number, (start, stop) in enumerate(spans):
                a, b = max(first, start), min(last, stop)
                if a < b:
                    whole[number, a - start : b - start] = basis[a - first : b - first].to(released)
            weights.append(whole[0].view(rows, columns, -1))
            biases.append(whole[1, :rows])
            places.append(torch.arange(part_start, position, device=released.device))
    if not parts:
        raise NotApplicable("the update must release something of the first layer's gradient, and it releases nothing")
    shown = torch.cat(places)
    return LayerBasis(
        coefficients=released[shown],
        of_weight=torch.cat(weights, dim=2),
        of_bias=torch.cat(biases, dim=1),
        places=shown,
    )
