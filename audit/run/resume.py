"""Resumption: selection of earlier records to keep, by code, settings, claim and arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from leakbench.leaderboard.records.folder import arrays_fault
from leakbench.leaderboard.records.manifest import contradicted_fields, equal_json
from leakbench.leaderboard.records.record import Provenance, Record, RecordError, read
from leakbench.leaderboard.records.task import UpdateTask

from ..catalog import methods as catalog
from ..plan.build import planned
from ..plan.cells import Cell
from ..plan.request import Request
from .claims import unproved_claim, unproved_federation, unproved_share
from .provenance import library
from .verify import contradiction

UNRESOLVED = ("private", "non_member", "public")
"""Sizes of a task that a suite may leave to the data: a record has the resolved values."""


class StaleError(RecordError):
    """Earlier records or artifacts that do not match the current request or code."""


@dataclass
class SelectedRecords:
    """Existing records of a plan.

    Attributes:
        records: by id, of any status.
        remarks: sentences for the user, the reasons why other records count as missing.
    """

    records: dict[str, Record] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def select_records(
    cells: list[Cell], folder: Path, now: dict[str, Provenance], *, recompute: bool = False, verify: bool = False
) -> SelectedRecords:
    """Reads the records of a plan's cells and selects those to keep.

    Args:
        cells: of the plan.
        folder: of the records.
        now: by id of a cell, the provenance of the code that would compute it.
        recompute: whether mismatched records are recomputed instead of refused.
        verify: whether numbers are recomputed from scores.

    Raises:
        StaleError: records of other code, or whose claim or settings differ from their cell's, named.
        RecordError: an incomplete or edited record; nothing is computed or overwritten.
    """
    existing, stale = SelectedRecords(), {}
    for cell in cells:
        path = folder / f"{cell.id}.json"
        # A dangling link does not `exist` either, but `read` refuses it by name.
        if not path.exists() and not path.is_symlink():
            continue
        try:
            record = read(path)
        except RecordError as error:
            if not recompute:
                raise
            existing.remarks.append(f"{error}; computed again")
            continue
        # Only records with numbers are checked here: failed cells are recomputed anyway, and `harness._says` compares
        # the reasons of skipped ones.
        if record.status == "ok":
            if differs := differences(record, cell, now[cell.id]):
                stale.setdefault("; ".join(differs), []).append(_name(record))
                continue
            # A record with missing or altered arrays counts as missing and is not refused: recomputing it repairs the
            # folder.
            fault = arrays_fault(record, folder)
            if not fault and record.arrays is None:
                fault = "it names no arrays"
            if not fault and verify:
                fault = contradiction(record, folder)
            if fault:
                existing.remarks.append(f"record {record.id} ({_name(record)}) counts as missing: {fault}")
                continue
        existing.records[cell.id] = record
    words = "; ".join(f"{_listed(names)}: {differs}" for differs, names in stale.items())
    count = sum(map(len, stale.values()))
    if stale and not recompute:
        raise StaleError(
            f"{count} record{'s' if count > 1 else ''} in {folder} cannot be kept beside new ones ({words}); "
            "compute them again with --recompute, or name another --out"
        )
    if stale:
        existing.remarks.append(f"{count} records are computed again ({words})")
    return existing


def refuse_other_code(origin: Provenance) -> None:
    """Checks in a worker that its imported source equals the runner's, which its records will name.

    Raises:
        StaleError: the source was edited meanwhile.
    """
    if library().source != origin.source:
        raise StaleError(
            "the source of leakbench was edited between the start of the run and that of its processes; what was "
            "finished is kept, run the same command again"
        )


def differences(record: Record, cell: Cell, now: Provenance) -> list[str]:
    """Returns the differences between a record and the record its cell would have now, in words."""
    mismatches = record.provenance.differences(now)
    request, attack = cell.request, cell.request.attack
    expected = {
        "suite": request.suite,
        "kind": request.kind,
        "control": request.control,
        "defense": request.defense.to_dict(),
        "attack": None if attack is None else attack.to_dict(),
        "seed": request.seed,
        "budget": request.budget.to_dict(),
        "requires": None if attack is None else catalog.attack(attack.name).requires.to_dict(),
    }
    mismatches += contradicted_fields(record, expected)
    task = {key: value for key, value in request.task.items() if key not in UNRESOLVED}
    mismatches += [
        f"its task.{k} is not that of its cell" for k, v in task.items() if not equal_json(record.task.get(k), v)
    ]
    if mismatches:  # the claim is not checked: plans of other code may not even run
        return mismatches
    return [fault] if (fault := _claim_fault(record, request)) else []


def _claim_fault(record: Record, request: Request) -> str:
    """Returns the reason why a finite claim does not follow from the steps of its request; empty if it does."""
    claim = record.claim
    if claim is None or claim.epsilon is None:
        return ""
    if request.control == "public_only":  # no private example was read
        return "" if claim.epsilon == 0 else f"its epsilon {claim.epsilon:g} is not 0"
    requested_multiplier = request.budget.noise_multiplier
    if record.noise_multiplier is None or requested_multiplier not in (None, record.noise_multiplier):
        return f"its noise multiplier {record.noise_multiplier} is not that of its budget"
    if claim.delta != request.budget.delta:
        return f"its delta {claim.delta:g} is not that of its budget"
    if isinstance(record.task, UpdateTask):
        return unproved_share(record)
    if request.training.federated is not None:
        return unproved_federation(record)
    sampling, steps = planned(request, record.task.trained_on)
    return unproved_claim(record, sampling, steps, request.training.recipe.statistics)


def _name(record: Record) -> str:
    return f"{record.defense.name} x {record.attack.name if record.attack else record.kind}, seed {record.seed}"


def _listed(names: list[str]) -> str:
    return " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
