"""Theorem 5.1, re-derived: how far a mask and noise increase the error of a reconstruction, and where they do not.

Zhu & Blaschko, TMLR 2023, section 5. A number x is to be found from y = m.(a x + xi): a gradient a x, some of whose
entries a mask m keeps, under noise of standard deviation s. An attacker who knows a and m takes least squares on the
kept entries, with an error of s^2 / ||m.a||^2 given the mask. Masks, clipping and noise here come from the method's own
plans.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from scipy.integrate import quad
from torch import Tensor

from leakbench.defenses.core import floor_of

from .claim import Comparison, Measured, Setup, claim, mean_of, ratio_of
from .released import mask_of, masks_of, plan_of, released
from .sparsification import sparse

DIM = 40
X, STD = 0.7, 0.3  # input, and noise on each entry: in units of the gradient, or of the clip norm
SPARSITIES = (0.0, 0.3, 0.5, 0.8)
GOLDEN = (1.6260e-3, 2.3434e-3, 3.3210e-3, 8.9477e-3)
"""Values of s^2 E[1 / ||m.a||^2] at the four sparsities, by separate enumeration and simulation, to five digits."""

A = torch.arange(1, DIM + 1, dtype=torch.float64) / 20


def kept_entries(sparsity: float) -> int:
    """Number of entries that a mask keeps."""
    return DIM - floor_of(sparsity, DIM)


def laplace(t: float, n: int) -> float:
    """E exp(-t ||m.a||^2) over masks that keep n entries: an elementary symmetric polynomial / the number of masks."""
    # means[k]: the same for masks that keep k of the entries so far; avoids binomial coefficients that could overflow.
    means = np.zeros(n + 1)
    means[0] = 1.0
    for count, weight in enumerate(np.exp(-t * A.numpy() ** 2), start=1):
        k = np.arange(1, min(n, count) + 1)
        means[k] = (1 - k / count) * means[k] + k / count * weight * means[k - 1]
    return float(means[n])


@cache
def expected_inverse(sparsity: float, offset: float = 0.0) -> float:
    """E[1 / (offset + ||m.a||^2)] over all masks of that size, by a single integral: 1 / S = int exp(-t S) dt."""
    n = kept_entries(sparsity)
    value, _ = quad(lambda t: math.exp(-t * offset) * laplace(t, n), 0, np.inf, epsabs=0, epsrel=1e-10, limit=500)
    return value


def _observed(
    setup: Setup, sparsity: float, name: str, inputs: Float[Tensor, " n"], **settings: object
) -> tuple[Float[Tensor, "n dim"], Float[Tensor, "n dim"]]:
    """Returns releases of the gradient a x under successive masks, and the masks."""
    defense, source = sparse(setup, sparsity, STD, **settings), setup.noise(name, sparsity)
    releases, masks = [], []
    for step, x in enumerate(inputs.tolist()):
        plan = plan_of(defense, setup.context(DIM, step))
        row = (A * x).unsqueeze(0).to(setup.device)
        releases.append(released(plan, row, sigma=STD, noise=source).cpu())
        masks.append(mask_of(plan.blocks[0].codec, setup.device).cpu())
    return torch.cat(releases), torch.stack(masks)


def _unclipped(setup: Setup, sparsity: float, name: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    # Without clipping the noise is the multiplier times `clip_norm`, hence a clip norm of 1.
    return _observed(setup, sparsity, name, inputs, without="clipping", clip_norm=1.0)


def _same(setup: Setup) -> Tensor:
    return torch.full((setup.draws,), X, dtype=torch.float64)


@claim(
    "3.4",
    "Theorem 5.1: without clipping, the least-squares error is s^2 E[1 / ||m.a||^2], and grows with the sparsity.",
    caveat=(
        "it needs noise of fixed size on a gradient that is not clipped, and an unbiased attacker who knows the mask; "
        "how far it lies above s^2 / ((1 - r) ||a||^2) depends on how uneven a is"
    ),
)
def reconstruction_error(setup: Setup) -> Measured:
    """Simulated least squares, the mean over masks alone, golden values, and the bound of Jensen's inequality."""
    comparisons, energy = [], float(A.square().sum())
    for sparsity, golden in zip(SPARSITIES, GOLDEN, strict=True):
        exact = STD**2 * expected_inverse(sparsity)
        releases, masks = _unclipped(setup, sparsity, "least squares", _same(setup))
        signals = masks @ A.square()
        errors = (releases @ A / signals - X).square()  # y is 0 outside the mask
        bound = STD**2 / ((1 - sparsity) * energy)
        comparisons += [
            mean_of(f"squared error, sparsity {sparsity}", errors, exact),
            mean_of(f"s^2 E[1 / ||m.a||^2], sparsity {sparsity}", STD**2 / signals, exact),
            Comparison(
                what=f"closed form against its golden value, sparsity {sparsity}",
                measured=exact,
                closed=golden,
                tolerance=5e-8,
            ),
            mean_of(f"s^2 E[1 / ||m.a||^2], lower bound, sparsity {sparsity}", STD**2 / signals, bound, ">="),
        ]
    return Measured(comparisons=tuple(comparisons))


