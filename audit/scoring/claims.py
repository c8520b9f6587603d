"""Claims held against what they follow from: the steps and the noise of their record, and the budget of its request.

A seal is no signature: whoever edits an epsilon can seal the file again, but cannot make it follow.
"""

from __future__ import annotations

import json
import math
from functools import cache

from defenses.core import FeatureStatistics, Sampling, full, predict
from leaderboard.records.record import Record

from ..catalog import methods as catalog

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
    # As text, which can be hashed for the cache: accounting takes seconds, and the cells of a training ask alike.
    defense = json.dumps(json.loads(record.to_json())["defense"], sort_keys=True)
    proved = _proved(defense, record.noise_multiplier, sampling, steps, claim.delta, statistics)
    # A larger epsilon than what the steps prove is true, too: it claims less.
    if claim.epsilon < proved * (1 - tolerance):
        words = f"{proved:.4g}" if math.isfinite(proved) else "none"
        return f"its epsilon {claim.epsilon:.4g} does not follow from its steps, which prove {words}"
    return ""


def claim_fault(record: Record) -> str:
    """Why a finite claim does not follow from what its record says of steps, noise and budget; empty where it does.

    Nothing is said of a defense that is given by its path, which would be executed, and of a record that does not say
    how it was trained.

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
    if "trained_on" not in task:  # one release, of which the target is known to be a part
        shared = task.get("noise") == "calibrated" and task.get("steps") is None
        return unproved_claim(record, full(), 1, None, tolerance=_OTHER_VERSIONS) if shared else ""
    try:
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
def _proved(
    defense: str, sigma: float, sampling: Sampling, steps: int, delta: float, statistics: FeatureStatistics | None
) -> float:
    method = json.loads(defense)
    made = catalog.defense(method["name"], method["settings"])
    before = () if statistics is None else statistics.plans()
    return predict(made.with_noise(sigma), sampling=sampling, steps=steps, before=before).claim(delta).epsilon
