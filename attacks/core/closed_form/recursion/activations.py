"""Elementwise activations: inverses and derivatives, from their results alone.

A leaky ReLU, tanh and sigmoid are injective. A ReLU is invertible at positive results; elsewhere only its derivative,
0, is known. Rounding may push a result out of the open range of tanh or sigmoid: it is clamped, and counted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...targets.network import Operation
from ...threat_model.attack_errors import NotApplicable

CLAMP = 1e-12
"""Smallest distance of a result of tanh or sigmoid from the end of its range, in float64."""

POSITIVE = 1e-9
"""Threshold of positive results of a ReLU, relative to the largest: less may be an error of the solution."""

ABOVE = 30.0
"""Largest error of a single entry, over the relative misfit of the equations."""


@dataclass(frozen=True, kw_only=True)
class Inverted:
    """Argument of an activation.

    Attributes:
        before: its argument, in the shape of the result.
        slope: its derivative there.
        slope_of_inverse: derivative of the inverse, for the propagation of errors.
        known: bool, entries with a known argument; None for all.
        clamped: number of results outside of the range.
    """

    before: Tensor
    slope: Tensor
    slope_of_inverse: Tensor
    known: Tensor | None = None
    clamped: int = 0


def invert(operation: Operation, result: Tensor, *, error: float = 0.0) -> Inverted:
    """Returns the argument of an activation, from its result.

    Args:
        operation: the activation.
        result: its result.
        error: relative error of the result; for a ReLU, entries that are not well above it are taken for 0.

    Raises:
        NotApplicable: it is not injective.
    """
    match operation.kind:
        case "leaky_relu" if (a := float(operation.settings["slope"])) > 0:
            # Two Python numbers in `where` would meet in float32.
            slope = torch.where(result > 0, torch.ones_like(result), a)
            return Inverted(before=result / slope, slope=slope, slope_of_inverse=1 / slope)
        case "relu":
            positive = result > max(POSITIVE, ABOVE * error) * float(result.abs().max())
            slope = positive.to(result)
            return Inverted(before=result * slope, slope=slope, slope_of_inverse=slope, known=positive)
        case "tanh":
            inside = result.clamp(-1 + CLAMP, 1 - CLAMP)
            slope = 1 - inside.square()
            before = torch.atanh(inside)
        case "sigmoid":
            inside = result.clamp(CLAMP, 1 - CLAMP)
            slope = inside * (1 - inside)
            before = torch.logit(inside)
        case _:
            words = operation.words or operation.kind
            raise NotApplicable(f"every layer must have an inverse, and {words} has none")
    return Inverted(before=before, slope=slope, slope_of_inverse=1 / slope, clamped=int((inside != result).sum()))
