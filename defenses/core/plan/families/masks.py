"""Random masks: a schedule of the number of dropped coordinates, chosen at random by a public generator.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023: a single mask over
the whole flat vector, which changes between steps only. A method decides where the mask is applied.

Guarantee:
    A mask is a function of public randomness and of the step, so it costs no privacy, and a resumed run draws the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codec import Coordinates
from ..defense import Context
from ..refusals import refuse_count, refuse_fraction
from .counts import floor_of

_SMALL, _MOST = 2**15, 128  # coordinates of a cached mask, and number of masks: 32 MiB at most
# Cache of the last masks of small networks, because drawing a mask takes as long as the rest of a step.
_masks: dict[tuple[object, ...], Coordinates] = {}


@dataclass(frozen=True, kw_only=True)
class RandomMasks:
    """Uniformly random sets of kept coordinates, redrawn `refreshes` times per epoch.

    Attributes:
        final_sparsity: fraction dropped at the end of the cooling.
        refreshes: masks per epoch, at most one per step.
        cooling_epochs: epochs in which the sparsity grows linearly from 0; None for the whole run, 0 for no cooling.
    """

    final_sparsity: float
    refreshes: int = 1
    cooling_epochs: int | None = None

    def __post_init__(self) -> None:
        refuse_fraction("final_sparsity", self.final_sparsity)
        refuse_count("refreshes", self.refreshes)
        refuse_count("cooling_epochs", self.cooling_epochs, 0)

    def number(self, context: Context) -> int:
        """Index of a step's mask in the run, from 0."""
        # A function of the step, so that micro-batches share a mask. The authors' code counts loader iterations and may
        # redraw inside a batch: coordinates dropped only by the later mask then get signal but no noise.
        refreshes = self._refreshes(context)
        return context.epoch * refreshes + context.step % context.steps_per_epoch * refreshes // context.steps_per_epoch

    def _refreshes(self, context: Context) -> int:
        # Limited to the steps of an epoch: otherwise the last mask, with the final sparsity, would not be reached.
        return min(self.refreshes, context.steps_per_epoch)

    def dropped(self, context: Context) -> int:
        """Number of coordinates that a step drops."""
        epochs = context.epochs if self.cooling_epochs is None else self.cooling_epochs
        # (e R + k) / (E R - 1) at refresh k of epoch e: 0 at the first refresh, 1 at the last.
        grown = min(1.0, self.number(context) / max(1, epochs * self._refreshes(context) - 1)) if epochs else 1.0
        return floor_of(self.final_sparsity * grown, context.dim)

    def at(self, context: Context) -> Coordinates:
        """Returns the coordinates that a step keeps: a public random permutation without its first `dropped`."""
        number, dropped = self.number(context), self.dropped(context)
        key = (context.seed, number, dropped, context.dim, context.device)
        if (mask := _masks.get(key)) is None:
            order = torch.randperm(context.dim, generator=context.coins(number)).to(context.device)
            mask = Coordinates(order[dropped:], dim=context.dim)
            if context.dim <= _SMALL:
                _masks[key] = mask
                while len(_masks) > _MOST:
                    del _masks[next(iter(_masks))]
        return mask
