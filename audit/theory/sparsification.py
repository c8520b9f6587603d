"""Random sparsification: its guarantee (Theorem 3.1), moments of masked vectors, and norms of masked noise.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023. The printed proof
of Theorem 3.1 masks after clipping; the method masks before clipping, and so do the plans measured here.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from leakbench.benchmarks import models
from leakbench.benchmarks.core import Sizes
from leakbench.defenses.core import Defense, Execution, Layout, contributions, floor_of, poisson, train

from ..plan.splits_cache import load_data
from .claim import Comparison, Measured, Setup, claim, mean_of, ratio_of, spread_of
from .released import mask_of, masks_of, plan_of, released

DIM = 60
CLIP = 0.5
SPARSITIES = (0.0, 0.3, 0.5, 0.9)
ROUNDING = 1e-9  # relative, of float64 rows


def sparse(setup: Setup, sparsity: float, sigma: float = 0.0, **settings: object) -> Defense:
    """Builds random sparsification at a constant sparsity; `sigma` is the noise multiplier, 0 for no noise."""
    chosen = {"clip_norm": CLIP, "final_sparsity": sparsity, "cooling": False, **settings}
    return setup.defense("random_sparsification", chosen, noise_multiplier=sigma)


def _records(setup: Setup) -> Float[Tensor, "records dim"]:
    """Draws gradients of many lengths and shapes: normal, heavy-tailed, and with a single entry."""
    generator = setup.generator("records")
    scales = 10 ** torch.empty(50, 1, dtype=torch.float64).uniform_(-3, 3, generator=generator)
    normal = torch.randn(50, DIM, generator=generator, dtype=torch.float64) * scales
    heavy = torch.empty(50, DIM, dtype=torch.float64).cauchy_(generator=generator)
    single = 7.0 * torch.eye(DIM, dtype=torch.float64)[::3]
    return torch.cat([normal, heavy, single]).to(setup.device)


@claim("3.1", "One record moves a sum of masked and then clipped gradients by at most C, for every mask and sparsity.")
def sparsification_sensitivity(setup: Setup) -> Measured:
    """Contributions, and differences between releases of neighbours; masked gradients longer than C are clipped to C.

    Masking after clipping, as in the printed proof, has the same largest norm, but leaves most rows below C.
    """
    rows, comparisons = _records(setup), []
    for sparsity in SPARSITIES:
        defense = sparse(setup, sparsity)
        plans = [plan_of(defense, setup.context(DIM, step, 10)) for step in range(10)]
        lengths = torch.stack([contributions(plan, lambda _point: rows)[0].norm(dim=1) for plan in plans])
        masks = torch.stack([mask_of(plan.blocks[0].codec, setup.device) for plan in plans])
        cut = (masks.unsqueeze(1) * rows).norm(dim=2) >= CLIP
        whole, moved = released(plans[0], rows), 0.0
        for left_out in range(len(rows)):
            neighbour = torch.cat([rows[:left_out], rows[left_out + 1 :]])
            moved = max(moved, float((whole - released(plans[0], neighbour)).norm()))
        for quantity, measured in (
            ("largest ||clip(m.g)||", float(lengths.max())),
            ("smallest ||clip(m.g)|| where ||m.g|| >= C", float(lengths[cut].min())),
            ("largest ||f(D) - f(D')||", moved),
        ):
            quantity = f"{quantity}, sparsity {sparsity}"
            comparisons.append(Comparison(what=quantity, measured=measured, closed=CLIP, tolerance=ROUNDING))
    return Measured(comparisons=tuple(comparisons))


@claim("3.1", "The most powerful test of a canary finds the Gaussian shift 1 / sigma whatever the sparsity.")
def sparsification_audit(setup: Setup) -> Measured:
    """Log-likelihood ratio of releases with and without a canary whose gradient lies in the kept coordinates."""
    sigma, at, comparisons = 2.0, setup.context(DIM), []
    others = torch.randn(5, DIM, generator=setup.generator("others"), dtype=torch.float64).to(setup.device)
    kept = mask_of(plan_of(sparse(setup, 0.9), at).blocks[0].codec, setup.device)
    canary = torch.randn(DIM, generator=setup.generator("canary"), dtype=torch.float64).to(setup.device) * kept * 10
    both = torch.cat([others, canary.unsqueeze(0)])
    for sparsity in (0.0, 0.9):
        plan, noise = plan_of(sparse(setup, sparsity, sigma), at), setup.noise("audit", sparsity)
        known = released(plan, others)
        signal = released(plan, both) - known
        draws = [released(plan, rows, sigma=sigma, noise=noise, count=4 * setup.draws) for rows in (both, others)]
        # The unit is the noise that the ledger accounts for: sigma times the clip norm.
        direction = (signal / signal.norm()).squeeze(0) / (sigma * CLIP)
        present, absent = (((drawn - known) @ direction).cpu() for drawn in draws)
        comparisons += [
            mean_of(f"shift of the test statistic, sparsity {sparsity}", present - absent, 1 / sigma),
            spread_of(f"its standard deviation, sparsity {sparsity}", absent, 1.0),
        ]
    return Measured(comparisons=tuple(comparisons))


@claim("3.1", "Dropped coordinates carry neither noise nor signal.")
def sparsification_silence(setup: Setup) -> Measured:
    """Noise on them is exactly 0, and gradients' values there change nothing, not even the clipping elsewhere."""
    sigma, sparsity = 3.0, 0.7
    plan = plan_of(sparse(setup, sparsity, sigma), setup.context(DIM))
    dropped = 1 - mask_of(plan.blocks[0].codec, setup.device)
    rows = _records(setup)
    plain, changed = (
        released(plan, gradients, sigma=sigma, noise=setup.noise("silence"))
        for gradients in (rows, rows + 1e3 * dropped)
    )
    numbers = (
        ("largest |release| on dropped coordinates", (plain * dropped).abs().max(), 0.0),
        ("coordinates that are released", (plain != 0).sum(), DIM - floor_of(sparsity, DIM)),
        ("largest change of the release when gradients change there", (plain - changed).abs().max(), 0.0),
    )
    return Measured(
        comparisons=tuple(Comparison(what=quantity, measured=float(m), closed=float(c)) for quantity, m, c in numbers)
    )


