"""Tests of the noise in a transcript's releases against the stated scale; need no private data.

Given the past, the noise of a step is fresh, so the energy of a release, in units of the stated noise, is at least that
of noise alone: a non-central chi-square stochastically exceeds the central one of equal degrees of freedom, whatever
the signal and however it depends on earlier noise. Energy too low for the stated noise therefore proves that there is
less of it, on any coordinates chosen before the releases were examined. The same holds after subtraction of anything
known before the step: the mean of earlier releases removes most of a persistent signal.

On coordinates where every gradient is zero, such as weights of pixels that are zero in all images, the release is the
noise: its scale is bounded from both sides, and its correlation is tested with the step before, and with the sum of all
steps before, which shows noise that repeats after any number of steps. If the coordinates were found without some
examples, a gradient may remain there, which persists between steps: a correlation counts as one of the noise only above
the most that a gradient of the observed energy could cause, which takes steps many times the period.
All tests share the level.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor, nn

from leakbench.defenses.core import Layout
from leakbench.leaderboard.records.transcript_report import NoiseFound

from .format import TranscriptHeader, WatchedStep

ZERO, ALL = "coordinates without a gradient", "all coordinates"

_BEFORE = 8
"""Releases whose mean estimates a step's signal."""
_LEAST = 16
"""Fewest entries of a tensor that is tested by itself."""


class NoiseTests:
    """Energies of a transcript's releases, by tensor, overall, and on coordinates without a gradient."""

    def __init__(self, header: TranscriptHeader, zero: Int[Tensor, " z"] | None = None) -> None:
        """Fixes the coordinates before any release is seen.

        Args:
            header: of the transcript.
            zero: flat coordinates in which every per-example gradient is zero; None if none are known.

        Raises:
            ValueError: coordinates out of range or repeated.
        """
        layout = header.layout
        self._names, self._sizes = layout.names, np.array(layout.sizes)
        self._ends = torch.tensor([stop for _, stop in layout.slices])
        if zero is not None and (
            zero.numel() == 0
            or int(zero.min()) < 0
            or int(zero.max()) >= layout.dim
            or zero.unique().numel() < zero.numel()
        ):
            raise ValueError(
                f"zero_coordinates must be distinct and in [0, {layout.dim}), at least one, got {zero.numel()} of them"
            )
        self._zero = zero
        rows = len(layout.names) + (zero is not None)
        # For each tensor, and for coordinates without a gradient: raw, and less the mean of earlier releases.
        self._energy, self._degrees = np.zeros((2, rows)), np.zeros((2, rows), dtype=np.int64)
        self._recent: deque[Tensor] = deque(maxlen=_BEFORE)
        self._last_noise: Tensor | None = None
        self._product, self._products = 0.0, 0
        self._sum: Tensor | None = None
        self._repetition, self._repetitions = 0.0, 0
        self.noiseless = 0

    def add(self, step: WatchedStep) -> None:
        """Adds a step; a step that states no noise is only counted."""
        if step.noise_std == 0:
            self.noiseless += 1
            self._recent.clear()
            self._last_noise = None
            return
        sums = step.sums.double()
        self._take(0, sums / step.noise_std, step)
        if self._recent:
            self._take(1, (sums - torch.stack(tuple(self._recent)).mean(0)) / step.noise_std, step)
        self._recent.append(sums)
        if self._zero is not None and not step.absent:
            noise = sums[self._zero] / step.noise_std
            if self._last_noise is not None:
                self._product += float(noise @ self._last_noise)
                self._products += noise.numel()
            self._last_noise = noise
            if self._sum is not None and bool(self._sum.any()):
                self._repetition += float(noise @ self._sum) / float(self._sum.norm())
                self._repetitions += 1
            self._sum = noise if self._sum is None else self._sum + noise

    def found(self, level: float) -> tuple[NoiseFound, ...]:
        """Returns the results, the strongest evidence of too little noise first; the tests share the level.

        Args:
            level: joint confidence of all bounds.
        """
        tensors = len(self._names)
        rows = [(name, [at]) for at, name in enumerate(self._names) if self._sizes[at] >= _LEAST and tensors > 1]
        rows += [(ALL, list(range(tensors)))] + ([(ZERO, [tensors])] if self._zero is not None else [])
        looks = [
            (name, bool(centred), self._energy[centred, at].sum(), int(self._degrees[centred, at].sum()))
            for name, at in rows
            for centred in (0, 1)
        ]
        looks = [look for look in looks if look[3] > 0]
        each = (1 - level) / max(len(looks), 1)
        return tuple(
            sorted(
                (_tested(*look, each) for look in looks),
                key=lambda compared: (compared.p_value, compared.high, compared.centred),
            )
        )

    @property
    def between_steps(self) -> float | None:
        """Z-score of the correlation between the noise of successive steps; None if there is no pure noise."""
        if self._zero is None or self._products == 0:
            return None
        return self._product / math.sqrt(self._products)

    @property
    def with_all_before(self) -> float | None:
        """Z-score of the correlation of noise with the sum of that of all steps before; None if there is no pure noise.

        Given the past, the inner product of fresh noise with that sum, over the sum's norm, is standard normal.
        """
        return None if self._repetitions == 0 else self._repetition / math.sqrt(self._repetitions)

    def most_by_gradient(self, share: float) -> float | None:
        """Bounds the absolute z-score that fresh noise can reach, whatever gradient remains on the coordinates.

        For releases x = s + n with fresh noise n and s determined by the past, sum x_t x_{t+1} has four parts:
        n_t n_{t+1} and s_t n_{t+1} contain fresh noise, and n_t s_{t+1} and s_t s_{t+1} are at most |n| |s| and |s|**2
        (Cauchy & Schwarz). The energy of the releases bounds |s|.

        Args:
            share: error probability.
        """
        if self._zero is None or self._products == 0:
            return None
        z, size, most = self._bounds(share)
        whole = z * math.sqrt(self._products) + z * size + size * math.sqrt(most) + size**2
        return whole / math.sqrt(self._products)

    def most_with_all_before(self, share: float) -> float | None:
        """Bounds the absolute value of `with_all_before` for fresh noise, whatever gradient remains.

        A step adds n_t u + s_t u, where u is the sum of the releases before, of length 1: the first is standard normal,
        and the second at most |s_t|, whose sum over the steps is at most the root of their number times |s|.

        Args:
            share: error probability, the same for both tests together.
        """
        if self._repetitions == 0:
            return None
        z, size, _ = self._bounds(share)
        return z + size

    def _bounds(self, share: float) -> tuple[float, float, float]:
        """Returns a normal quantile, the most that |s| can be, and the largest energy of the noise."""
        tensors = len(self._names)
        energy, degrees = float(self._energy[0, tensors]), int(self._degrees[0, tensors])
        # Nine bounds: two-sided on the three parts with fresh noise and on the noise's energy, one-sided on s n within.
        share_of_a_bound = share / 9
        z = float(stats.norm.isf(share_of_a_bound))
        least, most = (
            float(stats.chi2.ppf(quantile, degrees)) for quantile in (share_of_a_bound, 1 - share_of_a_bound)
        )
        # |x|**2 = |n|**2 + 2 s n + |s|**2, where 2 s n is at least -2 z |s|.
        return z, z + math.sqrt(z**2 + max(0.0, energy - least)), most

    def _take(self, row: int, whitened: Float[Tensor, " dim"], step: WatchedStep) -> None:
        squares = whitened.square()
        present = np.ones(len(self._names), dtype=bool)
        present[list(step.absent)] = False
        ends = squares.cumsum(0)[self._ends - 1].numpy()
        tensors = len(self._names)
        self._energy[row, :tensors] += np.where(present, np.diff(ends, prepend=0.0), 0.0)
        self._degrees[row, :tensors] += np.where(present, self._sizes, 0)
        if self._zero is not None and not step.absent:
            self._energy[row, tensors] += float(squares[self._zero].sum())
            self._degrees[row, tensors] += self._zero.numel()


