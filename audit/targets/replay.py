"""Steps of a run computed once more by the auditor: their noise, and what an informed adversary's score needs of them.

What is left of a step for a candidate is the noise, and its own contribution if it took part. So one direction, the
noise, serves all candidates: per block the inner product of each contribution with it, and squared norms, at the price
of a forward and a backward pass, and no contribution is formed. The engine is one of the auditor's own, checked against
the reference, and not the one that the run was trained with: an error of that one stays in what is left over.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakbench.attacks.core import Examples, MatchedFilter
from leakbench.defenses.core import Engine, Loss, Run, Sampling, Step

from .residual_noise import joined_by

_AT_ONCE = 1024  # examples whose views exist at a time
_KEPT = 2**29  # bytes of noise that are kept for other cells of a run
_DIGITS = 24  # binary digits of the largest inner products, those of float32
_DEVIATIONS = 8  # of noise: a product beyond them comes once in 10^15 times


class StepReplay:
    """The auditor's second look at steps of a run, shared by the cells that ask about it."""

    def __init__(self, run: Run, private: Examples, sampling: Sampling, loss: Loss) -> None:
        """Keeps what the auditor knows; computes nothing.

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
        """The noisy sums of each block less everybody's contribution, rounded to their dtype, as the sums were."""
        assert step.plan is not None and step.noisy is not None  # noqa: S101  by `Observed`, which was made before
        sizes = [noisy.numel() for noisy in step.noisy]
        if (found := self._noises.get(step.key)) is None:
            engine, plan, taken = self._at(step), step.plan.plan, self._took_part(step)
            left = [noisy.double() for noisy in step.noisy]
            for part in taken.split(_AT_ONCE) if len(taken) else ():
                inputs, labels, views = self._entries(step, self._private.inputs[part], self._private.labels[part])
                for rest, total in zip(left, engine.clipped_sums(plan, inputs, labels, views=views), strict=True):
                    rest -= total
            found = torch.cat(left).to(step.noisy[0].dtype)
            # First come, first kept: attacks read all steps in order, and putting the oldest out would never hit.
            if sum(one.nbytes for one in self._noises.values()) + found.nbytes <= _KEPT:
                self._noises[step.key] = found
        return found.split(sizes)

    def matched_filter(self, step: Step, candidates: Examples) -> MatchedFilter:
        """What the likelihood ratio of each candidate needs.

        Args:
            step: with its plan and noisy blocks.
            candidates: under the ids of the data set, and no attack's to change.
        """
        assert step.plan is not None  # noqa: S101  as in `noise`
        noise, stds, plan = [left.double() for left in self.noise(step)], step.plan.stds, step.plan.plan
        # Whitened before they are cast to the dtype of the gradients: the scale of noise may be out of its range.
        units = [1.0 if std == 0 else std for std in stds]
        directions = [values / unit for values, unit in zip(noise, units, strict=True)]
        engine, found = self._at(step), []
        for start in range(0, len(candidates), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            inputs, labels, views = self._entries(step, candidates.inputs[part], candidates.labels[part])
            found.append(engine.matched(plan, directions, inputs, labels, views=views))
        none = noise[0].new_zeros(0)
        joined = torch.isin(candidates.ids, self._private.ids[self._took_part(step)])
        inner = torch.zeros(len(candidates), dtype=torch.float64, device=none.device)
        squared_norms, missing, shown = inner.clone(), inner.clone(), inner.clone()
        for number, (left, unit, std) in enumerate(zip(noise, units, stds, strict=True)):
            products = torch.cat([none, *(part[number][0] for part in found)]) / unit
            squares = torch.cat([none, *(part[number][1] for part in found)]) / unit**2
            if std == 0:
                # |r - v|: nothing is subtracted for who took part, because only the noise is left of its r.
                apart = torch.where(joined, 0.0, squares - 2 * products)
                missing, shown = missing + (left.square().sum() + apart).clamp(min=0), shown + squares
            else:
                inner, squared_norms = inner + products + torch.where(joined, squares, 0.0), squared_norms + squares
        residuals = (missing / torch.where(shown > 0, shown, torch.nan)).sqrt()
        return MatchedFilter(inner=_rounded(inner, squared_norms), squared_norms=squared_norms, residuals=residuals)

    def _at(self, step: Step) -> Engine:
        """The auditor's engine, at the parameters before a step."""
        if self._engine is None:
            # Of the auditor's own: what is written into the model must not reach the run.
            # Of the batches of the steps, also where a one-off release, of everybody, is looked at first.
            model, expected = copy.deepcopy(self._run.model), self._run.transcript.steps[0].expected_batch
            self._engine = Engine(model, loss=self._loss, expected_batch=expected)
        with torch.no_grad():
            self._run.transcript.layout.write(self._engine.model, step.parameters)
        return self._engine

    def _took_part(self, step: Step) -> Int[Tensor, " b"]:
        """Positions of those who joined a step: the trainer's own draw again, which no transcript holds."""
        drawn = joined_by(step, self._sampling, len(self._private), self._run.sampler_key)
        return drawn.to(self._private.inputs.device)

    def _entries(self, step: Step, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
        """What was shown to the model of these examples, views of one side by side; and how many views there are."""
        made = self._run.views_behind(step)
        if made is None:
            return inputs, labels, 1
        shown = made(inputs, labels)
        return shown.transpose(0, 1).flatten(0, 1), labels.repeat_interleave(len(shown), dim=0), len(shown)


def _rounded(values: Float[Tensor, " n"], squared_norms: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Inner products to the same last place for everybody, which their squared norms alone decide.

    Products may come in float32. One of few digits would be of somebody who took no part, and one that has few once the
    squared norm is taken off again of somebody who did, whatever the noise: where the two nearly cancel, their sum
    would show digits finer than any of the product. So all are rounded as coarsely as the largest product that noise
    makes.
    """
    # Given a contribution v, its product with the noise has the deviation |v|.
    largest = torch.maximum(squared_norms, _DEVIATIONS * squared_norms.sqrt())
    last = torch.ldexp(torch.ones_like(values), torch.frexp(largest).exponent - _DIGITS)
    return torch.where(squared_norms > 0, (values / last).round() * last, values)
