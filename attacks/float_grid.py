"""Float grid: membership from the last digits of a noisy sum, at any scale of the noise.

Mironov, "On Significance of the Least Significant Bits for Differential Privacy", CCS 2012; Jin, McMurtry, Rubinstein &
Ohrimenko, "Are We There Yet? Timing and Floating-Point Attacks on Differential Privacy Systems", S&P 2022. The
adversary of differential privacy knows all contributions but the candidate's, and subtracts them from the release. It
also subtracts the candidate's: if the candidate took part, the remainder is the noise, and if not, it is the noise
shifted by minus the contribution. Floating-point noise in single precision takes few of all real values: multiples of
the spacing of float32, a float32 number times a scale, or, from PyTorch, pairs whose angle is one of 2^24. A shifted
value lies on no such grid. The score is therefore the fit of the remainder to a grid with the contribution subtracted,
less the fit without, each in standard deviations under continuous noise. The remainder's size, the only statistic of
Gaussian tests, does not enter, so more noise is no defense.

It finds membership if PyTorch's `normal_` adds noise to float32 sums on the CPU, as in most libraries of DP-SGD, or if
noise is rounded to float32 before it is added. It finds nothing in sums that are rounded to a public grid after the
noise was added. Noise drawn on a GPU, in pairs from 32 bits, shows by its float32 spacing alone.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .core import Access, Examples, Knows, MembershipScores, Observation, attack, granted

BLOCK = 16
"""Normal numbers that PyTorch draws together on the CPU: the first eight pair with the last eight, by Box-Muller."""

UNIFORMS = 2**24
"""Number of values of a uniform number in single precision."""

WINDOW = 64
"""Blocks that share an alignment: each tensor that noise was drawn for begins a block of its own."""

CHANCE = 5.0
"""Fit attributed to chance, in standard deviations: all candidates share a step's noise, and its chance fit to a grid.
"""

# The largest of 16 standard normals is not standard: mean and standard deviation of the best of 16 alignments on
# continuous noise, simulated, because neighbouring alignments share seven positions of eight.
_LARGEST = (1.098, 0.817)
_TOGETHER = 32  # candidates per call of `contributions`
_AT_ONCE = 2**20  # numbers processed at a time: bounds memory


@attack(access=Access.UPDATE, knows=Knows.OTHERS | Knows.DEFENSE)
def float_grid(target: Observation, generator: torch.Generator) -> MembershipScores:
    """Compares the fit of the noise to a float grid with and without a candidate's contribution subtracted.

    Args:
        target: an update with its candidates; `others_removed` must be computed in float64.
        generator: not used.

    Returns:
        Fit of the remainder to a grid with the candidate's contribution subtracted, less the fit without, in standard
        deviations beyond chance; 0 without evidence.
    """
    candidates = granted(target.candidates)
    std = granted(target.noise_std)
    # A coordinate without noise has no grid; the likelihood ratio decides there.
    noisy = std > 0
    std = std[noisy].double()
    remainder = granted(target.others_removed)
    # The grid is that of the undivided sums: the division by the expected batch came after the noise.
    sums = target.released.detach()[None, noisy].double() * target.expected_batch
    scores, at_once = [], max(1, _AT_ONCE // max(1, len(std)))
    for start in range(0, len(candidates), _TOGETHER):
        own = _in_fixed_batches(target.contributions, candidates, start)
        for first in range(0, len(own), at_once):
            mine = own[first : first + at_once][:, noisy].double()
            part = slice(start + first, start + first + len(mine))
            residual = remainder(part).detach()[:, noisy].double()
            scores.append(compared(evidence(residual - mine, sums, std), evidence(residual, sums, std)))
    return MembershipScores(ids=candidates.ids, scores=torch.cat(scores), exact=False, dependence="per_step")


def evidence(
    noise: Float[Tensor, "n m"], sums: Float[Tensor, "#n m"], std: Float[Tensor, " m"]
) -> Float[Tensor, "grids n"]:
    """Returns the fit of supposed noise to each of four grids: float32, two of scaled float32, Box-Muller pairs.

    Args:
        noise: supposed noise on the undivided sums, a hypothesis per row; float64.
        sums: the undivided release, of each hypothesis or of all; its own rounding blurs the grid.
        std: standard deviation of the noise.

    Returns:
        The fit in standard deviations under continuous noise, around 0 for it, at any size of the noise; minus infinity
        for a grid that is finer than the release's rounding at every coordinate.
    """
    # The release was rounded once (half a spacing); the attacker's own sum without noise may have been added up in
    # another order, which moves it by a few of its last digits.
    blur = _spacing(sums) / 2 + 2 * _spacing(sums - noise)
    scaled = std * _spacing(noise / std)
    rounded = blur + _spacing(noise) / 2
    # Noise that is a float32 number; std times such a number; the same rounded to float32; pairs drawn by PyTorch.
    fits = (
        _multiples(noise, _spacing(noise), blur),
        _multiples(noise, scaled, blur),
        _multiples(noise, scaled, rounded),
        _pairs(noise / std, rounded / std),
    )
    return torch.stack(fits)


def _in_fixed_batches(contributions: Callable[..., Tensor], candidates: Examples, start: int) -> Float[Tensor, "n m"]:
    """Returns contributions of a few candidates in batches of fixed size: last digits do not depend on the index."""
    # Matrix products of other shapes add up in another order; the last batch repeats the last candidate to be full.
    indices = torch.arange(start, start + _TOGETHER).clamp(max=len(candidates) - 1).to(candidates.ids.device)
    batch = contributions(candidates.inputs[indices], candidates.labels[indices])
    return batch[: len(candidates) - start].detach()


def compared(with_it: Float[Tensor, "grids n"], without: Float[Tensor, "grids n"]) -> Float[Tensor, " n"]:
    """Returns the fit of one hypothesis to a grid less that of the other, beyond chance.

    Args:
        with_it: evidence with the candidate's contribution subtracted.
        without: evidence without the subtraction.
    """
    # One grid for both hypotheses, the best fit of either: the generator that drew the noise is not known.
    grid = torch.maximum(with_it, without).argmax(dim=0, keepdim=True)
    first, second = ((fit.gather(0, grid)[0] - CHANCE).clamp(min=0) for fit in (with_it, without))
    return first - second


def _multiples(noise: Float[Tensor, "n m"], step: Float[Tensor, "n m"], blur: Float[Tensor, "n m"]) -> Tensor:
    """Returns the fit of numbers to multiples of a step, [n], if rounding moves each by at most `blur`."""
    # A cosine averaged over a uniform error of at most b is multiplied by sinc(2 b / step).
    return _resonance(noise / step, torch.sinc(2 * (blur / step).clamp(max=0.5)))


def _pairs(noise: Float[Tensor, "n m"], blur: Float[Tensor, "n m"]) -> Tensor:
    """Returns the fit of standard noise to Box-Muller pairs, whose angle is 2 pi k / 2^24 in single precision, [n].

    The blocks of a tensor begin at the tensor's start, which the attacker is not given: every window of blocks may be
    aligned anew.
    """
    if noise.shape[1] < BLOCK:
        return noise.new_full((len(noise),), -math.inf)
    half = BLOCK // 2
    first, second = noise[:, :-half], noise[:, half:]
    angle = torch.atan2(second, first).remainder(2 * math.pi)
    # Two errors of the angle: it was computed in float32, and rounding since moved the pair by `blur`, an angle of blur
    # / distance from 0.
    spread = torch.maximum(blur[:, :-half], blur[:, half:]) / torch.hypot(first, second).clamp(min=1e-30)
    fading = torch.sinc(UNIFORMS / math.pi * _spacing(angle) / 2) * torch.sinc(UNIFORMS / math.pi * spread)
    agreement = fading * torch.cos(angle * UNIFORMS)
    # In a block the first eight positions begin a pair and the last eight end it. Of 16 alignments the right alignment
    # therefore sums over eight consecutive positions (cyclic) that all agree.
    by_position = (_by_position(x) for x in (agreement, fading.square()))
    standardised = _standard(
        *(torch.cat([x, x[..., : half - 1]], dim=-1).unfold(-1, half, 1).sum(dim=-1) for x in by_position)
    )
    expected, deviation = _LARGEST
    best = (standardised.amax(dim=-1) - expected) / deviation
    visible = best > -math.inf
    count, total = visible.sum(dim=1), torch.where(visible, best, 0.0).sum(dim=1)
    return torch.where(count > 0, total / count.clamp(min=1).sqrt(), -math.inf)


def _by_position(values: Float[Tensor, "n m"]) -> Float[Tensor, "n windows positions"]:
    """Returns sums over the blocks of a window, by position within the block."""
    missing = -values.shape[1] % (BLOCK * WINDOW)
    return nn.functional.pad(values, (0, missing)).unflatten(1, (-1, WINDOW, BLOCK)).sum(dim=2)


def _resonance(phase: Float[Tensor, "n m"], fading: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
    """Returns the agreement of phases with whole numbers, in standard deviations under continuous noise.

    Args:
        phase: a number in units of the grid's step.
        fading: factor by which rounding reduces the mean agreement; numbers with 0 carry no evidence.
    """
    agreement = fading * torch.cos(2 * math.pi * phase)
    return _standard(agreement.sum(dim=1), fading.square().sum(dim=1))


def _standard(agreement: Float[Tensor, "*shape"], weight: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns a sum of weighted cosines in standard deviations, by the sum of its squared weights."""
    # A cosine of a uniform phase has variance 1/2.
    return torch.where(weight > 1e-9, agreement / (weight / 2).sqrt(), -math.inf)


def _spacing(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the distance of neighbouring float32 numbers at these values."""
    # |x| = m 2^e with m in [1/2, 1), and a significand has 24 bits; below 2^-126 the spacing stays 2^-149.
    exponent = torch.frexp(values.abs().clamp(min=2.0**-126)).exponent
    return torch.ldexp(torch.ones_like(values), exponent - 24)
