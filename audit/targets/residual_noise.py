"""What is left of a step's noisy sums once contributions are taken off: the noise, or that and one candidate's own.

Computed by the auditor from the private data, row by row as the reference does, for checks of the noise and for attacks
that read the remainders themselves; `replay.py` has what scores need of them at the price of training.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakbench.attacks.core import Examples
from leakbench.defenses.core import Loss, Run, Sampling, Step

from .observed_step import ROWS, Observed, refuse_too_many

_KEPT = 2**25  # numbers of left-over noise and rows that all views of a run share, 256 MiB at most


@dataclass(frozen=True)
class LeftOver:
    """A step's noisy sums, in parts.

    Attributes:
        noise: the sums less everybody's contribution [m], float64.
        asked: ids of the candidates that it was computed for.
        joined: ids of those of them that took part, sorted.
        rows: contributions of these [n, m], as they were taken off.
    """

    noise: Tensor
    asked: Tensor
    joined: Tensor
    rows: Tensor

    @property
    def size(self) -> int:
        """Numbers that it holds."""
        return self.noise.numel() + self.rows.numel()


def joined_by(step: Step, sampling: Sampling, size: int, key: int) -> Int[Tensor, " b"]:
    """Positions of those who are in a step or a one-off release, which is of everybody.

    Args:
        step: of the transcript.
        sampling: the sampler of the run's steps.
        size: examples in the training.
        key: of the sampler.
    """
    return torch.arange(size) if step.one_off is not None else sampling.indices(step.step, size, key)


@dataclass(frozen=True)
class Remainders:
    """The steps of a run with contributions taken off.

    Attributes:
        run: trained with observer="updates".
        private: the training data, in the trainer's order: the sampler answers with positions in it.
        sampling: the sampler of the run.
        loss: per-example loss.
        kept: key of a step -> its parts, shared by all who ask: each takes the gradients of a whole batch.
        latest: the same of the last step that `kept` has no room for, whose candidates are asked for a few at a time.
    """

    run: Run
    private: Examples
    sampling: Sampling
    loss: Loss
    kept: dict[int, LeftOver]
    latest: dict[int, LeftOver] = field(default_factory=dict)

    def noise(self, step: Step) -> Float[Tensor, " m"]:
        """The noise of a step: its noisy sums less everybody's contribution, in float64."""
        nobody = self.private.ids.new_empty(0)
        return self._left_over(step, nobody, nobody)[0]

    def without_others(
        self, step: Step, candidates: Int[Tensor, " n"], part: slice = slice(None)
    ) -> Float[Tensor, "part m"]:
        """The noisy sums less everybody but one candidate, for each of them: noise, plus its own if it took part.

        Args:
            step: with its plan and noisy blocks.
            candidates: ids of all who will be asked for.
            part: of these, who is asked for now.
        """
        asked = candidates[part]
        refuse_too_many(len(asked), self.run.transcript.layout.dim, width=8)
        noise, own = self._left_over(step, asked, candidates)
        # Into `own`, which is fresh at every call; `noise` is that of `kept`, which other cells read.
        return own.add_(noise)

    def _left_over(self, step: Step, asked: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """A step's noisy sums less everybody's contribution [m], and contributions to it of who is asked for [n, m].

        Rows are computed from the private data, and not from what an attack was given and may have changed.
        In float64: noise drawn in float32 gives members away by the last digits of a release, and a remainder rounded
        to float32 would hide that from the audit.
        """
        found = self.kept.get(step.key)
        if found is None or not torch.isin(asked, found.asked).all():
            found = self.latest.get(step.key)
        if found is None or not torch.isin(asked, found.asked).all():
            # All who will be asked for, because each call takes a pass over the batch; unless their rows are too many.
            found = self._parted(step, candidates if self._few(step, candidates) else asked)
            others = sum(one.size for number, one in self.kept.items() if number != step.key)
            # First come, first kept: attacks read all steps in order, and putting the oldest out would never hit.
            if others + found.size <= _KEPT:
                self.kept[step.key] = found
            else:
                self.latest.clear()
                self.latest[step.key] = found
        # A candidate that took no part contributed 0.
        own = found.noise.new_zeros(len(asked), len(found.noise))
        joined = torch.isin(asked, found.joined)
        own[joined] = found.rows[torch.searchsorted(found.joined, asked[joined])].double()
        return found.noise, own

    def _few(self, step: Step, candidates: Tensor) -> bool:
        """Whether rows of all candidates that took part fit into memory."""
        joined = torch.isin(candidates, self.private.ids[self._took_part(step)])
        return int(joined.sum()) * self.run.transcript.layout.dim <= ROWS

    def _took_part(self, step: Step) -> Int[Tensor, " b"]:
        # The trainer's own draw again: a batch is a pure function of step and key, and no transcript holds it.
        joined = joined_by(step, self.sampling, len(self.private), self.run.sampler_key)
        return joined.to(self.private.inputs.device)

    def _parted(self, step: Step, asked: Tensor) -> LeftOver:
        """A step's noisy sums in parts: the noise, and the rows of those with the ids `asked`.

        All of the step's rows are computed, also for the rows of a few: the last digits of a row follow from the rows
        beside it, and only the very row that was taken off the sums leaves nothing of itself when it is put back.
        """
        private, layout = self.private, self.run.transcript.layout
        seen = Observed(step, self.run.model, layout, self.loss, self.run.views_behind(step))
        took_part = self._took_part(step)
        total = seen.sums.new_zeros(seen.sums.shape, dtype=torch.float64)
        joined, rows = [private.ids.new_empty(0)], [seen.sums.new_zeros(0, seen.sums.numel())]
        for part in took_part.split(max(1, ROWS // layout.dim)) if len(took_part) else ():
            contributed = seen.contributions(private.inputs[part], private.labels[part])
            total += contributed.sum(dim=0, dtype=torch.float64)
            is_asked = torch.isin(private.ids[part], asked)
            joined.append(private.ids[part][is_asked])
            rows.append(contributed[is_asked])
        # Sorted, for the binary searches of `_left_over`.
        ids, order = torch.cat(joined).sort()
        return LeftOver(seen.sums.double() - total, asked, ids, torch.cat(rows)[order])
