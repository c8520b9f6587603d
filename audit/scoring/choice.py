"""Score of a choice: the candidate that an attacker picks as the record behind an update.

The truth is among the candidates, so a right choice is an exact copy of it, and a wrong choice is another record's
image. PSNR and similar metrics of either are not comparable with those of reconstructed images and are not given. The
metric is the success rate, compared with 1/n without the update and `rero_bound` with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from leakbench.attacks.core import Reconstruction
from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.record import Metric, Record

from .images import ImageValues, absent, share_metric

PICKED = "the image was picked among candidates of which it is one: no picture was found"
"""Reason why a choice has no picture metrics."""

_FAILED = "the attack failed: it reached no finite objective, so that it chose nobody"


@dataclass(frozen=True, kw_only=True)
class Pick:
    """The pick of an attacker who chooses among candidates, on one target.

    Attributes:
        candidates: number of candidates.
        sought: position of the truth among them.
        picked: position of the candidate nearest to the result; None if the attack failed, or for a tie.
    """

    candidates: int
    sought: int
    picked: int | None

    @property
    def right(self) -> bool:
        """True if the truth was picked."""
        return self.picked == self.sought


def chosen(result: Reconstruction, prior: Float[Tensor, "n *shape"], sought: int) -> Pick:
    """Returns the candidate nearest to the attack's only reconstruction, which need not be an exact copy of one.

    Args:
        result: the attack's result, checked.
        prior: the candidates, the auditor's own copy.
        sought: position of the truth among them.

    Raises:
        ValueError: several inputs were returned, among which only the truth could choose, or an input of another shape.
    """
    if len(result.inputs) != 1 or result.inputs.shape[1:] != prior.shape[1:]:
        raise ValueError(
            f"inputs must be one of the candidates, [1, *{list(prior.shape[1:])}], got {list(result.inputs.shape)}"
        )
    picked = None
    if result.status != "failed":
        apart = _apart(prior, result.inputs[0])
        nearest = (apart == apart.min()).nonzero()[:, 0]
        picked = int(nearest[0]) if len(nearest) == 1 else None
    return Pick(candidates=len(prior), sought=sought, picked=picked)


def place_of(truth: Float[Tensor, "*shape"], prior: Float[Tensor, "n *shape"]) -> int:
    """Returns the position of the truth among the candidates.

    Raises:
        ValueError: it is missing, or there twice.
    """
    places = (_apart(prior, truth) == 0).nonzero()[:, 0]
    if len(places) != 1:
        raise ValueError(f"prior must hold the first of the inputs once, got it {len(places)} times")
    return int(places[0])


def compare_choice(choice: Pick, result: Reconstruction) -> dict[str, ImageValues]:
    """Returns the metrics of a target; picture metrics are not measured, with the reason.

    Args:
        choice: see `chosen`.
        result: the result that it follows from.
    """
    absent_metrics = {
        name: absent(1, PICKED)
        for name, metric in METRICS.items()
        # These two follow from the others, and from the ledger.
        if metric.kind == "reconstruction" and name not in ("leak", "rero_bound")
    }
    if result.status == "failed":
        return absent_metrics | {name: absent(1, _FAILED) for name in ("prior_success", "objective")}
    kappa = 1 / choice.candidates
    return absent_metrics | {
        "prior_success": ImageValues(
            n=1, values=np.array([float(choice.right)]), detail={"kappa": kappa, "candidates": choice.candidates}
        ),
        "objective": ImageValues(
            n=1, values=np.array([result.objective]), reason="one number, by the attack's measure"
        ),
    }


def _apart(prior: Tensor, image: Tensor) -> Tensor:
    return (prior.detach().cpu().double() - image.detach().cpu().double()).square().flatten(1).sum(dim=1)


def choices_again(record: Record, table: Any) -> dict[str, Metric]:
    """Recomputes, for `--verify`, how often the sought record was picked."""
    if "failed" in record.flags:  # of at least one target: then there is no overall rate to compare
        return {}
    right = table["picked"].to_numpy() == table["sought"].to_numpy()
    return {"prior_success": share_metric([np.array([float(hit)]) for hit in right])}
