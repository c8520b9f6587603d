"""Recomputed steps of a run: their noise, and the statistics that an informed adversary's score needs.

The remainder of a step for a candidate is the noise, plus its own contribution if it took part. A single direction, the
noise, therefore serves all candidates: per block, the inner product of each contribution with it, and squared norms,
for the cost of a forward and a backward pass and without forming any contribution. The auditor uses its own engine,
checked against the reference, instead of the engine of the run: an error of the run's engine then stays in the
remainder.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakbench.attacks.core import Examples, MatchedFilter
from leakbench.defenses.core import Engine, Loss, Run, Sampling, Step

from .residual_noise import joined_by

_AT_ONCE = 1024  # examples whose views are in memory at a time
_KEPT = 2**29  # bytes of noise cached for other cells of a run
_DIGITS = 24  # binary digits of the largest inner products, those of float32
_DEVIATIONS = 8  # noise standard deviations; a product exceeds them with probability 10^-15


class StepReplay:
    """The auditor's recomputation of a run's steps, shared by the cells that read them."""

    def __init__(self, run: Run, private: Examples, sampling: Sampling, loss: Loss) -> None:
        """Stores the auditor's knowledge; computes nothing.

        Args:
            run: trained with observer="updates".
            private: the training data, in the trainer's order.
            sampling: the sampler of the run.
            loss: per-example loss.
        """
        self._run, self._private, self._sampling, self._loss = run, private, sampling, loss
        self._engine: Engine | None = None
        self._noises: dict[int, Tensor] = {}

    def noise(self, step: Step) -> tuple[Float[Tensor, " _"], ...]:
        """Returns each block's noisy sums minus all contributions, rounded to the dtype of the sums."""
        assert step.plan is not None and step.noisy is not None  # noqa: S101  by `Observed`, which was made before
        sizes = [noisy.numel() for noisy in step.noisy]
        if (noise := self._noises.get(step.key)) is None:
            engine, plan, batch = self._at(step), step.plan.plan, self._took_part(step)
            residuals = [noisy.double() for noisy in step.noisy]
            for part in batch.split(_AT_ONCE) if len(batch) else ():
                inputs, labels, views = self._entries(step, self._private.inputs[part], self._private.labels[part])
                for residual, total in zip(
                    residuals, engine.clipped_sums(plan, inputs, labels, views=views), strict=True
                ):
                    residual -= total
            noise = torch.cat(residuals).to(step.noisy[0].dtype)
            # The earliest entries stay: attacks read all steps in order, so evicting the oldest would never hit.
            if sum(kept.nbytes for kept in self._noises.values()) + noise.nbytes <= _KEPT:
                self._noises[step.key] = noise
        return noise.split(sizes)

    def matched_filter(self, step: Step, candidates: Examples) -> MatchedFilter:
        """Returns the statistics from which each candidate's likelihood ratio follows.

        Args:
            step: with its plan and noisy blocks.
            candidates: under the ids of the data set; not modifiable by any attack.
        """
        assert step.plan is not None  # noqa: S101  as in `noise`
        noise, stds, plan = [block_noise.double() for block_noise in self.noise(step)], step.plan.stds, step.plan.plan
        # The noise is whitened before the engine casts it to the gradients' dtype, whose range it may exceed.
        units = [1.0 if std == 0 else std for std in stds]
        directions = [values / unit for values, unit in zip(noise, units, strict=True)]
        engine, matched = self._at(step), []
        for start in range(0, len(candidates), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            inputs, labels, views = self._entries(step, candidates.inputs[part], candidates.labels[part])
            matched.append(engine.matched(plan, directions, inputs, labels, views=views))
        none = noise[0].new_zeros(0)
        joined = torch.isin(candidates.ids, self._private.ids[self._took_part(step)])
        inner = torch.zeros(len(candidates), dtype=torch.float64, device=none.device)
        squared_norms, missing, shown = inner.clone(), inner.clone(), inner.clone()
        for number, (block_noise, unit, std) in enumerate(zip(noise, units, stds, strict=True)):
            products = torch.cat([none, *(part[number][0] for part in matched)]) / unit
            squares = torch.cat([none, *(part[number][1] for part in matched)]) / unit**2
            if std == 0:
                # |r - v|^2: the remainder r of a participant is v plus the noise, so the difference is the noise alone.
                apart = torch.where(joined, 0.0, squares - 2 * products)
                missing, shown = missing + (block_noise.square().sum() + apart).clamp(min=0), shown + squares
            else:
                inner, squared_norms = inner + products + torch.where(joined, squares, 0.0), squared_norms + squares
        residuals = (missing / torch.where(shown > 0, shown, torch.nan)).sqrt()
        return MatchedFilter(inner=_rounded(inner, squared_norms), squared_norms=squared_norms, residuals=residuals)

    def _at(self, step: Step) -> Engine:
        """Returns the auditor's engine, at the parameters before a step."""
        if self._engine is None:
            # A copy, so that parameter writes do not reach the run. The expected batch is that of the steps, even if a
            # one-off release on all records is replayed first.
            model, expected = copy.deepcopy(self._run.model), self._run.transcript.steps[0].expected_batch
            on_cuda = next(model.parameters()).is_cuda
            precision = self._run.precision if on_cuda or self._run.precision != "tf32" else None
            self._engine = Engine(model, loss=self._loss, expected_batch=expected, precision=precision)
        with torch.no_grad():
            self._run.transcript.layout.write(self._engine.model, step.parameters)
        return self._engine

    def _took_part(self, step: Step) -> Int[Tensor, " b"]:
        """Returns the positions of a step's participants, drawn again by the sampler's key; no transcript has them."""
        drawn = joined_by(step, self._sampling, len(self._private), self._run.sampler_key)
        return drawn.to(self._private.inputs.device)

    def _entries(self, step: Step, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
        """Returns the model inputs for these examples, with the views of an example adjacent, and the views' number."""
        views = self._run.views_behind(step)
        if views is None:
            return inputs, labels, 1
        shown = views(inputs, labels)
        return shown.transpose(0, 1).flatten(0, 1), labels.repeat_interleave(len(shown), dim=0), len(shown)


def _rounded(values: Float[Tensor, " n"], squared_norms: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Rounds inner products to a last place that depends only on their squared norms.

    An inner product is <v, noise> for a non-participant and <v, noise> + |v|^2 for a participant, and <v, noise> may be
    computed in float32. A value with the few digits of float32 would reveal a non-participant, and a value that has few
    digits once |v|^2 is subtracted a participant, at any noise scale. All values are therefore rounded to the last
    place of the largest product that the noise makes.
    """
    # For whitened noise, the product of a contribution v with it has standard deviation |v|.
    largest = torch.maximum(squared_norms, _DEVIATIONS * squared_norms.sqrt())
    last = torch.ldexp(torch.ones_like(values), torch.frexp(largest).exponent - _DIGITS)
    return torch.where(squared_norms > 0, (values / last).round() * last, values)
