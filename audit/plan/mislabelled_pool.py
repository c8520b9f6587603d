"""Pools without the examples that serve, under another label, as canaries; they are taken from the non-members."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from leakbench.benchmarks.core import Split, Splits
from leakbench.defenses.core import keyed

from ..suite.task import Task
from .request import seed_of_data


def without_mislabelled(splits: Splits, task: Task) -> Splits:
    """Returns the pools without the examples that are canaries under another label, which are no longer non-members.

    Raises:
        ValueError: at least as many canaries as non-members.
    """
    table = task.canaries
    if table is None or table.kind != "mislabelled":
        return splits
    if table.number >= len(splits.non_member):
        raise ValueError(
            f"number of mislabelled canaries must be below {len(splits.non_member)}, the non-members that they are "
            f"taken from, got {table.number}"
        )
    _, unreserved = _reserved(splits, table.number)
    non_members = _subset(splits.non_member, unreserved)
    # Without a separate test set, the non-members stand in for it and shrink in the same way.
    same = splits.test is not None and torch.equal(splits.test.ids, splits.non_member.ids)
    digest = hashlib.sha256(f"{splits.digest} without {table.number} canaries".encode()).hexdigest()
    return replace(splits, non_member=non_members, test=non_members if same else splits.test, digest=digest)


def mislabelled_examples(splits: Splits, count: int) -> Split:
    """Returns the examples removed from a data set's own pools, with their labels.

    Args:
        splits: of the data set, unmodified.
        count: number of canaries.
    """
    return _subset(splits.non_member, _reserved(splits, count)[0])


def _reserved(splits: Splits, count: int) -> tuple[Tensor, Tensor]:
    """Returns positions of the non-members that are canaries, and of the others."""
    generator = keyed(seed_of_data(splits.digest, "mislabelled canaries"))
    order = torch.randperm(len(splits.non_member), generator=generator)
    return order[:count], order[count:].sort().values


def _subset(split: Split, places: Tensor) -> Split:
    places = places.to(split.ids.device)
    return Split(ids=split.ids[places], inputs=split.inputs[places], labels=split.labels[places])
