"""Directions of canaries in gradient space, and records with these gradients, which pass a trainer's own clipping.

Nasr et al., "Adversary Instantiation", S&P 2021 (Dirac gradients); Andrew et al., "One-shot Empirical Privacy
Estimation for Federated Learning", ICLR 2024 (random directions); orthonormal directions do not interfere.

For a linear logit next to a constant zero logit, without bias and with zero weights, a record x of class 0 has the
gradient -x/2. Any vector in parameter space is therefore the gradient of a record, in any trainer and without a hook. A
canary counts in full only if the codec of a step keeps its direction whole, so directions are drawn in the space of
that codec.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.defenses.core import Codec

CanaryKind = Literal["dirac", "random", "orthonormal"]


def unit_directions(
    kind: CanaryKind, count: int, dim: int, generator: torch.Generator, *, codec: Codec | None = None
) -> Float[Tensor, "count dim"]:
    """Draws directions of length 1 for canaries.

    Args:
        kind: distinct single coordinates (`dirac`); independent, uniform on the sphere (`random`); or `orthonormal`.
        count: number of directions.
        dim: length of a gradient.
        generator: source of the draw.
        codec: codec of a step, whose mask or subspace contains the directions; None for the whole space.

    Raises:
        ValueError: for more distinct directions than exist.
    """
    if kind not in get_args(CanaryKind):
        raise ValueError(f"kind must be one of {', '.join(get_args(CanaryKind))}, got {kind!r}")
    size = dim if codec is None else codec.size
    if count < 1 or (kind != "random" and count > size):
        raise ValueError(f"there must be between 1 and {size} canaries of kind '{kind}', got {count}")
    if kind == "dirac":
        drawn = nn.functional.one_hot(torch.randperm(size, generator=generator)[:count], size).float()
    else:
        drawn = torch.randn(count, size, generator=generator)
    if codec is not None:
        drawn = torch.stack([codec.decode(direction) for direction in drawn])
    if kind == "orthonormal":
        # Orthonormalised after decoding, because a basis need not be orthonormal.
        return torch.linalg.qr(drawn.T.double()).Q.T.to(drawn.dtype).contiguous()
    return drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True)


class LinearLogit(nn.Module):
    """A linear logit and a constant zero logit, for two classes, with zero weights and no bias."""

    def __init__(self, inputs: int) -> None:
        """Takes the number of inputs, which is the number of parameters."""
        super().__init__()
        self.logit = nn.Linear(inputs, 1, bias=False)
        nn.init.zeros_(self.logit.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns two logits per record."""
        logit = self.logit(inputs.flatten(1))
        return torch.cat([logit, torch.zeros_like(logit)], dim=1)


def as_records(directions: Float[Tensor, "count dim"], norm: float) -> Float[Tensor, "count dim"]:
    """Returns inputs of class 0 whose gradient at a zero `LinearLogit` is minus a direction, with this norm.

    Args:
        directions: of length 1.
        norm: of the gradient, before clipping.
    """
    return directions * (2 * norm)
