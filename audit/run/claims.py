"""Checks that privacy claims follow from the steps and noise of their record, and from the budget of its request.

A seal is not a signature: an edited epsilon can be sealed again, but does not follow from the steps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, cast

from leakbench.defenses.core import (
    Account,
    Claim,
    Defense,
    FeatureStatistics,
    Ledger,
    Sampling,
    full,
    partition,
    predict,
    rehearsed,
)
from leakbench.leaderboard.kinds import KINDS
from leakbench.leaderboard.records.record import Record, RecordedClaim, RequestedBudget
from leakbench.leaderboard.records.task import TrainingTask, UpdateTask

from ..catalog import methods as catalog
from ..catalog.plugins import is_path
from ..targets.local_steps import LocalTraining
from .federated_claims import proved_by_clients, proved_by_message, unproved_clients

OTHER_VERSIONS = 1e-3
"""Relative difference allowed between accountants of two versions."""
_LEAST_SPENT = 0.9  # smallest accepted fraction of a budget that is spent; calibration spends all of it


def unproved_claim(
    record: Record,
    sampling: Sampling,
    steps: int,
    statistics: FeatureStatistics | None,
    *,
    tolerance: float = 1e-6,
) -> str:
    """Returns the reason why a finite claim does not follow from these steps; empty if it does.

    Args:
        record: with a noise multiplier and a defense that is in the catalogue or a path that may be executed.
        sampling: sampling of the steps.
        steps: number of steps.
        statistics: released before the first step; None for none.
        tolerance: relative, of epsilon.
    """
    claim = record.claim
    if claim is None or claim.epsilon is None or record.noise_multiplier is None:
        return ""
    proved = _of_a_run(_defense(record), record.noise_multiplier, sampling, steps, claim.delta, statistics)
    return _contradicted_field(claim, proved, tolerance)


def unproved_share(record: Record, *, tolerance: float = 1e-6) -> str:
    """Returns the reason why a finite claim does not follow from a client's shared steps; empty if it does.

    Args:
        record: of a shared update, with a defense that is in the catalogue or a path that may be executed.
        tolerance: relative, of epsilon.

    Raises:
        TypeError, ValueError: for a task without steps.
    """
    claim, task = record.claim, record.task
    if claim is None or claim.epsilon is None or record.noise_multiplier is None:
        return ""
    if not isinstance(task, UpdateTask):
        raise ValueError(f"a record of {record.kind} has no shared update")
    if task.message is not None:
        return _contradicted_field(claim, proved_by_message(record, task, claim.delta), tolerance)
    local_steps = of_an_epoch = 1
    if task.local is not None:
        local = LocalTraining(**task.local)
        local_steps, of_an_epoch = local.steps(task.batch), local.steps_per_epoch(task.batch)
    shared = range(task.step, task.step + local_steps)
    planned = shared.stop if task.steps is None else task.steps
    proved = _of_a_share(_defense(record), record.noise_multiplier, shared, planned, of_an_epoch, claim.delta)
    return _contradicted_field(claim, proved, tolerance)


def _defense(record: Record) -> str:
    """Returns a record's defense as JSON text, a hashable key: accounting takes seconds and is cached across cells."""
    return json.dumps(json.loads(record.to_json())["defense"], sort_keys=True)


def _contradicted_field(claim: RecordedClaim, proved: Claim, tolerance: float) -> str:
    """Returns the first part of a claim that does not follow from the proved claim; empty if all follows."""
    # An epsilon above what the steps prove is a true claim, too, only weaker.
    if claim.epsilon is not None and claim.epsilon < proved.epsilon * (1 - tolerance):
        words = f"{proved.epsilon:.4g}" if math.isfinite(proved.epsilon) else "none"
        return f"its epsilon {claim.epsilon:.4g} does not follow from its steps, which prove {words}"
    for name in ("relation", "unit", "sampling"):
        if (claimed := getattr(claim, name)) != (true := getattr(proved, name)):
            return f"the {name} of its claim is {claimed!r}, and its steps prove one of {true!r}"
    for name, words in (
        ("epsilon_rdp", "epsilon by RDP"),
        ("as_if_poisson", "epsilon as if the sampling were Poisson"),
    ):
        claimed, least = getattr(claim, name), getattr(proved, name)
        if claimed is not None and least is not None and claimed < least * (1 - tolerance):
            return f"its {words} is {claimed:.4g}, and its steps give {least:.4g}"
    return ""


