"""Float grid: tells who took part by the last digits of a noisy sum, whatever the scale of the noise.

Mironov, "On Significance of the Least Significant Bits for Differential Privacy", CCS 2012; Jin, McMurtry, Rubinstein
& Ohrimenko, "Are We There Yet? Timing and Floating-Point Attacks on Differential Privacy Systems", S&P 2022. Who knows
everybody else's contribution can take it off the release, and the candidate's too. What is left is the noise if the
guess was right, and the noise beside the place where it was drawn if it was wrong. Noise in single precision lies on
grids: its digits end where float32 ends, it is a float32 number times a scale, and PyTorch's comes in pairs whose
angle is one of 2^24. So for both guesses the attack asks how much better what is left fits such a grid than a
continuum, and the score is the difference. The size of what is left, which is all that the Gaussian tests look at,
does not count.

It finds membership in what PyTorch's `normal_` adds to float32 sums on the CPU, as most libraries of DP-SGD do, and in
noise that is rounded to float32 before it is added. It finds nothing in sums that are rounded to a public grid after
the noise was added. Noise drawn on a GPU, in pairs from 32 bits, shows by its digits alone.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .core import Access, Examples, Knows, MembershipScores, Observation, attack, granted

BLOCK = 16
"""Numbers that PyTorch draws together on the CPU: the first eight with the last eight, by Box and Muller's formula."""

UNIFORMS = 2**24
"""Values that a uniform number in single precision can have."""

WINDOW = 64
"""Blocks that are taken to be aligned alike."""

CHANCE = 5.0
"""Standard deviations that are no evidence: all candidates share a step's noise, and what it happens to fit as well."""

# Mean and standard deviation of what the best of 16 alignments gives a continuum, simulated; neighbours share seven
# places of eight.
_LARGEST = (1.098, 0.817)
_TOGETHER = 32  # candidates whose contributions are worked out together
_AT_ONCE = 2**20  # numbers of supposed noise that are worked on at a time


