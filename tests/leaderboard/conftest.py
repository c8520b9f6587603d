"""Builders of records in code; no other package takes part."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from leakbench.leaderboard.kinds import KINDS
from leakbench.leaderboard.records.folder import Completeness
from leakbench.leaderboard.records.manifest import Expected, Manifest
from leakbench.leaderboard.records.record import MethodUsed, Metric, Provenance, Record, RecordedClaim


def metric(value: float | None, half: float | None = None, **fields: Any) -> Metric:
    """A metric with the interval value +- half."""
    ends = {} if half is None or value is None else {"low": value - half, "high": value + half}
    return Metric(value=value, **{"better": "lower", **ends, **fields})


def provenance(**fields: Any) -> Provenance:
    """Of a wheel."""
    return Provenance(**{"version": "0.1.0", "source": "0" * 64, "versions": {"torch": "2.14.1"}, **fields})


def asked_for(*records: Record, **fields: Any) -> Manifest:
    """The request that these records answer."""
    cells = tuple(
        Expected(
            id=r.id,
            kind=r.kind,
            control=r.control,
            defense=r.defense,
            attack=r.attack,
            budget=r.budget,
            training={} if KINDS[r.kind].own_task else r.task,
            noise=r.task["noise"] if KINDS[r.kind].variants else None,
            seed=r.seed,
        )
        for r in records
    )
    return Manifest(**{"suite": "quick", "suite_digest": "d" * 64, "command": RUN, "cells": cells, **fields})


def complete(*records: Record) -> Completeness:
    """What a folder with these records and their manifest is held against."""
    return Completeness((asked_for(*records),))


RUN = ("leakbench", "run", "quick")


METRICS = {
    "utility": {"accuracy": metric(0.9, 0.02, better="higher")},
    "membership": {"auc": metric(0.7, 0.05), "tpr_at_1pct_fpr": metric(0.05, 0.02)},
    "reconstruction": {"psnr": metric(20.0, 1.0), "psnr_floor": metric(11.0)},
}


@cache
def stated() -> tuple[RecordedClaim, Provenance]:
    """Fields of most records, made once: they are frozen, and some tests make hundreds of records."""
    return claim(), provenance()


def record(kind: str = "membership", **fields: Any) -> Record:
    """A valid record; its id follows from its fields."""
    share = {"data": "photos", "model": "convnet", "batch": 1, "step": 2, "noise": "none"}
    filled: dict[str, Any] = {
        "suite": "quick",
        "suite_digest": "d1",
        "kind": kind,
        "defense": "dp_sgd",
        "attack": None if not KINDS[kind].attacked else "likelihood_ratio",
        "task": share if KINDS[kind].own_task else {"data": "digits", "model": "mlp", "batch": 64},
        "budget": {"epsilon": 3.0, "delta": 1e-5},
        "claim": stated()[0],
        "noise_multiplier": 1.5,
        "noise": "seeded",
        "metrics": dict(METRICS.get(kind, {})),
        "seed": 0,
        "device": "cpu",
        "provenance": stated()[1],
        "seconds": 1.0,
        **fields,
    }
    for role in ("defense", "attack"):
        if isinstance(filled[role], str):
            filled[role] = MethodUsed(name=filled[role], settings=filled.pop(f"{role}_settings", {}))
    if filled.get("status", "ok") != "ok":
        filled["metrics"] = {}
    identifier = hashlib.sha256(json.dumps(filled, default=repr, sort_keys=True).encode()).hexdigest()[:16]
    return Record(**{"id": identifier, **filled})


def claim(epsilon: float | None = 3.0, **fields: Any) -> RecordedClaim:
    """A claim under Poisson sampling; infinite for None."""
    return RecordedClaim(
        **{
            "epsilon": epsilon,
            "delta": 1e-5,
            "relation": "add_remove",
            "sampling": "poisson",
            "accountant": "PLD",
            "reason": None if epsilon is not None else "no noise is added",
            **fields,
        }
    )


@pytest.fixture(name="record")
def _record() -> Callable[..., Record]:
    return record


@pytest.fixture(name="metric")
def _metric() -> Callable[..., Metric]:
    return metric


@pytest.fixture(name="claim")
def _claim() -> Callable[..., RecordedClaim]:
    return claim
