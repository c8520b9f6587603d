"""Gradient canaries in a transcript: records included in the training by fair coins, and scored by the releases.

Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX Security 2023 (gradient canaries);
Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023 (many canaries in one run).

A canary's score is the sum over steps of the log likelihood ratio of its clipped gradient, at the step's parameters,
against noise alone. The bound holds for any score that does not depend on the coins. Gradients of other examples along
a canary's gradient only weaken it. A canary whose input is zero except in an entry of its own, before a linear layer,
has weights that no other example moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from leakbench.attacks.core import subsampled
from leakbench.defenses.core import Loss, cross_entropy

from ...evidence.audit import audit_canaries
from ...evidence.estimate import EpsilonEstimate, Relation
from ...evidence.pairs import seed_of_split
from ...targets.observed_step import Observed
from ..files import read_tensors
from .format import TranscriptHeader, WatchedStep
from .view import executed, fitted

_LEAST = 20
_NUMBERS = 2**24
"""Most entries of canaries' gradients at a time: 64 MiB."""


@dataclass(frozen=True)
class GradientCanaries:
    """Records, and the coins that decided their inclusion in the training.

    Attributes:
        inputs: [m, *shape], as fed to the model.
        labels: int64 [m].
        included: bool [m], the outcomes of independent fair coins, drawn before the training.
    """

    inputs: Float[Tensor, "m ..."]
    labels: Int[Tensor, " m"]
    included: Bool[Tensor, " m"]

    def __post_init__(self) -> None:
        if not len(self.inputs) == len(self.labels) == len(self.included) >= _LEAST:
            raise ValueError(
                f"canaries must be at least {_LEAST}, with a label and a coin each, got {len(self.inputs)} inputs, "
                f"{len(self.labels)} labels and {len(self.included)} coins"
            )
        if self.labels.dtype != torch.int64 or not self.inputs.isfinite().all():
            raise ValueError(f"canaries must have int64 labels and finite inputs, got labels of {self.labels.dtype}")
        kept = int(self.included.sum())
        if kept in (0, len(self.included)):
            raise ValueError(f"coins of canaries must be fair, got {kept} of {len(self.included)} put in")

    def __len__(self) -> int:
        return len(self.labels)


def read_canaries(path: str | Path) -> GradientCanaries:
    """Reads safetensors with `inputs` (floats), `labels` (int64) and `included` (bool).

    Raises:
        FileRefused: as for any file of tensors.
        ValueError: other tensors than these, or invalid coins.
    """
    tensors = read_tensors(path).tensors
    if tensors.keys() - {"ids"} != {"inputs", "labels", "included"}:
        raise ValueError(f"{path} must hold inputs, labels and included, got {', '.join(sorted(tensors))}")
    if tensors["included"].dtype != torch.bool:
        raise ValueError(f"included of {path} must be bool, got {tensors['included'].dtype}")
    return GradientCanaries(tensors["inputs"].float(), tensors["labels"], tensors["included"])


class CanaryScores:
    """Scores of canaries, accumulated over steps."""

    def __init__(
        self,
        canaries: GradientCanaries,
        model: nn.Module,
        header: TranscriptHeader,
        *,
        sample_rate: float,
        loss: Loss = cross_entropy,
        device: torch.device | str = "cpu",
    ) -> None:
        """Matches the model's parameters with the transcript's.

        Args:
            canaries: canaries of the training; their coins are not read here.
            model: a model of the training's architecture.
            header: of the transcript.
            sample_rate: probability that a record is in a step's batch.
            loss: per-example, as in the training.
            device: for the computation of gradients.

        Raises:
            ValueError: the model does not fit.
        """
        self._inputs, self._labels = canaries.inputs.to(device), canaries.labels.to(device)
        self._header, self._rate, self._loss = header, sample_rate, loss
        self._layout, bare = fitted(header, model)
        self._model, self._device = bare.to(device), device
        self.scores = torch.zeros(len(canaries), dtype=torch.float64)

    def add(self, step: WatchedStep) -> None:
        """Adds a step to the scores.

        Raises:
            NotApplicable: canaries' contributions do not follow from the transcript.
        """
        if step.noise_std == 0:
            return
        completed = replace(
            step,
            released=step.released.to(self._device),
            parameters=None if step.parameters is None else step.parameters.to(self._device),
        )
        observation = Observed(executed(completed, self._header, self._rate), self._model, self._layout, self._loss)
        whitened = observation.sums.double() / step.noise_std**2
        at_once = max(1, _NUMBERS // self._layout.dim)
        scores = []
        for inputs, labels in zip(self._inputs.split(at_once), self._labels.split(at_once), strict=True):
            own = observation.contributions(inputs, labels).double()
            scores.append(own @ whitened - own.square().sum(1) / (2 * step.noise_std**2))
        self.scores += subsampled(torch.cat(scores), self._rate).cpu()

    def bound(
        self, included: Bool[Tensor, " m"], *, delta: float, relation: Relation, full: bool, level: float
    ) -> EpsilonEstimate:
        """Computes a lower bound on epsilon from guesses of the coins.

        A tenth of the canaries is guessed to be in and a tenth to be out, fixed here for all transcripts.

        Args:
            included: the coins.
            delta: of the claim.
            relation: neighbouring relation of inclusion and exclusion: `add_remove`.
            full: whether every record takes part in every step, so that a training is a composition of Gaussians.
            level: confidence.
        """
        tenth = max(1, len(self.scores) // 10)
        return audit_canaries(
            self.scores.numpy(),
            included.numpy(),
            method="one_run_f_dp" if full else "one_run",
            guesses=[(tenth, tenth)],
            delta=delta,
            level=level,
            relation=relation,
            seed=seed_of_split(np.arange(len(included)), included.numpy()),
        )