@attack(access=Access.UPDATE, knows=Knows.OTHERS | Knows.DEFENSE)
def float_grid(target: Observation, coins: torch.Generator) -> MembershipScores:
    """Compares how well the noise fits a float grid with a candidate's contribution taken off, and without.

    Args:
        target: one update with its candidates; what is left without everybody else must be in float64.
        coins: not used.

    Returns:
        How much better what is left fits a grid without the candidate's contribution than with it, in standard
        deviations beyond what chance gives; 0 where nothing tells.
    """
    candidates = granted(target.candidates)
    std = granted(target.noise_std)
    noisy = std > 0
    std = std[noisy].double()
    remainder = granted(target.others_removed)().detach()[:, noisy]
    own = _alike(target.contributions, candidates)[:, noisy]
    sums = target.released.detach()[None, noisy].double() * target.expected_batch
    scores, some = [], max(1, _AT_ONCE // max(1, len(std)))
    for left, mine in zip(remainder.split(some), own.split(some), strict=True):
        with_it = evidence(left.double() - mine.double(), sums, std)
        without = evidence(left.double(), sums, std)
        scores.append(compared(with_it, without))
    return MembershipScores(ids=candidates.ids, scores=torch.cat(scores), exact=False, dependence="per_step")


def evidence(
    noise: Float[Tensor, "n m"], sums: Float[Tensor, "#n m"], std: Float[Tensor, " m"]
) -> Float[Tensor, "grids n"]:
    """How well supposed noise fits each of four grids.

    Args:
        noise: on the undivided sums, one supposition a row; float64.
        sums: the undivided release, of each supposition or of all; its own rounding is what blurs the grid.
        std: of the noise.

    Returns:
        In standard deviations of what noise from a continuum would give, around 0 for it, whatever the noise's size;
        minus infinity for a grid that no number would show.
    """
    # The release was rounded once, and the attacker's idea of the sum without noise is off by a few of its last digits.
    blur = _spacing(sums) / 2 + 2 * _spacing(sums - noise)
    scaled = std * _spacing(noise / std)
    rounded = blur + _spacing(noise) / 2
    fits = (
        _multiples(noise, _spacing(noise), blur),
        _multiples(noise, scaled, blur),
        _multiples(noise, scaled, rounded),
        _pairs(noise / std, rounded / std),
    )
    return torch.stack(fits)


def _alike(contributions: Callable[..., Tensor], candidates: Examples) -> Float[Tensor, "n m"]:
    """Contributions in batches of one size, so that their last digits do not depend on how many are asked about."""
    rows = []
    for start in range(0, len(candidates), _TOGETHER):
        indices = torch.arange(start, start + _TOGETHER).clamp(max=len(candidates) - 1).to(candidates.ids.device)
        some = contributions(candidates.inputs[indices], candidates.labels[indices])
        rows.append(some[: len(candidates) - start].detach())
    return torch.cat(rows)


def compared(with_it: Float[Tensor, "grids n"], without: Float[Tensor, "grids n"]) -> Float[Tensor, " n"]:
    """By how much more one supposition fits a grid than the other, beyond what chance gives.

    Args:
        with_it: evidence where the candidate's contribution was taken off.
        without: evidence where it was not.
    """
    # The grid is the one that either supposition fits best, whichever that is.
    grid = torch.maximum(with_it, without).argmax(dim=0, keepdim=True)
    first, second = ((fit.gather(0, grid)[0] - CHANCE).clamp(min=0) for fit in (with_it, without))
    return first - second


def _multiples(noise: Float[Tensor, "n m"], step: Float[Tensor, "n m"], blur: Float[Tensor, "n m"]) -> Tensor:
    """How well numbers fit multiples of a step, blurred by rounding of at most so much, [n]."""
    return _resonance(noise / step, torch.sinc(2 * (blur / step).clamp(max=0.5)))


def _pairs(noise: Float[Tensor, "n m"], blur: Float[Tensor, "n m"]) -> Tensor:
    """How well standard noise fits pairs whose angle is 2 pi k / 2^24, computed in single precision, [n].

    Each tensor that noise was drawn for begins a block of its own, so every window of blocks may be aligned anew.
    """
    if noise.shape[1] < BLOCK:
        return noise.new_full((len(noise),), -math.inf)
    half = BLOCK // 2
    first, second = noise[:, :-half], noise[:, half:]
    angle = torch.atan2(second, first).remainder(2 * math.pi)
    # The angle was made in float32; what has been rounded since is seen from the pair's distance from 0.
    spread = torch.maximum(blur[:, :-half], blur[:, half:]) / torch.hypot(first, second).clamp(min=1e-30)
    fading = torch.sinc(UNIFORMS / math.pi * _spacing(angle) / 2) * torch.sinc(UNIFORMS / math.pi * spread)
    agreement = fading * torch.cos(angle * UNIFORMS)
    # Pairs begin in eight of sixteen places that follow one another; which, decides where blocks begin.
    by_position = (_by_position(x) for x in (agreement, fading.square()))
    found = _standard(
        *(torch.cat([x, x[..., : half - 1]], dim=-1).unfold(-1, half, 1).sum(dim=-1) for x in by_position)
    )
    expected, deviation = _LARGEST
    best = (found.amax(dim=-1) - expected) / deviation
    visible = best > -math.inf
    count, total = visible.sum(dim=1), torch.where(visible, best, 0.0).sum(dim=1)
    return torch.where(count > 0, total / count.clamp(min=1).sqrt(), -math.inf)


def _by_position(values: Float[Tensor, "n m"]) -> Float[Tensor, "n windows positions"]:
    """Sums over the blocks of a window, by place within the block."""
    missing = -values.shape[1] % (BLOCK * WINDOW)
    return nn.functional.pad(values, (0, missing)).unflatten(1, (-1, WINDOW, BLOCK)).sum(dim=2)


def _resonance(phase: Float[Tensor, "n m"], fading: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
    """How well phases agree with whole numbers, in standard deviations of what a continuum would give.

    Args:
        phase: a number's place on the grid, in steps.
        fading: what rounding leaves of the agreement, on average; numbers with 0 tell nothing.
    """
    agreement = fading * torch.cos(2 * math.pi * phase)
    return _standard(agreement.sum(dim=1), fading.square().sum(dim=1))


def _standard(agreement: Float[Tensor, "*shape"], weight: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """A sum of weighted cosines in standard deviations, by the sum of its squared weights."""
    return torch.where(weight > 1e-9, agreement / (weight / 2).sqrt(), -math.inf)


def _spacing(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Distance of neighbouring float32 numbers at these values."""
    exponent = torch.frexp(values.abs().clamp(min=2.0**-126)).exponent
    return torch.ldexp(torch.ones_like(values), exponent - 24)
