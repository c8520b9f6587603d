"""Outcome of a cell before it becomes a record, and small functions on pools of examples that subjects share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from leakbench.attacks.core import Examples
from leakbench.benchmarks.core import Split, Splits
from leakbench.defenses.core import keyed
from leakbench.leaderboard.records.record import Metric

from ..plan.request import seed_of_data
from ..targets.observe import World


@dataclass
class Outcome:
    """What was computed for one cell, or why nothing was.

    Attributes:
        metrics: by name.
        task: what the data decided: sizes, rates, digests; a record has it beside what was asked for.
        claim: of the run, as fields of a record's claim.
        noise_multiplier: of the run.
        noise: where its noise came from.
        engine: how sums were computed.
        flags: remarks for the board.
        arrays: per-example columns.
        seconds: wall clock; what cells of a job share is counted in the first of them.
        skipped: why it was not run; empty where it was.
        error: the sentence of the exception that ended it; empty where there was none.
    """

    metrics: dict[str, Metric] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    claim: dict[str, Any] | None = None
    noise_multiplier: float | None = None
    noise: Literal["none", "seeded", "os", "secure"] = "none"
    engine: str | None = None
    flags: list[str] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    skipped: str = ""
    error: str = ""


@dataclass(frozen=True)
class Finding:
    """The part of an outcome that depends on the kind of result.

    Attributes:
        metrics: by name.
        arrays: per-example columns.
        flags: remarks for the board.
    """

    metrics: dict[str, Metric]
    arrays: dict[str, Any]
    flags: tuple[str, ...] = ()


def finite(epsilon: float) -> float | None:
    """Epsilon as records have it: None where it is infinite, which JSON cannot write."""
    return epsilon if math.isfinite(epsilon) else None


def finite_claim(claim: dict[str, Any]) -> dict[str, Any]:
    """A claim as a record has it: an infinite epsilon is None with its reason."""
    # Of the events a record has the words.
    return {key: value for key, value in claim.items() if key != "gaussians"} | {
        "epsilon": finite(claim["epsilon"]),
        "epsilon_rdp": finite(claim["epsilon_rdp"]),
        "reason": claim["reason"] or None,
    }


def world_of(splits: Splits, device: torch.device) -> World:
    """The `World` of a data set: what everybody knows about it, its public examples included."""
    return World(
        input_shape=splits.input_shape,
        classes=splits.classes,
        low=splits.low,
        high=splits.high,
        population=population_of(splits, device),
    )


def population_of(splits: Splits, device: torch.device) -> Examples | None:
    """The public examples; None where there are none."""
    return examples_of(splits.public, device) if len(splits.public) else None


def examples_of(split: Split, device: torch.device, limit: int | None = None) -> Examples:
    """A pool on the device, its first `limit` examples only."""
    # Sliced first, so that only these are moved.
    ids, inputs, labels = (values[:limit].to(device) for values in (split.ids, split.inputs, split.labels))
    return Examples(ids=ids, inputs=inputs, labels=labels)


def pick(examples: Examples, chosen: Tensor) -> Examples:
    """Some of the examples, by position."""
    chosen = chosen.to(examples.ids.device)
    return Examples(ids=examples.ids[chosen], inputs=examples.inputs[chosen], labels=examples.labels[chosen])


def join(a: Examples, b: Examples) -> Examples:
    """Both, one after the other."""
    return Examples(
        ids=torch.cat([a.ids, b.ids]),
        inputs=torch.cat([a.inputs, b.inputs]),
        labels=torch.cat([a.labels, b.labels]),
    )


def asked_pools(splits: Splits, limit: int | None, device: torch.device) -> tuple[Examples, Examples]:
    """As many members as non-members, drawn by the digest of the splits alone: the same for every defense and attack.

    Args:
        splits: whose pools they are of.
        limit: most of each; as many as there are where None.
        device: where they are wanted.

    Raises:
        ValueError: there are no non-members.
    """
    members, outside = examples_of(splits.private, device), examples_of(splits.non_member, device)
    if not len(outside):
        raise ValueError("membership needs non-members, and the sizes of this task leave none")
    count = min(limit or len(members), len(members), len(outside))
    coins = keyed(seed_of_data(splits.digest, "candidates"))
    # Prefixes of permutations of the whole pools: fewer candidates are a part of more.
    inside = pick(members, torch.randperm(len(members), generator=coins)[:count])
    return inside, pick(outside, torch.randperm(len(outside), generator=coins)[:count])


def column(values: Tensor) -> np.ndarray:
    """A tensor as a column of a per-example table: an array on the CPU."""
    return values.detach().cpu().numpy()
