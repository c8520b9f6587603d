"""What attacks return. A scorer compares it with the truth; nothing here has seen the truth."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Inputs that an attacker believes to be in the batch.

    Attributes:
        inputs: [b, *input_shape], in model-input units, inside the box of valid inputs.
        labels: int64 [b], the labels assumed or recovered.
        objective: what the attack minimised, at `inputs`; smaller is a better match by the attacker's own
            measure.
        restarts: number of random starts of which this is the one with the smallest objective.
        history: [restarts, iterations], the mismatch over time, or None.
        status: `ok`; `degraded`: the attacker itself can tell that it found no match; `failed`: no finite
            objective, so `inputs` are only the start.
    """

    inputs: Tensor
    labels: Tensor
    objective: float
    restarts: int = 1
    history: Tensor | None = None
    status: Literal["ok", "degraded", "failed"] = "ok"

    def __post_init__(self) -> None:
        if self.inputs.ndim < 2 or not self.inputs.isfinite().all():
            raise ValueError(f"inputs must be finite, [batch, *input_shape], got shape {list(self.inputs.shape)}")
        if self.labels.shape != self.inputs.shape[:1] or self.labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be int64, one an input: got {self.labels.dtype} {list(self.labels.shape)} "
                f"for {len(self.inputs)} inputs"
            )
        if not math.isfinite(self.objective) and self.status != "failed":
            raise ValueError(f"objective must be finite unless the status is 'failed', got {self.objective}")
        if self.restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {self.restarts}")


@dataclass(frozen=True, kw_only=True)
class MembershipScores:
    """One score a candidate; larger: more likely a member.

    Attributes:
        ids: int64 [n], distinct.
        scores: float64 [n], finite.
        exact: the test is the most powerful one for what the attacker knows (Neyman-Pearson), so that its
            power may be held against the claimed epsilon.
        deterministic: the release decides membership without noise: scores are decisions, no epsilon bounds
            them.
        dependence: what scores of different candidates share: the randomness of one training run
            (`per_model`), or that of one step's noise (`per_step`). An interval over candidates alone is
            conditional on it.
    """

    ids: Tensor
    scores: Tensor
    exact: bool
    deterministic: bool = False
    dependence: Literal["per_model", "per_step"] = "per_model"

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.shape != self.scores.shape:
            raise ValueError(f"scores must be one an id, [n]: got {list(self.scores.shape)} for {list(self.ids.shape)}")
        if self.ids.unique().numel() != self.ids.numel():
            raise ValueError("ids must be distinct, got an id twice")
        if self.scores.dtype != torch.float64:
            raise ValueError(f"scores must be float64, got {self.scores.dtype}: rounding makes ties")
        if not self.scores.isfinite().all():
            raise ValueError("scores must be finite, got NaN or infinity")
