"""Remainders of a step's noisy sums minus contributions: noise, or noise plus a candidate's contribution.

The auditor computes them from the private data, row by row like the reference, for checks of the noise and for attacks
that read the remainders themselves; `replay.py` computes the statistics for scores at the cost of training.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakbench.attacks.core import Examples
from leakbench.defenses.core import Loss, Run, Sampling, Step

from .observed_step import ROWS, Observed, refuse_too_many

_KEPT = 2**25  # entries of noise and rows shared by all views of a run, 256 MiB at most


@dataclass(frozen=True)
class ResidualNoise:
    """A step's noisy sums, split into the noise and the contributions of some candidates.

    Attributes:
        noise: the sums minus all contributions [m], float64.
        requested: ids of the candidates whose contributions were requested.
        participants: ids of the participants among them, sorted.
        rows: contributions of these participants [n, m], as subtracted.
    """

    noise: Tensor
    requested: Tensor
    participants: Tensor
    rows: Tensor

    @property
    def size(self) -> int:
        """The number of cached entries."""
        return self.noise.numel() + self.rows.numel()


def joined_by(step: Step, sampling: Sampling, size: int, key: int) -> Int[Tensor, " b"]:
    """Returns the positions of the participants in a step, or in a one-off release, which covers all records.

    Args:
        step: from the transcript.
        sampling: the sampler of the run's steps.
        size: number of training examples.
        key: key of the sampler.
    """
    return torch.arange(size) if step.one_off is not None else sampling.indices(step.step, size, key)


@dataclass(frozen=True)
class Remainders:
    """The remainders of a run's steps.

    Attributes:
        run: trained with observer="updates".
        private: the training data, in the trainer's order: the sampler returns positions in it.
        sampling: the sampler of the run.
        loss: per-example loss.
        kept: `Step.key` -> its split sums, shared by all readers: each entry costs the gradients of a whole batch.
        latest: the last step that did not fit into `kept`, for attacks that read its candidates slice by slice.
    """

    run: Run
    private: Examples
    sampling: Sampling
    loss: Loss
    kept: dict[int, ResidualNoise]
    latest: dict[int, ResidualNoise] = field(default_factory=dict)

    def noise(self, step: Step) -> Float[Tensor, " m"]:
        """Returns the noise of a step: its noisy sums minus all contributions, in float64."""
        nobody = self.private.ids.new_empty(0)
        return self._split_sums(step, nobody, nobody)[0]

    def without_others(
        self, step: Step, candidates: Int[Tensor, " n"], part: slice = slice(None)
    ) -> Float[Tensor, "part m"]:
        """Returns the noisy sums minus all other contributions: noise, plus the candidate's own if it took part.

        Args:
            step: with its plan and noisy blocks.
            candidates: ids of all candidates that will be read.
            part: slice of them to return now.
        """
        ids = candidates[part]
        refuse_too_many(len(ids), self.run.transcript.layout.dim, width=8)
        noise, own = self._split_sums(step, ids, candidates)
        # In place, because `own` is a new tensor at every call; `noise` is cached in `kept`, which other cells read.
        return own.add_(noise)

    def _split_sums(self, step: Step, requested: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a step's noisy sums minus all contributions [m], and the contributions of `requested` to it [n, m].

        Rows are computed from the private data, because an attack may have changed its own copy. The results are in
        float64: noise drawn in float32 reveals members by the last digits of a release, and a remainder rounded to
        float32 would hide this leak from the audit.
        """
        remainder = self.kept.get(step.key)
        if remainder is None or not torch.isin(requested, remainder.requested).all():
            remainder = self.latest.get(step.key)
        if remainder is None or not torch.isin(requested, remainder.requested).all():
            # Rows for all candidates at once, because each call takes a pass over the batch; unless they are too many.
            remainder = self._split_anew(step, candidates if self._few(step, candidates) else requested)
            others = sum(step_remainder.size for number, step_remainder in self.kept.items() if number != step.key)
            # The earliest entries stay: attacks read all steps in order, so evicting the oldest would never hit.
            if others + remainder.size <= _KEPT:
                self.kept[step.key] = remainder
            else:
                self.latest.clear()
                self.latest[step.key] = remainder
        # A candidate that took no part contributed 0.
        own = remainder.noise.new_zeros(len(requested), len(remainder.noise))
        joined = torch.isin(requested, remainder.participants)
        own[joined] = remainder.rows[torch.searchsorted(remainder.participants, requested[joined])].double()
        return remainder.noise, own

    def _few(self, step: Step, candidates: Tensor) -> bool:
        """True if the rows of all participating candidates fit into memory."""
        joined = torch.isin(candidates, self.private.ids[self._took_part(step)])
        return int(joined.sum()) * self.run.transcript.layout.dim <= ROWS

    def _took_part(self, step: Step) -> Int[Tensor, " b"]:
        # Drawn again: a batch is a pure function of step and key, and no transcript holds it.
        joined = joined_by(step, self.sampling, len(self.private), self.run.sampler_key)
        return joined.to(self.private.inputs.device)

    def _split_anew(self, step: Step, requested: Tensor) -> ResidualNoise:
        """Splits a step's noisy sums into the noise and the rows of the ids `requested`.

        All rows of the step are computed, even if few are returned: the last digits of a row depend on the rows in the
        same batch, and only the exact row that was subtracted leaves no trace when it is added back.
        """
        private, layout = self.private, self.run.transcript.layout
        observed = Observed(step, self.run.model, layout, self.loss, self.run.views_behind(step))
        took_part = self._took_part(step)
        total = observed.sums.new_zeros(observed.sums.shape, dtype=torch.float64)
        joined, rows = [private.ids.new_empty(0)], [observed.sums.new_zeros(0, observed.sums.numel())]
        for part in took_part.split(max(1, ROWS // layout.dim)) if len(took_part) else ():
            contributed = observed.contributions(private.inputs[part], private.labels[part])
            total += contributed.sum(dim=0, dtype=torch.float64)
            is_requested = torch.isin(private.ids[part], requested)
            joined.append(private.ids[part][is_requested])
            rows.append(contributed[is_requested])
        # Sorted, for the binary searches of `_split_sums`.
        ids, order = torch.cat(joined).sort()
        return ResidualNoise(observed.sums.double() - total, requested, ids, torch.cat(rows)[order])
