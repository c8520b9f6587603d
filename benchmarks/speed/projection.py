"""Public subspaces: leading directions of public gradients, and the projection of a private batch on them.

The bases of `leakbench.defenses.core.plan.linear_algebra.basis` are compared with PyTorch's, a full singular value
decomposition and `svd_lowrank`. A step's projection by the codec, coefficients of every row and one product back for
their sum, is compared with projecting every row and back. Rows are synthetic: the last singular value is 10^-2 of the
first, over a floor of noise. The dimensions are those of a small CNN for 28x28 images (26,010) and of a CNN for 32x32
colour images (550,570).
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from leakbench.defenses.core.plan.codec import Subspace
from leakbench.defenses.core.plan.linear_algebra.basis import leading_directions, orthonormality_error

from .part import Options, SpeedPart

RANK = 100
BATCH = 256
SMALL, LARGE = 26_010, 550_570
SEED = 0


def measure(**options: Unpack[Options]) -> dict[str, Any]:
    """Times every way of every case; only the small dimension if quick.

    Args:
        options: see `Options`.
    """
    part = SpeedPart(__name__, options, budget=180.0, memory=False)
    bases = [(SMALL, 256), (SMALL, 100)] + ([] if part.quick else [(LARGE, 100)])
    projections = [SMALL] + ([] if part.quick else [LARGE])
    part.say("leading directions, projection")
    cases = [_basis(part, dim, rows) for dim, rows in bases] + [_projection(part, dim) for dim in projections]
    return part.document(title=f"Public subspaces of rank {RANK}, float32", cases=cases)


def _basis(part: SpeedPart, dim: int, rows: int) -> dict[str, Any]:
    """Times the ways to the leading directions of public gradients [rows, dim]."""
    public = _gradients(rows, dim, part.device)

    def by_svd() -> Tensor:
        return torch.linalg.svd(public, full_matrices=False).Vh[:RANK].T

    def by_svd_lowrank() -> Tensor:
        torch.manual_seed(SEED)  # takes no generator
        return torch.svd_lowrank(public, q=min(RANK + 10, rows), niter=2)[2][:, :RANK]

    def by_gram() -> Tensor:
        return leading_directions(public, RANK)

    def randomized() -> Tensor:
        generator = torch.Generator().manual_seed(SEED)
        return leading_directions(public, RANK, method="randomized", generator=generator)

    ways = {"svd": by_svd, "svd_lowrank": by_svd_lowrank, "gram": by_gram}
    if rows >= RANK + 10:  # with fewer rows it is `gram`
        ways["randomized"] = randomized
    exact, checks = by_svd(), {}
    for way, basis in ((way, make()) for way, make in ways.items()):
        checks[way] = {
            "orthonormality_error": orthonormality_error(basis),
            "smallest_cosine_to_svd": _cosines(exact, basis).min().item(),
            "captured": _captured(public, basis),
        }
    # 220 MB at the large dimension, not needed by the timed ways.
    del exact
    return part.case(ways, baseline="svd", checks=checks, case="leading directions", d=dim, m=rows, rank=RANK)


def _projection(part: SpeedPart, dim: int) -> dict[str, Any]:
    """Times the ways to the sum of a private batch's components in a subspace, before any bound."""
    basis = leading_directions(_gradients(RANK, dim, part.device), RANK)
    codec = Subspace.of(basis)
    private = torch.randn(BATCH, dim, generator=torch.Generator().manual_seed(SEED)).to(part.device)

    def every_row_and_back() -> Tensor:
        return ((private @ basis) @ basis.T).sum(dim=0)

    def by_codec() -> Tensor:
        return codec.decode(codec.encode(private).sum(dim=0))

    baseline, expected = "every row and back", every_row_and_back()
    checks = {"relative_difference": ((by_codec() - expected).norm() / expected.norm()).item()}
    ways = {baseline: every_row_and_back, "coefficients, one back": by_codec}
    return part.case(ways, baseline=baseline, checks=checks, case="projection", d=dim, m=BATCH, rank=RANK)


def _gradients(rows: int, dim: int, device: str) -> Float[Tensor, "rows dim"]:
    """Draws synthetic gradients whose spectrum decays over two decades, above a floor."""
    generator = torch.Generator().manual_seed(SEED)
    mixed = torch.randn(rows, rows, generator=generator) * torch.logspace(0, -2, rows) / rows**0.5
    gradients = mixed @ torch.randn(rows, dim, generator=generator)
    return gradients.add_(torch.randn(rows, dim, generator=generator), alpha=0.01).to(device)


def _captured(rows: Float[Tensor, "rows dim"], basis: Float[Tensor, "dim k"]) -> float:
    """Fraction of the rows' squared norm in the span, which is more informative than angles for a flat spectrum."""
    return ((rows.double() @ _orthonormal(basis)).norm() / rows.double().norm()).square().item()


def _cosines(basis: Float[Tensor, "dim k"], other_basis: Float[Tensor, "dim k"]) -> Float[Tensor, " k"]:
    """Principal cosines of the spans (Björck & Golub, 1973)."""
    return torch.linalg.svdvals(_orthonormal(basis).T @ _orthonormal(other_basis))


def _orthonormal(basis: Float[Tensor, "dim k"]) -> Float[Tensor, "dim k"]:
    """Basis of the same span, in float64: those that are compared are orthonormal in float32 at best."""
    return torch.linalg.qr(basis.double()).Q
