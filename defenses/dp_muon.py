"""DP-Muon: the momentum of noisy updates, orthogonalised matrix by matrix.

Kim & Fan, "DP-Muon: Differentially Private Optimization via Matrix-Orthogonalized Momentum", 2026, arXiv:2605.12994.
Per matrix W, examples are clipped to C_W in Frobenius norm and noise is added to their sum; the momentum m = beta m +
update then goes through q Newton-Schulz iterations Y <- p(Y Y^T) Y with p(l) = sum_s (2s)! / (4^s (s!)^2) (1 - l)^s, s
up to the degree, which bring all its singular values towards 1: the step is as long in directions of small gradients. A
convolution's weight is the matrix of its output channels, a bias a matrix of a single row, which keeps only its
direction.
Deviation: the momentum is always divided by its Frobenius norm before the iterations, as in Muon itself, and not only
if that is above 1: a shorter one would be far from orthogonal after q of them. The paper orthogonalises hidden layers
only, next to another optimizer; its bias-corrected variant is not implemented. The text available to us has noise of
sigma C_W for a matrix; if L matrices of one batch each have that, the multiplier is sigma / sqrt(L).
Guarantee: each step is a Gaussian mechanism at the defense's multiplier. By matrix, the squared clip norms sum to C^2,
and the noise is sigma C on every coordinate (as in `per_layer` layer by layer); all later operations are functions of
releases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .core import (
    Block,
    Bound,
    BoundKind,
    Context,
    Coordinates,
    Defense,
    Everything,
    StepPlan,
    bounded,
    refuse_count,
    refuse_unknown,
)


@dataclass(frozen=True, eq=False)
class OrthogonalMomentum:
    """Updated momentum, with singular values near 1 in every matrix.

    Attributes:
        momentum: momentum [dim] before the update.
        decay: beta, weight of the previous momentum.
        shapes: shapes of the tensors in the flat vector, in order.
        iterations: q, number of Newton-Schulz iterations.
        degree: degree of their polynomial.
    """

    momentum: Float[Tensor, " dim"] = field(repr=False)
    decay: float
    shapes: tuple[tuple[int, ...], ...]
    iterations: int
    degree: int

    def moved(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns the updated momentum."""
        return self.decay * self.momentum.to(update) + update

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns the orthogonalised momentum, before the learning rate."""
        parts = self.moved(update).split([math.prod(shape) for shape in self.shapes])
        orthogonalised = []
        for part, shape in zip(parts, self.shapes, strict=True):
            matrix = part.view(shape[0] if len(shape) > 1 else 1, -1)
            orthogonalised.append(orthogonal(matrix, self.iterations, self.degree).flatten())
        return torch.cat(orthogonalised)


def orthogonal(matrix: Float[Tensor, "rows columns"], iterations: int, degree: int) -> Float[Tensor, "rows columns"]:
    """Newton-Schulz iterations on the matrix over its Frobenius norm; zero stays zero.

    Args:
        matrix: matrix of any shape.
        iterations: number of iterations; each multiplies small singular values by p(0), 1.875 at degree 2.
        degree: degree of p, whose error shrinks with the power degree + 1.
    """
    turned = len(matrix) > matrix.shape[1]
    y = matrix.T if turned else matrix
    norm = torch.linalg.matrix_norm(y)
    y = y / torch.where(norm > 0, norm, 1.0)
    identity = torch.eye(len(y), dtype=y.dtype, device=y.device)
    shares = [math.comb(2 * s, s) / 4**s for s in range(degree + 1)]
    for _ in range(iterations):
        residual = identity - y @ y.T
        p = shares[-1] * identity
        for share in reversed(shares[:-1]):  # Horner's rule
            p = p @ residual + share * identity
        y = p @ y
    return y.T if turned else y


@dataclass(frozen=True, kw_only=True)
class DpMuon:
    """Releases a block per tensor, or a single block; state: the momentum."""

    bound: Bound
    clipping: Literal["matrix", "whole"]
    decay: float
    iterations: int
    degree: int

    def __post_init__(self) -> None:
        refuse_unknown("clipping", self.clipping, ("matrix", "whole"))
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}")
        refuse_count("iterations", self.iterations)
        refuse_count("degree", self.degree)

    def start(self, context: Context) -> Tensor:
        """Returns zero momentum."""
        return torch.zeros(context.dim, device=context.device)

    def plan(self, state: Tensor, context: Context) -> tuple[Tensor, StepPlan]:
        """Plans DP-SGD's release, and the orthogonalised momentum after the noise."""
        return state, StepPlan(*self._blocks(context), post=self._post(state, context))

    def observe(self, state: Tensor, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Tensor:
        """Returns the momentum, updated with this step's release."""
        decoded = [b.codec.decode(values) for b, values in zip(self._blocks(context), noisy, strict=True)]
        return self._post(state, context).moved(torch.stack(decoded).sum(dim=0) / context.expected_batch)

    def _blocks(self, context: Context) -> list[Block]:
        if self.clipping == "whole":
            return [Block(codec=Everything(context.dim), bound=self.bound)]
        spans = context.layout.slices
        share, root = 1 / len(spans), math.sqrt(len(spans))
        # The regulariser is in gradient units too, so it shrinks with the clip norm of a matrix.
        own = Bound(kind=self.bound.kind, norm=self.bound.norm / root, regulariser=self.bound.regulariser / root)
        places = (torch.arange(start, stop, device=context.device) for start, stop in spans)
        return [Block(codec=Coordinates(kept, dim=context.dim), bound=own, share=share) for kept in places]

    def _post(self, state: Tensor, context: Context) -> OrthogonalMomentum:
        return OrthogonalMomentum(state, self.decay, context.layout.shapes, self.iterations, self.degree)


def dp_muon(
    *,
    clip_norm: float = 1.0,
    clipping: Literal["matrix", "whole"] = "matrix",
    decay: float = 0.9,
    iterations: int = 5,
    degree: int = 2,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD with Muon's step.

    Args:
        clip_norm: C, largest norm of an example's gradient after clipping, over all matrices, L2, in gradient units.
        clipping: "matrix" clips each of L tensors to C / sqrt(L), "whole" all of them together to C.
        decay: beta, weight of the past in the momentum per step; the task's own momentum is best left at 0.
        iterations: q, Newton-Schulz iterations per step.
        degree: degree of their polynomial; 1 is cubic, 2 quintic.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight" for a whole gradient, in gradient units; None for the
            papers' 0.01 and 0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = DpMuon(
        bound=bounded(clip_norm, bound, regulariser),
        clipping=clipping,
        decay=decay,
        iterations=iterations,
        degree=degree,
    )
    return Defense(method, noise_multiplier)
