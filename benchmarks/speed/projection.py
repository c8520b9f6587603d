"""Public subspaces: the leading directions of public gradients, and the projection of a private batch on them.

The bases of `leakbench.defenses.core.plan.linear_algebra.basis` are compared with PyTorch's, a full singular value
decomposition and `svd_lowrank`. A step's projection by the codec, coefficients of every row and one product back for
their sum, is compared with projecting every row and back. Rows are synthetic: the last singular value is 10^-2 of the
first, over a floor of noise. The dimensions are those of a small CNN for 28x28 images (26,010) and of a CNN for 32x32
colour images (550,570).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from leakbench.defenses.core.plan.codec import Subspace
from leakbench.defenses.core.plan.linear_algebra.basis import leading_directions, orthonormality_error

from .harness import interleaved

RANK = 100
BATCH = 256
SMALL, LARGE = 26_010, 550_570
SEED = 0
BUDGET = 180.0  # seconds per case, beyond its first three rounds


def measure(*, device: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Times every way of every case, with the ways of a case in turn.

    Args:
        device: torch device of the matrices.
        rounds: largest number of timed rounds of each way, after an untimed call.
        quick: only the cases of the small dimension.

    Returns:
        Title and cases as plain data. `ratio` is the median over rounds of a way's time over the baseline's in the same
        round: below 1 is faster.
    """
    bases = [(SMALL, 256), (SMALL, 100)] + ([] if quick else [(LARGE, 100)])
    projections = [SMALL] + ([] if quick else [LARGE])
    cases = [_basis(dim, rows, device=device, rounds=rounds) for dim, rows in bases]
    cases += [_projection(dim, device=device, rounds=rounds) for dim in projections]
    return {"title": f"Public subspaces of rank {RANK}, float32", "cases": cases}


def _basis(dim: int, rows: int, *, device: str, rounds: int) -> dict[str, Any]:
    """Times the ways to the leading directions of public gradients [rows, dim]."""
    public = _gradients(rows, dim, device)

    def by_svd() -> Tensor:
        return torch.linalg.svd(public, full_matrices=False).Vh[:RANK].T

    def by_svd_lowrank() -> Tensor:
        torch.manual_seed(SEED)  # takes no generator
        return torch.svd_lowrank(public, q=min(RANK + 10, rows), niter=2)[2][:, :RANK]

    def by_gram() -> Tensor:
        return leading_directions(public, RANK)

    def randomized() -> Tensor:
        coins = torch.Generator().manual_seed(SEED)
        return leading_directions(public, RANK, method="randomized", generator=coins)

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
    return _case("leading directions", dim, rows, ways, baseline="svd", checks=checks, device=device, rounds=rounds)


def _projection(dim: int, *, device: str, rounds: int) -> dict[str, Any]:
    """Times the ways to the sum of a private batch's components in a subspace, before any bound."""
    basis = leading_directions(_gradients(RANK, dim, device), RANK)
    codec = Subspace.of(basis)
    private = torch.randn(BATCH, dim, generator=torch.Generator().manual_seed(SEED)).to(device)

    def every_row_and_back() -> Tensor:
        return ((private @ basis) @ basis.T).sum(dim=0)

    def by_codec() -> Tensor:
        return codec.decode(codec.encode(private).sum(dim=0))

    ways = {"every row and back": every_row_and_back, "coefficients, one back": by_codec}
    expected = every_row_and_back()
    checks = {"relative_difference": ((by_codec() - expected).norm() / expected.norm()).item()}
    return _case(
        "projection", dim, BATCH, ways, baseline="every row and back", checks=checks, device=device, rounds=rounds
    )


def _case(
    case: str,
    dim: int,
    rows: int,
    ways: Mapping[str, Callable[[], Any]],
    *,
    baseline: str,
    checks: dict[str, Any],
    device: str,
    rounds: int,
) -> dict[str, Any]:
    """Times the ways of a case: medians, and median ratios to the baseline of the same round."""
    on_gpu = torch.device(device).type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    builders = {way: lambda call=call: call for way, call in ways.items()}
    seconds = interleaved(builders, rounds=rounds, budget=BUDGET, warmup=1, synchronize=wait).seconds
    figures = {
        way: {
            "median_s": statistics.median(own),
            "min_s": min(own),
            "rounds": len(own),
            "ratio": statistics.median(mine / other for mine, other in zip(own, seconds[baseline], strict=True)),
        }
        for way, own in seconds.items()
    }
    return {"case": case, "d": dim, "m": rows, "rank": RANK, "ways": figures, "baseline": baseline, "checks": checks}


def _gradients(rows: int, dim: int, device: str) -> Float[Tensor, "rows dim"]:
    """Draws synthetic gradients whose spectrum decays over two decades, above a floor."""
    coins = torch.Generator().manual_seed(SEED)
    mixed = torch.randn(rows, rows, generator=coins) * torch.logspace(0, -2, rows) / rows**0.5
    gradients = mixed @ torch.randn(rows, dim, generator=coins)
    return gradients.add_(torch.randn(rows, dim, generator=coins), alpha=0.01).to(device)


def _captured(rows: Float[Tensor, "rows dim"], basis: Float[Tensor, "dim k"]) -> float:
    """Fraction of the rows' squared norm in the span, which is more informative than angles for a flat spectrum."""
    vectors = basis.double()
    # |Q^T rows|^2 / |rows|^2 with Q = V L^-T and V^T V = L L^T, so that V need not be orthonormal.
    factor = torch.linalg.cholesky(vectors.T @ vectors)
    coefficients = torch.linalg.solve_triangular(factor, vectors.T @ rows.double().T, upper=False)
    return (coefficients.norm() / rows.double().norm()).square().item()


def _cosines(basis: Float[Tensor, "dim k"], other_basis: Float[Tensor, "dim k"]) -> Float[Tensor, " k"]:
    """Principal cosines of the spans, in float64; neither basis needs to be exactly orthonormal."""
    a, b = basis.double(), other_basis.double()
    # Cosines: singular values of L_a^-1 A^T B L_b^-T (Björck & Golub, 1973).
    left, right = torch.linalg.cholesky(a.T @ a), torch.linalg.cholesky(b.T @ b)
    inner = torch.linalg.solve_triangular(left, a.T @ b, upper=False)
    return torch.linalg.svdvals(torch.linalg.solve_triangular(right, inner.T, upper=False))
