"""A trained model as a subject: its utility, attacks under each access, and checks of its privacy claim.

An attack gets a target from `observe`; `score` compares its result with the ground truth; only metrics and per-example
arrays are returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from ..catalog import methods as catalog
from ..plan.artifact import Artifacts
from ..plan.cells import Cell
from ..plan.threat_models import threat_model
from ..targets.observe import RunView
from .noise_check import noise_found
from .outcome import Finding, Outcome, finite_claim
from .trained_run import TrainedRun, watched

NOISE_TOLERANCE = 6.0
"""Largest accepted z-score of the measured noise; a standard normal exceeds it with probability 10^-9."""


class TrainedModel:
    """The subject of all cells that attack, or measure, the same training run."""

    def __init__(self, cells: tuple[Cell, ...], device: torch.device, artifacts: Artifacts | None = None) -> None:
        """Takes the cells of a run and loads its data; trains nothing yet."""
        attacks = [catalog.attack(name) for name in {c.request.attack.name for c in cells if c.request.attack}]
        rows = [threat_model(attack.kind, attack.requires.access) for attack in attacks]
        # Transcripts may take gigabytes: all steps are kept only if an attack of the job reads them.
        every_step = any(row is not None and row.reads == "every step" for row in rows)
        self.model = TrainedRun(cells[0].request.of_training(), device, every_step=every_step, artifacts=artifacts)

    def outcome(self, cell: Cell) -> Outcome:
        """Computes a cell; trains first unless an earlier cell did."""
        # The function of a kind of result has its name, in a module of that name, so no table lists the kinds.
        compute: Callable[[TrainedRun, Cell], Finding]
        compute = getattr(import_module(f".{cell.kind}", __package__), cell.kind)
        answer = compute(self.model, cell)
        # From the executed plans, not from the requested budget.
        claim = asdict(self.model.run.claim(self.model.request.budget.delta))
        flags = list(answer.flags)
        # Not an error: a diverged model has a utility, too.
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
            # Without canaries: the number inserted is the sum of inclusion bits that only scorers may see.
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
        """Returns flags for a budget that is overspent, and for noise other than claimed, found by the auditor.

        An attack's ROC curve refutes no claim: scores of candidates of the same run share its noise, and a lower bound
        on epsilon takes independent runs or canaries. The noise itself can be measured by an auditor with the data and
        the sampler's key: releases minus all contributions, for some of the steps and for every one-off release.
        """
        model = self.model
        claim = model.run.claim(model.request.budget.delta)
        if not math.isfinite(claim.epsilon):
            return []
        overspent = model.request.budget.overspent(claim)  # by the executed plans
        view = RunView(
            model.run,
            model.public_knowledge,
            model.trained_on,
            model.sampling[0],
            kept=model.residual_noise,
            replay=model.replay,
        )
        transcript, looked_at = model.run.transcript, watched(model.sampling[1])
        # A transcript for attacks on every step holds more steps than are checked: all would cost a second training.
        # Keys of `noise_checks` are suffixes of the flags.
        noise_checks = {"": noise_found(view, [step for step in transcript.steps if step.step in looked_at])}
        # One-off releases are tested separately: pooled with the coordinates of the steps, a single release without
        # noise would not be noticed.
        noise_checks |= {
            f"_in_one_off_{number}": noise_found(view, [one_off]) for number, one_off in enumerate(transcript.one_offs)
        }
        # Excess noise violates no claim; it is flagged below, because utility suffers from it.
        patterned = [where for where, (_, _, pattern) in noise_checks.items() if pattern > NOISE_TOLERANCE]
        violated = (
            overspent or patterned or any(deviations < -NOISE_TOLERANCE for _, deviations, _ in noise_checks.values())
        )
        flags = ["claim_violated"] if violated else []
        flags += [f"dependent_noise{where}" for where in patterned]
        # NaN also counts as wrong: it is not the claimed noise.
        wrong = {
            where: ratio
            for where, (ratio, deviations, _) in noise_checks.items()
            if not abs(deviations) <= NOISE_TOLERANCE
        }
        return [*flags, *(f"noise_{ratio:.2g}x_of_claimed{where}" for where, ratio in wrong.items())]
