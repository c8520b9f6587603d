"""How much noise the releases of a transcript have, against what their writer states; needs no private data.

Given the past, the noise of a step is fresh, and so the energy of a release, in units of the stated noise, is at least
that of noise alone: a non-central chi-square is above the central one of as many degrees, whatever the signal is and
however it follows from earlier noise. An energy below what the stated noise would give is therefore proof that there is
less of it, on any coordinates that were chosen before the releases were looked at. The same holds after anything is
subtracted that was known before the step: the mean of the releases before it takes away most of a signal that lasts.

On coordinates where every gradient is zero, as weights of pixels that are zero in all images, the release is the noise,
and its scale is found from both sides, and whether a step's noise is that of the step before. Where some examples were
not among those that the coordinates were found by, a gradient may be there after all, which lasts from step to step: a
correlation counts as one of the noise only where it is more than a gradient of the energy that is there could make.
All tests share the level.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor, nn

from leakbench.defenses.core import Layout

from .format import TranscriptHeader, WatchedStep

ZERO, ALL = "coordinates without a gradient", "all coordinates"

_BEFORE = 8
"""Releases whose mean stands for a step's signal."""
_LEAST = 16
"""Entries of a tensor that is tested by itself."""


@dataclass(frozen=True, kw_only=True)
class NoiseFound:
    """The noise on some coordinates, over all steps.

    Attributes:
        where: the coordinates, in words.
        centred: whether the mean of the releases before was subtracted.
        coordinates: numbers that were looked at, over all steps.
        ratio: root of their energy: standard deviation found over the one stated, signal included.
        low: lower confidence bound on that of the noise alone; None where there may be signal.
        high: upper confidence bound, valid whatever the signal.
        p_value: chance of so little energy, or less, at the stated noise.
        z: of the energy, negative for too little.
    """

    where: str
    centred: bool
    coordinates: int
    ratio: float
    low: float | None
    high: float
    p_value: float
    z: float

    def to_dict(self) -> dict[str, Any]:
        """As numbers and words."""
        return asdict(self)


class NoiseTests:
    """Energies of a transcript's releases, by tensor, overall, and where there is no gradient."""

    def __init__(self, header: TranscriptHeader, zero: Int[Tensor, " z"] | None = None) -> None:
        """Coordinates are fixed here, before a release is seen.

        Args:
            header: of the transcript.
            zero: flat coordinates in which every example's gradient is zero; None where none are known.

        Raises:
            ValueError: coordinates that there are not, or one twice.
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
        # Of each tensor, and where there is no gradient: raw, and less the mean of the releases before.
        self._energy, self._degrees = np.zeros((2, rows)), np.zeros((2, rows), dtype=np.int64)
        self._recent: deque[Tensor] = deque(maxlen=_BEFORE)
        self._last_noise: Tensor | None = None
        self._product, self._products = 0.0, 0
        self.noiseless = 0

    def add(self, step: WatchedStep) -> None:
        """Takes a step into account; one that states no noise is counted and nothing more."""
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

    def found(self, level: float) -> tuple[NoiseFound, ...]:
        """What was found, the strongest evidence of too little noise first; the tests share the level.

        Args:
            level: confidence of all bounds together.
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
            sorted((_found(*look, each) for look in looks), key=lambda one: (one.p_value, one.high, one.centred))
        )

    @property
    def between_steps(self) -> float | None:
        """Z-score of the correlation of one step's noise with the next one's; None where it cannot be known."""
        if self._zero is None or self._products == 0:
            return None
        return self._product / math.sqrt(self._products)

    def most_by_gradient(self, share: float) -> float | None:
        """The largest size of that z-score that fresh noise may have, whatever gradient is there after all.

        Of releases x = s + n with fresh noise n and s by the past, sum x_t x_{t+1} has four sums: n_t n_{t+1} and
        s_t n_{t+1} are of noise that is fresh, and n_t s_{t+1} and s_t s_{t+1} are at most |n| |s| and |s|**2
        (Cauchy & Schwarz). How much |s| there is at most, the energy of the releases says.

        Args:
            share: chance of an error.
        """
        if self._zero is None or self._products == 0:
            return None
        tensors = len(self._names)
        energy, degrees = float(self._energy[0, tensors]), int(self._degrees[0, tensors])
        # One statement on either sum of fresh noise on both sides, on the energy on both, and on s n within it.
        each = share / 7
        z = float(stats.norm.isf(each))
        least, most = (float(stats.chi2.ppf(quantile, degrees)) for quantile in (each, 1 - each))
        # |x|**2 = |n|**2 + 2 s n + |s|**2, where 2 s n is at least -2 z |s|.
        size = z + math.sqrt(z**2 + max(0.0, energy - least))
        whole = z * math.sqrt(self._products) + z * size + size * math.sqrt(most) + size**2
        return whole / math.sqrt(self._products)

    def _take(self, row: int, whitened: Float[Tensor, " dim"], step: WatchedStep) -> None:
        squares = whitened.square()
        there = np.ones(len(self._names), dtype=bool)
        there[list(step.absent)] = False
        ends = squares.cumsum(0)[self._ends - 1].numpy()
        tensors = len(self._names)
        self._energy[row, :tensors] += np.where(there, np.diff(ends, prepend=0.0), 0.0)
        self._degrees[row, :tensors] += np.where(there, self._sizes, 0)
        if self._zero is not None and not step.absent:
            self._energy[row, tensors] += float(squares[self._zero].sum())
            self._degrees[row, tensors] += self._zero.numel()


def _found(where: str, centred: bool, energy: float, degrees: int, share: float) -> NoiseFound:
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
    """Flat coordinates in which no example can have a gradient, whatever the parameters; or why none are known.

    The first layer with parameters is looked at: where it is linear, and an entry of what it is given is zero in every
    example, the weights of that entry have a gradient of zero. Examples are the training set as the model got it.
    Where they were augmented, or are not all there, a gradient may remain, which adds energy and hides a lack of noise,
    and never makes one up.

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
                first, given = reached[0]
                if not isinstance(first, nn.Linear):
                    return f"the first layer with parameters is a {type(first).__name__}, and not linear"
                if sum(module is first for module, _ in reached) > 1:
                    return "the first linear layer is used twice"
                dead = (given == 0).flatten(0, -2).all(0)
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


def lowest(found: tuple[NoiseFound, ...], share: float) -> NoiseFound | None:
    """The strongest proof of too little noise, or None; `share` is the chance of an error, of all tests together."""
    if not found or found[0].p_value > share / len(found):
        return None
    return found[0]


def independent(z: float | None, share: float) -> bool:
    """Whether a correlation's z-score may be of independent noise, where there is no gradient."""
    return z is None or 2 * float(stats.norm.sf(abs(z))) > share