def claim_fault(record: Record) -> str:
    """Returns the reason why a claim does not follow from its record's steps, noise and budget; empty if it does.

    A defense given by its path is not checked, because it would be executed.

    Args:
        record: with status "ok"; its content is untrusted.
    """
    claim, name = record.claim, record.defense.name
    if claim is None or claim.epsilon is None or is_path(name):
        return ""
    if name not in catalog.names("defenses"):
        return f"its defense {name!r} is none that is known here, so nothing shows what its epsilon follows from"
    try:
        return _fault(record, claim)
    except Exception as error:  # untrusted file
        return f"its steps cannot be counted: {' '.join(str(error).split())}"


def _fault(record: Record, claim: RecordedClaim) -> str:
    task, budget = record.task, record.budget
    if "delta" in budget and claim.delta != budget.delta:
        return f"its delta {claim.delta:g} is not that of its budget, {budget.delta:g}"
    if record.control == "public_only":  # no private example was read
        return ""
    if record.noise_multiplier is None:
        return f"its epsilon is {claim.epsilon:.4g}, and it names no noise multiplier that it follows from"
    requested_multiplier = budget.noise_multiplier
    if requested_multiplier is not None and record.noise_multiplier != requested_multiplier:
        return (
            f"its noise multiplier {record.noise_multiplier:.6g} is not that of its budget, {requested_multiplier:.6g}"
        )
    if isinstance(task, UpdateTask):
        return unproved_share(record, tolerance=OTHER_VERSIONS)
    if task.steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {task.steps!r}")
    if task.federated is not None:
        return _federated_fault(record, claim, task)
    sampling, statistics = _counted(task)
    if fault := unproved_claim(record, sampling, task.steps, statistics, tolerance=OTHER_VERSIONS):
        return fault
    # The bound of random allocation is not continuous in the multiplier, so calibration may leave a part unspent.
    if requested_multiplier is not None or sampling.kind == "random_allocation":
        return ""
    proved = _of_a_run(_defense(record), record.noise_multiplier, sampling, task.steps, claim.delta, statistics)
    return _unspent(budget, proved)


def unproved_federation(record: Record, *, tolerance: float = 1e-6) -> str:
    """Returns the reason why a finite claim does not follow from the rounds of its clients; empty if it does.

    Args:
        record: of a federated training, with a defense that is in the catalogue or a path that may be executed.
        tolerance: relative, of epsilon.

    Raises:
        TypeError, ValueError: for a task without clients.
    """
    claim, task = record.claim, record.task
    if claim is None or claim.epsilon is None or record.control == "public_only":
        return ""
    if not isinstance(task, TrainingTask):
        raise ValueError(f"a record of {record.kind} has no clients")
    return _contradicted_field(claim, proved_by_clients(record, task, claim.delta), tolerance)


def _federated_fault(record: Record, claim: RecordedClaim, task: TrainingTask) -> str:
    if fault := unproved_federation(record, tolerance=OTHER_VERSIONS):
        return fault
    proved = proved_by_clients(record, task, claim.delta)
    calibrated = any(getattr(record.budget, kind) is not None for kind in ("epsilon", "advantage", "tpr"))
    return _unspent(record.budget, proved) if calibrated else ""


def messages_fault(record: Record) -> str:
    """Returns a mismatch of an active server's messages with the steps that its claim charges; empty if none.

    Fewer `releases` leave the epsilon above what they prove, a true claim, so `claim_fault` does not show them.

    Args:
        record: in which `claim_fault` finds none.
    """
    claim, task = record.claim, record.task
    if not record.active_server or claim is None or claim.epsilon is None or is_path(record.defense.name):
        return ""
    prove = proved_by_message if isinstance(task, UpdateTask) else proved_by_clients
    try:
        proved = prove(record, cast(Any, task), claim.delta)
    except Exception as error:  # untrusted file
        return f"its messages cannot be counted: {' '.join(str(error).split())}"
    charged, expected = _steps_in(claim.events), _steps_in(proved.events)
    if charged == expected:
        return ""
    charges = "no counted steps" if charged is None else f"{charged} steps"
    return f"its claim charges {charges}, and the {task.get('releases', 1)} releases of its task are charged {expected}"


def _steps_in(events: Iterable[str]) -> int | None:
    """Returns the steps of a claim's events, each written as "3 x Gaussian, ..."; None for other words."""
    counts = [re.match(r"(\d{1,9}) x ", event) for event in events]
    return None if None in counts else sum(int(count[1]) for count in counts if count is not None)