@claim(
    "3.4",
    "Theorem 5.1 for several inputs: the error is at least s^2 tr((A'A)^-1) / (1 - r).",
)
def reconstruction_several_inputs(setup: Setup) -> Measured:
    """Least squares for three inputs at once, with masks of the method."""
    matrix = torch.randn(DIM, 3, generator=setup.generator("matrix"), dtype=torch.float64)
    comparisons = []
    for sparsity in (0.3, 0.8):
        masks = masks_of(sparse(setup, sparsity), setup, DIM, setup.draws // 2)
        products = torch.einsum("nd,di,dj->nij", masks, matrix, matrix)
        traces = torch.linalg.inv(products).diagonal(dim1=1, dim2=2).sum(dim=1)
        bound = STD**2 * float(torch.linalg.inv(matrix.T @ matrix).trace()) / (1 - sparsity)
        comparisons.append(mean_of(f"s^2 E tr((A' diag(m) A)^-1), sparsity {sparsity}", STD**2 * traces, bound, ">="))
    return Measured(comparisons=tuple(comparisons))


@claim(
    "3.4",
    "Theorem 5.1 under clipping: the error grows with the sparsity as without.",
    should_hold=False,
    caveat="a clipped signal of norm C faces noise of sigma C on each entry, so that an attacker who knows the clip "
    "factor has an error of sigma^2 x^2 at every sparsity",
)
def reconstruction_under_clipping(setup: Setup) -> Measured:
    """Clipping is active at every sparsity, and the attacker knows the clip factor."""
    clip_norm = 0.05
    measured, comparisons, instead, shortest = {}, [], [], math.inf
    for sparsity in SPARSITIES:
        releases, masks = _observed(setup, sparsity, "clipped", _same(setup), clip_norm=clip_norm)
        lengths = (masks * A).norm(dim=1)
        shortest = min(shortest, float(lengths.min()) * X)
        factors = clip_norm / (lengths * X)
        errors = (releases @ A / (factors * lengths.square()) - X).square()
        measured[sparsity] = errors
        instead.append(mean_of(f"squared error, sparsity {sparsity}: sigma^2 x^2", errors, STD**2 * X**2))
    instead.append(
        Comparison(what="shortest masked gradient: clipped", measured=shortest, closed=clip_norm, relation=">=")
    )
    for sparsity in SPARSITIES[1:]:
        growth = expected_inverse(sparsity) / expected_inverse(0.0)
        quantity = f"error relative to sparsity 0, sparsity {sparsity}"
        comparisons.append(ratio_of(quantity, measured[sparsity], measured[0.0], growth))
    return Measured(comparisons=tuple(comparisons), instead=tuple(instead))


@claim(
    "3.4",
    "An attacker who does not know the mask has error x^2 ((1 - rho)^2 + Var / ||a||^4) + s^2 rho / ||a||^2.",
)
def reconstruction_mask_unknown(setup: Setup) -> Measured:
    """Estimate that divides by the whole ||a||^2."""
    squares, comparisons = A.square(), []
    energy = float(squares.sum())
    for sparsity in SPARSITIES:
        rho = kept_entries(sparsity) / DIM
        releases, _ = _unclipped(setup, sparsity, "unaware", _same(setup))
        errors = (releases @ A / energy - X).square()
        variance = rho * (1 - rho) * DIM / (DIM - 1) * float((squares - squares.mean()).square().sum())
        expected = X**2 * ((1 - rho) ** 2 + variance / energy**2) + STD**2 * rho / energy
        comparisons.append(mean_of(f"squared error, sparsity {sparsity}", errors, expected))
    return Measured(comparisons=tuple(comparisons))


@claim("3.4", "An attacker with a Gaussian prior of variance p has error E[p s^2 / (s^2 + p ||m.a||^2)], growing too.")
def reconstruction_with_a_prior(setup: Setup) -> Measured:
    """Posterior mean, for inputs drawn from the prior."""
    prior, comparisons = 0.01, []
    for sparsity in SPARSITIES:
        inputs = torch.randn(setup.draws, generator=setup.generator("inputs", sparsity), dtype=torch.float64)
        inputs = inputs * math.sqrt(prior)
        releases, masks = _unclipped(setup, sparsity, "prior", inputs)
        signals = masks @ A.square()
        errors = (prior * (releases @ A) / (STD**2 + prior * signals) - inputs).square()
        expected = STD**2 * expected_inverse(sparsity, offset=STD**2 / prior)
        comparisons.append(mean_of(f"squared error, sparsity {sparsity}", errors, expected))
    return Measured(comparisons=tuple(comparisons))


@claim(
    "3.4",
    "Over a run, whoever sees every update gets each coordinate: masks of E epochs miss one with probability r^E.",
)
def reconstruction_over_epochs(setup: Setup) -> Measured:
    """Share of coordinates that no mask of 20 epochs keeps, at sparsity 0.9."""
    epochs, sparsity, dim = 20, 0.9, 50
    runs = max(2, setup.draws // 10)
    masks = masks_of(sparse(setup, sparsity), setup, dim, runs * epochs)
    missed = (masks.reshape(runs, epochs, dim).sum(dim=1) == 0).double().mean(dim=1)
    return Measured(
        comparisons=(mean_of("share of coordinates never released in 20 epochs", missed, sparsity**epochs),)
    )
