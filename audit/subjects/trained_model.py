"""A trained model as a subject: its utility, attacks on it under each access, and whether the run refutes its claim.

An attack gets a target from `observe`, its result goes to `score` together with the truth, and only metrics and
per-example arrays leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from ..catalog import methods as catalog
from ..plan.artifact import Artifacts
from ..plan.cells import Cell
from ..plan.threat_models import threat_model
from ..scoring.utility import losses, score_utility
from ..targets.observe import RunView, logits_of
from .canaries import canaries
from .membership import membership
from .noise_check import noise_found
from .outcome import Finding, Outcome, column, finite_claim
from .trained_run import TrainedRun, watched

NOISE_TOLERANCE = 6.0
"""Standard deviations by which the noise found may differ from the noise claimed: one false alarm in 10^9 runs."""


def utility(model: TrainedRun, cell: Cell) -> Finding:
    """How useful the model is on held-out examples."""
    test = model.test
    logits = logits_of(model.run.model, test.inputs)
    columns = {
        "id": column(test.ids),
        "label": column(test.labels),
        "loss": column(losses(logits, test.labels)),
        # NaN sorts above every number, so that argmax would name a class: -1, which is no label, counts as wrong.
        "predicted": column(logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), -1)),
    }
    return Finding(score_utility(logits, test.labels) | {"successive_cosine": model.cosines.score()}, columns)


ANSWERS: dict[str, Callable[[TrainedRun, Cell], Finding]] = {
    "utility": utility,
    "membership": membership,
    "canaries": canaries,
}
"""Kind of result -> what computes it on a trained model."""


class TrainedModel:
    """The subject of all cells that attack, or measure, one training run."""

    def __init__(self, cells: tuple[Cell, ...], device: torch.device, artifacts: Artifacts | None = None) -> None:
        """Names the run that these cells share; nothing is computed before a cell asks."""
        attacks = [catalog.attack(name) for name in {c.request.attack.name for c in cells if c.request.attack}]
        rows = [threat_model(attack.kind, attack.requires.access) for attack in attacks]
        # Transcripts may take gigabytes: all steps are kept only where an attack of the job reads them.
        every_step = any(row is not None and row.reads == "every step" for row in rows)
        self.model = TrainedRun(cells[0].request.of_training(), device, every_step=every_step, artifacts=artifacts)

    def outcome(self, cell: Cell) -> Outcome:
        """Trains, unless that was done for an earlier cell, and computes one cell."""
        answer = ANSWERS[cell.kind](self.model, cell)
        # From the plans that were executed, and not from the budget that was asked for.
        claim = asdict(self.model.run.claim(self.model.request.budget.delta))
        flags = list(answer.flags)
        # Not an error: a model that its training destroyed has a utility, too.
        if any(not torch.isfinite(p).all() for p in self.model.run.model.parameters()):
            flags.append("diverged")
        if self.model.defense[1]:
            flags.append("noise_matched")
        if self.model.run.public_used and self.model.splits.in_distribution_public:
            flags.append("public_in_distribution")
        if self.model.request.training.pretrain is not None:
            flags.append("pretrained_on_public")
        if self.model.request.training.tuning_digest:
            flags.append("tuned_on_public")
        return Outcome(
            metrics=answer.metrics,
            task=self._resolved,
            claim=finite_claim(claim),
            noise_multiplier=self.model.defense[0].noise_multiplier,
            noise=self.model.run.noise,
            engine=self.model.run.engine,
            flags=[*flags, *self.model.run.remarks, *self._violations],
            arrays=answer.arrays,
        )

    @cached_property
    def _resolved(self) -> dict[str, Any]:
        sampling, steps = self.model.sampling
        splits = self.model.splits
        return {
            "digest": splits.digest,
            "private": len(self.model.members),
            # Without canaries: how many of them were put in is the sum of coins that only scorers know.
            "trained_on": len(self.model.uninserted),
            "non_member": len(splits.non_member),
            "public": len(splits.public),
            "tested_on": len(self.model.test),
            "input_shape": list(splits.input_shape),
            "public_in_distribution": splits.in_distribution_public,
            "steps": steps,
            "sample_rate": sampling.rate,
            "parameters": sum(p.numel() for p in self.model.run.model.parameters()),
        }

    @cached_property
    def _violations(self) -> list[str]:
        """Flags for what refutes a claim outright, found by the auditor, who holds the data and the sampler's key.

        An attack's ROC refutes no claim: scores of candidates of one run share its noise, and a lower bound on epsilon
        takes independent runs or canaries. The noise itself can be measured instead: releases less everybody's
        contribution, of some steps, and of every release beside them.
        """
        model = self.model
        claim = model.run.claim(model.request.budget.delta)
        if not math.isfinite(claim.epsilon):
            return []
        overspent = model.request.budget.overspent(claim)  # by the executed plans
        view = RunView(
            model.run, model.world, model.trained_on, model.sampling[0], kept=model.left_over, replay=model.replay
        )
        transcript, looked_at = model.run.transcript, watched(model.sampling[1])
        # A transcript for attacks on every step holds more than these; to look at all would cost a second training.
        # By how their flags end.
        found = {"": noise_found(view, [step for step in transcript.steps if step.step in looked_at])}
        # Each by itself: among the coordinates of all those steps too little noise in one release would not show.
        found |= {f"_in_one_off_{number}": noise_found(view, [one]) for number, one in enumerate(transcript.one_offs)}
        # Too much noise violates no claim; below, it is flagged all the same, because utility suffers from it.
        patterned = [where for where, (_, _, pattern) in found.items() if pattern > NOISE_TOLERANCE]
        violated = overspent or patterned or any(deviations < -NOISE_TOLERANCE for _, deviations, _ in found.values())
        flags = ["claim_violated"] if violated else []
        flags += [f"dependent_noise{where}" for where in patterned]
        # What is no number is no noise that was claimed.
        wrong = {
            where: ratio for where, (ratio, deviations, _) in found.items() if not abs(deviations) <= NOISE_TOLERANCE
        }
        return [*flags, *(f"noise_{ratio:.2g}x_of_claimed{where}" for where, ratio in wrong.items())]