@claim("3.1", "A mask lasts for all of a batch, so micro-batches change nothing.")
def sparsification_microbatches(setup: Setup) -> Measured:
    """Parameters after training with three masks per epoch of three steps; micro-batches of 1, 7 and all examples."""
    splits = load_data("digits", 0, Sizes(), setup.device)
    examples = splits.public.inputs[:60], splits.public.labels[:60]
    trained = []
    for microbatch in (None, 7, 1):
        model = models.build("mlp", input_shape=splits.input_shape, classes=splits.classes, seed=0, hidden=8)
        train(
            model.to(setup.device),
            examples,
            sparse(setup, 0.9, 1.0, refreshes=3),
            sampling=poisson(1 / 3),
            steps=6,
            lr=0.5,
            noise=setup.noise("microbatches"),
            seed=setup.seed,
            sampler_key=setup.seed,
            execution=Execution(microbatch=microbatch, device=setup.device),
        )
        trained.append(Layout.of(model).read(model).double())
    # Noise on a coordinate in a single step moves it by lr sigma C / 20: far above the tolerance.
    return Measured(
        comparisons=tuple(
            Comparison(
                what=f"largest difference of parameters after 6 steps, micro-batches of {size}",
                measured=float((trained[0] - parameters).abs().max()),
                closed=0.0,
                tolerance=1e-6,
            )
            for size, parameters in zip((7, 1), trained[1:], strict=True)
        )
    )


@claim(
    "3.2",
    "A mask keeps rho of an inner product, and between rho and sqrt(rho) of a norm.",
    caveat=(
        "rho is the fraction kept, which rounding makes differ from 1 - r; rho of the norm is reached by any vector of "
        "one entry, and not by r = 0 alone as the papers say"
    ),
)
def mask_expectations(setup: Setup) -> Measured:
    """Masks of `2 * draws` epochs against the moments of sampling without replacement."""
    dim, sparsity = 20, 0.63
    masks = masks_of(sparse(setup, sparsity), setup, dim, 2 * setup.draws)
    rho = (dim - floor_of(sparsity, dim)) / dim
    u = torch.arange(1.0, dim + 1, dtype=torch.float64) / dim
    v = torch.randn(dim, generator=setup.generator("v"), dtype=torch.float64)
    single, flat = torch.zeros(dim, dtype=torch.float64), torch.ones(dim, dtype=torch.float64)
    single[3] = 2.0
    squares, norm = u.square(), float(u.norm())
    energies = masks @ squares
    variance = rho * (1 - rho) * dim / (dim - 1) * float((squares - squares.mean()).square().sum())
    deviations = (energies - rho * norm**2).square()
    return Measured(
        comparisons=(
            mean_of("E<m.u, v>", (masks * u) @ v, rho * float(u @ v)),
            mean_of("E<m.u, m.v>", ((masks * u) * (masks * v)).sum(dim=1), rho * float(u @ v)),
            mean_of("Var<m.u, u>", deviations, variance),
            mean_of("E||m.u||, from below", (masks * u).norm(dim=1), rho * norm, ">="),
            mean_of("E||m.u||, from above", (masks * u).norm(dim=1), math.sqrt(rho) * norm, "<="),
            mean_of("E||m.u||, u of one entry: rho ||u||", (masks * single).norm(dim=1), rho * 2.0),
            mean_of("E||m.u||, u flat: sqrt(rho) ||u||", (masks * flat).norm(dim=1), math.sqrt(rho * dim)),
        )
    )


@claim("3.3", "Masked noise has rho of the energy, and a norm by the chi distribution of the kept coordinates.")
def noise_norm(setup: Setup) -> Measured:
    """Releases of noise alone, masked and dense."""
    dim, sparsity, sigma = 50, 0.6, 1.0
    nothing = torch.zeros(1, dim, dtype=torch.float64, device=setup.device)

    def norms(rate: float) -> Tensor:
        plan = plan_of(sparse(setup, rate, sigma, clip_norm=1.0), setup.context(dim))
        drawn = released(plan, nothing, sigma=sigma, noise=setup.noise("norms", rate), count=2 * setup.draws)
        return drawn.norm(dim=1).cpu()

    masked, dense = norms(sparsity), norms(0.0)
    n = dim - floor_of(sparsity, dim)
    lengths = math.lgamma((n + 1) / 2) + math.lgamma(dim / 2) - math.lgamma(n / 2) - math.lgamma((dim + 1) / 2)
    return Measured(
        comparisons=(
            ratio_of("E||m.xi||^2 / E||xi||^2", masked.square(), dense.square(), n / dim),
            ratio_of("E||m.xi|| / E||xi||", masked, dense, math.exp(lengths)),
        )
    )