def _tested(where: str, centred: bool, energy: float, degrees: int, share: float) -> NoiseFound:
    exact = where == ZERO and not centred
    low = math.sqrt(energy / float(stats.chi2.ppf(1 - share, degrees))) if exact else None
    return NoiseFound(
        where=where,
        centred=centred,
        coordinates=degrees,
        ratio=math.sqrt(energy / degrees),
        low=low,
        high=math.sqrt(energy / float(stats.chi2.ppf(share, degrees))),
        p_value=float(stats.chi2.cdf(energy, degrees)),
        z=float(energy - degrees) / math.sqrt(2 * degrees),
    )


def zero_coordinates(model: nn.Module, layout: Layout, inputs: Float[Tensor, "n ..."]) -> Int[Tensor, " z"] | str:
    """Finds flat coordinates with zero gradient for all examples at any parameters; else returns why none are known.

    Considers the first layer with parameters: if it is linear and an entry of its input is zero in every example, the
    weights of that entry have a gradient of zero. The examples are the training set as fed to the model. If they were
    augmented or are incomplete, a gradient may remain, which adds energy: it can hide a lack of noise, never feign one.

    Args:
        model: runs forward once, without gradients.
        layout: of the transcript, in the model's names.
        inputs: of all members.
    """
    layers = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    reached: list[tuple[nn.Module, Tensor]] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            reached.append((module, args[0].detach()))

    handles = [layer.register_forward_pre_hook(look) for layer in layers]
    training = model.training
    device = next((parameter.device for parameter in model.parameters()), inputs.device)
    zero: Tensor | None = None
    first: nn.Module | None = None
    try:
        model.eval()
        with torch.no_grad():
            for part in inputs.split(1024):
                reached.clear()
                model(part.to(device))
                if not reached:
                    return "no layer with parameters is reached"
                first, first_inputs = reached[0]
                if not isinstance(first, nn.Linear):
                    return f"the first layer with parameters is a {type(first).__name__}, and not linear"
                if sum(module is first for module, _ in reached) > 1:
                    return "the first linear layer is used twice"
                dead = (first_inputs == 0).flatten(0, -2).all(0)
                zero = dead if zero is None else zero & dead
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    if zero is None or first is None or not bool(zero.any()):
        return "no entry of the first layer's input is zero in every example"
    weight = first.weight
    owners = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    if len(owners) > 1:
        return "the weight of the first layer is shared with another one"
    if owners[0] not in layout.names:
        return f"the weight of the first layer, {owners[0]!r}, is not in the transcript"
    start = layout.slices[layout.names.index(owners[0])][0]
    columns = zero.nonzero().flatten().cpu()
    outputs, entries = weight.shape
    return (start + torch.arange(outputs)[:, None] * entries + columns).flatten()


def lowest(measurements: tuple[NoiseFound, ...], share: float) -> NoiseFound | None:
    """Returns the most significant deficit of noise; None if no test has one at a joint error of `share`."""
    if not measurements or measurements[0].p_value > share / len(measurements):
        return None
    return measurements[0]


def independent(z: float | None, share: float) -> bool:
    """Returns whether a z-score is compatible with independent noise, on coordinates without a gradient."""
    return z is None or 2 * float(stats.norm.sf(abs(z))) > share
