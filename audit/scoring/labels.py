"""Metrics of label recovery: the fraction of a batch's labels recovered, and whether all of them were.

Labels are compared as multisets: a batch has no order, and a class may be in it several times. The baseline is a guess
by the class frequencies among public examples, which needs no update. Intervals are over target batches, each with a
separate update; labels within a batch are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from leakbench.leaderboard.records.record import Metric, Record

from ..evidence.claim_bounds import clopper_pearson

NOT_NAMED = -1
"""In arrays: an example without a recovered label."""


@dataclass(frozen=True)
class LabelledBatch:
    """A target batch: its recovered labels and its true ones.

    Attributes:
        named: recovered labels, in any order; at most as many as the batch has examples.
        labels: the ground truth.
        shares: frequency of each true label's class among public examples; None without any.
    """

    named: Tensor
    labels: Tensor
    shares: Tensor | None


def score_labels(batches: Sequence[LabelledBatch]) -> dict[str, Metric]:
    """Returns every metric of the labels recovered in one or more target batches.

    Args:
        batches: at least one, none empty.

    Returns:
        `label_overlap`, `label_exact` and `label_overlap_floor`, whose n counts batches.

    Raises:
        ValueError: no batch, an empty batch, or more labels than examples.
    """
    if not batches or any(len(batch.labels) == 0 for batch in batches):
        raise ValueError("batches must be one or more, of one or more examples each")
    if any(len(batch.named) > len(batch.labels) for batch in batches):
        raise ValueError("labels named must be at most as many as the batch has examples")
    shared = [_common(batch) / len(batch.labels) for batch in batches]
    exact = [share == 1.0 for share in shared]
    metrics = {"label_overlap": _mean(shared), "label_exact": _mean(exact)}
    floors = [_floor(batch) for batch in batches]
    known_floors = [floor for floor in floors if floor is not None]
    if len(known_floors) < len(floors):
        reason = "there are no public examples to guess from"
        return metrics | {"label_overlap_floor": Metric(value=None, n=len(floors), better="lower", reason=reason)}
    return metrics | {"label_overlap_floor": _mean(known_floors)}


def label_columns(batches: Sequence[LabelledBatch]) -> dict[str, Any]:
    """Returns columns of true and recovered labels, an example per row; the recovered ones sorted."""
    recovered: list[int] = []
    for batch in batches:
        named = sorted(int(label) for label in batch.named)
        recovered += [*named, *[NOT_NAMED] * (len(batch.labels) - len(named))]
    shares = [
        share
        for batch in batches
        for share in ([None] * len(batch.labels) if batch.shares is None else batch.shares.double().tolist())
    ]
    return {
        "target": [t for t, batch in enumerate(batches) for _ in batch.labels],
        "label": [int(label) for batch in batches for label in batch.labels],
        "named": recovered,
        "public_share": shares,
    }


def labels_again(table: pd.DataFrame) -> dict[str, Metric]:
    """Recomputes, for `--verify`, every metric from the columns of a record."""
    batches = []
    for _, group in table.groupby("target", sort=True):
        named = torch.from_numpy(group["named"].to_numpy().copy())
        shares = group["public_share"].to_numpy(dtype=np.float64, na_value=np.nan)
        batches.append(
            LabelledBatch(
                named=named[named != NOT_NAMED],
                labels=torch.from_numpy(group["label"].to_numpy().copy()),
                shares=None if np.isnan(shares).any() else torch.from_numpy(shares.copy()),
            )
        )
    return score_labels(batches)


def public_shares(labels: Tensor, public: Tensor | None, classes: int) -> Tensor | None:
    """Returns the frequency of each label's class among public labels; None without any."""
    if public is None or len(public) == 0:
        return None
    shares = torch.bincount(public.cpu(), minlength=classes).double() / len(public)
    return shares[labels.cpu()]


def _common(batch: LabelledBatch) -> int:
    most = 1 + int(max(batch.labels.max(), *batch.named.tolist(), 0))
    recovered, truth = (torch.bincount(labels.cpu(), minlength=most) for labels in (batch.named, batch.labels))
    return int(torch.minimum(recovered, truth).sum())


def _floor(batch: LabelledBatch) -> float | None:
    """Returns the overlap of the truth with counts proportional to the public class frequencies (may be fractional)."""
    if batch.shares is None:
        return None
    shares: Mapping[int, float] = dict(zip(batch.labels.tolist(), batch.shares.tolist(), strict=True))
    size = len(batch.labels)
    counts = torch.bincount(batch.labels.cpu())
    return sum(min(int(counts[label]), size * share) for label, share in shares.items()) / size


def _mean(values: Sequence[float]) -> Metric:
    # Numbers in [0, 1] vary at most as much as successes of the same mean, so the interval is never too narrow.
    low, high = clopper_pearson(sum(values), len(values))
    return Metric(value=sum(values) / len(values), low=low, high=high, n=len(values), better="lower")


def again(record: Record, table: pd.DataFrame) -> dict[str, Metric]:
    """Recomputes, for `--verify`, the metrics of a record from its arrays."""
    return labels_again(table)
