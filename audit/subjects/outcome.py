"""Outcome of a cell before it becomes a record, and functions on pools of examples that several subjects use."""

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
from ..targets.observe import PublicKnowledge


@dataclass
class Outcome:
    """The result of a cell, or the reason why there is none.

    Attributes:
        metrics: by name.
        task: values that follow from the data: sizes, rates, digests; stored in the record beside the request.
        claim: privacy claim of the run, as fields of a record's claim.
        noise_multiplier: of the run.
        noise: source of the noise.
        engine: method that computed the clipped sums.
        flags: remarks for the board.
        arrays: per-example columns.
        seconds: wall clock; time shared by the cells of a job is counted in the first of them.
        skipped: reason why it was not run; empty if it was.
        error: message of the exception that ended it; empty without an exception.
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
    """Returns epsilon in record form: None if infinite, because JSON has no infinity."""
    return epsilon if math.isfinite(epsilon) else None


def finite_claim(claim: dict[str, Any]) -> dict[str, Any]:
    """Returns a claim in record form: an infinite epsilon becomes None with its reason."""
    # A record stores the events as words, so the structured form is dropped.
    return {key: value for key, value in claim.items() if key != "gaussians"} | {
        "epsilon": finite(claim["epsilon"]),
        "epsilon_rdp": finite(claim["epsilon_rdp"]),
        "reason": claim["reason"] or None,
    }


def public_knowledge_of(splits: Splits, device: torch.device) -> PublicKnowledge:
    """Returns the public knowledge about a data set, including its public examples."""
    return PublicKnowledge(
        input_shape=splits.input_shape,
        classes=splits.classes,
        low=splits.low,
        high=splits.high,
        population=population_of(splits, device),
    )


def population_of(splits: Splits, device: torch.device) -> Examples | None:
    """Returns the public examples; None if there are none."""
    return examples_of(splits.public, device) if len(splits.public) else None


def examples_of(split: Split, device: torch.device, limit: int | None = None) -> Examples:
    """Returns the first `limit` examples of a pool, on the device."""
    # Sliced first, so that no other example is moved.
    ids, inputs, labels = (values[:limit].to(device) for values in (split.ids, split.inputs, split.labels))
    return Examples(ids=ids, inputs=inputs, labels=labels)


def pick(examples: Examples, chosen: Tensor) -> Examples:
    """Returns the examples at the given positions."""
    chosen = chosen.to(examples.ids.device)
    return Examples(ids=examples.ids[chosen], inputs=examples.inputs[chosen], labels=examples.labels[chosen])


def join(a: Examples, b: Examples) -> Examples:
    """Concatenates two sets of examples."""
    return Examples(
        ids=torch.cat([a.ids, b.ids]),
        inputs=torch.cat([a.inputs, b.inputs]),
        labels=torch.cat([a.labels, b.labels]),
    )


def candidate_pools(splits: Splits, limit: int | None, device: torch.device) -> tuple[Examples, Examples]:
    """Draws candidates, half of them members, seeded by the splits alone: the same for every defense and attack.

    Args:
        splits: data splits with both pools.
        limit: largest number of either; None for as many as possible.
        device: device of the result.

    Raises:
        ValueError: there are no non-members.
    """
    members, outside = examples_of(splits.private, device), examples_of(splits.non_member, device)
    if not len(outside):
        raise ValueError("membership needs non-members, and the sizes of this task leave none")
    count = min(limit or len(members), len(members), len(outside))
    generator = keyed(seed_of_data(splits.digest, "candidates"))
    # Prefixes of permutations of the whole pools, so that smaller selections are subsets of larger ones.
    inside = pick(members, torch.randperm(len(members), generator=generator)[:count])
    return inside, pick(outside, torch.randperm(len(outside), generator=generator)[:count])


def column(values: Tensor) -> np.ndarray:
    """Returns a tensor as a column of a per-example table: an array on the CPU."""
    return values.detach().cpu().numpy()