def clients_fault(record: Record, epsilons: Sequence[float]) -> str:
    """Returns the reason why epsilons of clients do not follow from their record's rounds; empty if they do.

    Args:
        record: of kind "federation", in whose claim no fault is found; its content is untrusted.
        epsilons: of the clients by number, in nats; of the record's arrays.
    """
    try:
        return unproved_clients(record, epsilons, tolerance=OTHER_VERSIONS)
    except Exception as error:  # untrusted file
        return f"epsilons of its clients cannot be computed again: {' '.join(str(error).split())}"


def _counted(task: TrainingTask) -> tuple[Sampling, FeatureStatistics | None]:
    """Returns the sampling of a training's steps, and the statistics that it released before them."""
    capped = {}
    if task.largest_batch is not None:
        capped = {"most": min(task.largest_batch, task.trained_on), "examples": task.trained_on}
    sampling = Sampling(cast(Any, task.sampling), task.sample_rate, groups=task.groups, **capped)
    statistics = None if task.statistics is None else FeatureStatistics(**task.statistics)
    return sampling, statistics


def proved_claim(record: Record) -> Claim | None:
    """Returns the claim that a training's steps prove; None without a finite claim or with a defense given by its path.

    Args:
        record: in which `claim_fault` finds none.
    """
    claim, task = record.claim, record.task
    if claim is None or claim.epsilon is None or record.noise_multiplier is None:
        return None
    if is_path(record.defense.name) or not isinstance(task, TrainingTask):
        return None
    if task.federated is not None:
        return proved_by_clients(record, task, claim.delta)
    sampling, statistics = _counted(task)
    return _of_a_run(_defense(record), record.noise_multiplier, sampling, task.steps, claim.delta, statistics)


def _unspent(budget: RequestedBudget, proved: Claim) -> str:
    """Returns a mismatch between the noise and the budget that it was calibrated to; empty if none."""
    limits = {
        "epsilon": lambda: proved.epsilon,
        "advantage": lambda: proved.trade_off.advantage,
        "tpr": lambda: proved.trade_off.tpr_at(cast(float, budget.fpr)),
    }
    for name, reached in limits.items():
        if (limit := getattr(budget, name)) is not None:
            spent = reached()
            if spent < _LEAST_SPENT * limit:
                return f"its {name} {spent:.4g} is not that of its budget, {limit:g}, to which noise is calibrated"
            return ""
    return "its budget names nothing that its noise was calibrated to"


def multiplier_fault(record: Record, others: Iterable[Record]) -> str:
    """Returns a mismatch of a shared update's noise with that of its training, of the same budget; empty if none.

    Args:
        record: of any kind.
        others: records of the same folder.
    """
    if not KINDS[record.kind].own_task or not record.noise_multiplier:
        return ""
    trained = {
        neighbour.noise_multiplier
        for neighbour in others
        if not KINDS[neighbour.kind].own_task
        and neighbour.noise_multiplier is not None
        and _same_request(record, neighbour)
    }
    if not trained or any(math.isclose(record.noise_multiplier, multiplier, rel_tol=1e-9) for multiplier in trained):
        return ""
    return f"its noise multiplier {record.noise_multiplier:.6g} is not that of its training, {min(trained):.6g}"


def _same_request(record: Record, other: Record) -> bool:
    same = (record.suite, record.seed, record.defense, record.budget) == (
        other.suite,
        other.seed,
        other.defense,
        other.budget,
    )
    return same and (record.control == "negative") == (other.control == "negative")


@cache
def _of_a_run(
    defense: str, sigma: float, sampling: Sampling, steps: int, delta: float, statistics: FeatureStatistics | None
) -> Claim:
    before = () if statistics is None else statistics.plans()
    return predict(_built(defense, sigma), sampling=sampling, steps=steps, before=before).claim(delta)


@cache
def _of_a_share(defense: str, sigma: float, shared: range, planned: int, of_an_epoch: int, delta: float) -> Claim:
    # The attacker knows that the batch is in each epoch; earlier steps use other examples and are charged to those.
    account = Account(Ledger(full() if of_an_epoch == 1 else partition(1 / of_an_epoch)))
    others = Account(Ledger(full()))
    for _ in rehearsed(_built(defense, sigma), account, steps=planned, only=shared, others=others):
        pass
    return account.ledger.claim(delta)


def _built(defense: str, sigma: float) -> Defense:
    method = json.loads(defense)
    return catalog.defense(method["name"], method["settings"]).with_noise(sigma)
