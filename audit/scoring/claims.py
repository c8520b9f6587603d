"""Claims held against what they follow from: the steps and the noise of their record, and the budget of its request.

A seal is no signature: whoever edits an epsilon can seal the file again, but cannot make it follow.
"""

from __future__ import annotations

import json
import math
from functools import cache

from defenses.core import Account, Defense, FeatureStatistics, Ledger, Sampling, full, partition, predict, rehearsed
from leaderboard.kinds import KINDS
from leaderboard.records.record import Record

from ..catalog import methods as catalog
from ..subjects.local_steps import LocalTraining

_OTHER_VERSIONS = 1e-3
"""Relative: by how much accountants of two versions may differ."""
_SPENT = 0.9  # of a budget's epsilon, at least: its noise is calibrated to all of it


def unproved_claim(
    record: Record,
    sampling: Sampling,
    steps: int,
    statistics: FeatureStatistics | None,
    *,
    tolerance: float = 1e-6,
) -> str:
    """Why a finite claim does not follow from these steps; empty where it does.

    Args:
        record: with a noise multiplier and a defense that is in the catalogue or a path that may be executed.
        sampling: of the steps.
        steps: number of them.
        statistics: released before the first; None for none.
        tolerance: relative, of epsilon.
    """
    claim = record.claim
    if claim is None or claim.epsilon is None or record.noise_multiplier is None:
        return ""
    proved = _of_a_run(_defense(record), record.noise_multiplier, sampling, steps, claim.delta, statistics)
    return _too_small(claim.epsilon, proved, tolerance)


def unproved_share(record: Record, *, tolerance: float = 1e-6) -> str:
    """Why a finite claim does not follow from the steps that its client shares; empty where it does.

    Args:
        record: of a shared update, with a defense that is in the catalogue or a path that may be executed.
        tolerance: relative, of epsilon.

    Raises:
        KeyError, TypeError, ValueError: for a task that tells no steps.
    """
    claim, task = record.claim, record.task
    if claim is None or claim.epsilon is None or record.noise_multiplier is None:
        return ""
    first, planned, batch = task["step"], task["steps"], task["batch"]
    local = None if task.get("local") is None else LocalTraining(**task["local"])
    taken, of_an_epoch = (1, 1) if local is None else (local.steps(batch), local.steps_per_epoch(batch))
    shared = range(first, first + taken)
    planned = shared.stop if planned is None else planned
    proved = _of_a_share(_defense(record), record.noise_multiplier, shared, planned, of_an_epoch, claim.delta)
    return _too_small(claim.epsilon, proved, tolerance)


def _defense(record: Record) -> str:
    """A record's defense as text, which a cache can hash: accounting takes seconds, and cells ask alike."""
    return json.dumps(json.loads(record.to_json())["defense"], sort_keys=True)


def _too_small(epsilon: float, proved: float, tolerance: float) -> str:
    # A larger epsilon than what the steps prove is true, too: it claims less.
    if epsilon < proved * (1 - tolerance):
        words = f"{proved:.4g}" if math.isfinite(proved) else "none"
        return f"its epsilon {epsilon:.4g} does not follow from its steps, which prove {words}"
    return ""


def claim_fault(record: Record) -> str:
    """Why a finite claim does not follow from what its record says of steps, noise and budget; empty where it does.

    Nothing is said of a defense that is given by its path, which would be executed.

    Args:
        record: with status "ok".
    """
    claim, task, budget = record.claim, record.task, record.budget
    if claim is None or claim.epsilon is None or record.defense.name not in catalog.names("defenses"):
        return ""
    if "delta" in budget and claim.delta != budget["delta"]:
        return f"its delta {claim.delta:g} is not that of its budget, {budget['delta']:g}"
    if record.noise_multiplier is None:
        return f"its epsilon is {claim.epsilon:.4g}, and it names no noise multiplier that it follows from"
    try:
        if KINDS[record.kind].own_task:
            return unproved_share(record, tolerance=_OTHER_VERSIONS)
        most = task.get("largest_batch")
        capped = {} if most is None else {"most": min(most, task["trained_on"]), "examples": task["trained_on"]}
        sampling = Sampling(task["sampling"], task["sample_rate"], groups=task.get("groups", 1), **capped)
        statistics = None if task.get("statistics") is None else FeatureStatistics(**task["statistics"])
        steps = int(task["steps"])
    except (KeyError, TypeError, ValueError) as error:  # of a file that anybody may have written
        return f"its steps cannot be counted: {' '.join(str(error).split())}"
    if fault := unproved_claim(record, sampling, steps, statistics, tolerance=_OTHER_VERSIONS):
        return fault
    # A method may have noise of its own, whatever the budget; and the bound of random allocation jumps.
    if record.defense.settings.get("noise_multiplier") is not None or sampling.kind == "random_allocation":
        return ""
    asked = budget.get("epsilon")
    if asked is not None and claim.epsilon < _SPENT * asked:
        return f"its epsilon {claim.epsilon:.4g} is not that of its budget, {asked:g}, to which noise is calibrated"
    return ""


@cache
def _of_a_run(
    defense: str, sigma: float, sampling: Sampling, steps: int, delta: float, statistics: FeatureStatistics | None
) -> float:
    before = () if statistics is None else statistics.plans()
    return predict(_made(defense, sigma), sampling=sampling, steps=steps, before=before).claim(delta).epsilon


@cache
def _of_a_share(defense: str, sigma: float, shared: range, planned: int, of_an_epoch: int, delta: float) -> float:
    # The target is known to be in each epoch; the steps before are taken on others' examples, who pay for them.
    account = Account(Ledger(full() if of_an_epoch == 1 else partition(1 / of_an_epoch)))
    others = Account(Ledger(full()))
    for _ in rehearsed(_made(defense, sigma), account, steps=planned, only=shared, others=others):
        pass
    return account.ledger.claim(delta).epsilon


def _made(defense: str, sigma: float) -> Defense:
    method = json.loads(defense)
    return catalog.defense(method["name"], method["settings"]).with_noise(sigma)
