"""Runner of a suite: trains, attacks, scores, and writes a record per cell as soon as it is computed.

A run over existing results computes only missing or failed cells. A failing cell becomes a record with its error; the
others continue. Jobs run in worker processes with one thread each, and workers write the records themselves, so a crash
loses at most the jobs in progress.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch

from leakbench.leaderboard.records.files import refuse_links, sweep
from leakbench.leaderboard.records.manifest import read_manifests, write_manifest
from leakbench.leaderboard.records.record import (
    MethodUsed,
    Provenance,
    Record,
    RecordedClaim,
    RecordedRequirements,
    RecordError,
    Reported,
    RequestedBudget,
    write,
)
from leakbench.leaderboard.records.task import task_of

from ..catalog import methods as catalog
from ..plan import expand as planning
from ..plan.artifact import Artifact, Artifacts
from ..plan.cells import Cell, Job, Plan
from ..plan.manifest import manifest_of
from ..progress_events import Listener
from ..subjects.outcome import Outcome
from ..suite.suite import Suite
from .arrays import write_arrays
from .artifacts import KeptResults, compute_artifact, origin_of, read_kept
from .executors.local import Local
from .graph import Graph
from .job import compute
from .lock import locked
from .placement import accelerator, device_of
from .progress import Report, RunProgress
from .provenance import library, third_party, tuning_digest
from .rehearsal import rehearse
from .resume import refuse_other_code, select_records
from .tuning import tune

Sourced = tuple[Job | Artifact, dict[str, Provenance], torch.device]
"""A unit of work, the provenance of its code at the start of the run, by id of a cell or name of an artifact, and the
device that it is computed on."""


def pick_device(name: str) -> torch.device:
    """Returns the device named `auto`, `cpu` or `cuda`.

    Raises:
        ValueError: another name, or no CUDA device on this machine.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got '{name}'")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be here, got cuda, and torch finds none; take cpu, or see leakbench doctor")
    return accelerator() if name == "auto" else torch.device(name)


def run(
    suite: Suite,
    directory: Path,
    *,
    device: torch.device | None,
    jobs: int | None = None,
    secure_noise: bool = False,
    fail_fast: bool = False,
    recompute: bool = False,
    verify: bool = False,
    command: Sequence[str] = (),
    only: Collection[str] | None = None,
    report: Report = lambda done, total, activity: None,
) -> list[Record]:
    """Runs the cells of a suite that have no record yet.

    Args:
        suite: with its overrides and selection.
        directory: records go to `directory/records`; existing records are kept.
        device: device of the computation; None to decide for each training by its cost (`placement.py`).
        jobs: processes; None for one per core (8 at most) on the CPU and one on a GPU. If a run uses both, a GPU has
            one process beside those of the CPU.
        secure_noise: whether noise and sampler's key come from the operating system instead of the cells' seeds.
        fail_fast: stop at the first cell that fails.
        recompute: whether edited records, or records of other code, are recomputed instead of refused.
        verify: whether the numbers of existing records are recomputed from their scores.
        command: command line of the run, word by word, for the manifest; `leakbench run SUITE` if empty.
        only: ids of cells; None for all of the suite.
        report: called with (number of cells and artifacts done, total number, latest event).

    Returns:
        The records of all cells of the suite, in its order, including earlier ones.

    Raises:
        SuiteError: sizes that do not fit.
        RecordError: torn, edited or stale records or requests in the directory, or links, named; nothing is computed or
            overwritten.
        BusyError: another run writes into the directory.
        WriteError: for example a full disk; finished records are kept.
    """
    with locked(directory):
        # Results may come from others, and a linked folder would be cleaned and written through the link.
        refuse_links(*(directory / name for name in ("records", "artifacts", "tuning", "tuning/points")))
        if suite.tune is not None:
            # Refuses bad suites and added methods before any training.
            rehearse(suite, planning.plan(suite, secure_noise=secure_noise))
            suite = tune(suite, directory, device=device, jobs=jobs, report=report, recompute=recompute)
        plan = planning.plan(suite, secure_noise=secure_noise)
        plan = plan if only is None else plan.only(only)
        folder = directory / "records"
        read_manifests(folder)  # reports a bad manifest now, not when the board is shown
        # Hashed in the runner, before any computation: workers import the source later, when it may have been edited.
        origins = {cell.id: _origin(cell, directory) for cell in plan.cells}
        existing = select_records(plan.cells, folder, origins, recompute=recompute, verify=verify)
        records = existing.records
        if suite.tune is None:
            rehearse(suite, Plan(jobs=_missing(plan, records)))
        sweep(folder)  # under the lock: otherwise drafts of a live run would be taken for those of a killed run
        # Written before any computation: an interrupted run must not look complete without its strong attacks.
        write_manifest(manifest_of(plan, suite, secure_noise, command), folder)
        records |= _skipped(plan, records, suite.digest, device, origins, folder)
        todo = _missing(plan, records)
        waiting = _artifacts(todo, directory / "artifacts", recompute=recompute)
        # Artifacts count as well as cells: a bank of shadow models takes longer than the cells that read it.
        progress = RunProgress(report, len(plan.cells) + len(waiting))
        computed = _computed(todo, waiting, directory, device, jobs, origins, progress.doing)
        records |= _collected(computed, todo, len(waiting), existing.remarks, progress, fail_fast=fail_fast)
        # After --fail-fast, some cells have no record.
        return [records[cell.id] for cell in plan.cells if cell.id in records]


def _collected(
    computed: Generator[tuple[Sourced, list[Record]], None, None],
    todo: Sequence[Job],
    waiting: int,
    remarks: Sequence[str],
    progress: RunProgress,
    *,
    fail_fast: bool,
) -> dict[str, Record]:
    """Returns the computed records, by id, each reported as it arrives."""
    collected: dict[str, Record] = {}
    cells = progress.total - waiting
    progress.finished = cells - sum(len(job.cells) for job in todo)
    for remark in remarks:
        progress.now(remark)
    progress.now(f"{progress.finished} of {cells} cells are there already" if progress.finished else "starting")
    # `closing` ends the workers on a break or an error, too.
    with closing(computed):
        for (piece, *_), records in computed:
            collected |= {record.id: record for record in records}
            progress.finished += len(records) if isinstance(piece, Job) else 1
            progress.now(piece.words)
            if fail_fast and any(record.status == "failed" for record in records):
                break
    return collected


def _origin(cell: Cell, directory: Path) -> Provenance:
    """Returns the provenance that a cell's record would have if it were computed now."""
    tuning = tuning_digest(cell.request, directory)
    return replace(library(), third_party=third_party(cell.request.defense, cell.request.attack), tuning=tuning)


def _says(record: Record | None, cell: Cell, origin: Provenance) -> bool:
    """True if an existing record of a skipped cell may stay: it has the same reason, or numbers of an earlier run.

    Numbers are kept where an attack's optional dependency was installed earlier and is missing now.
    """
    if record is None or record.status == "failed":
        return False
    return record.status == "ok" or (record.reason == cell.skip and not record.provenance.differences(origin))


def _skipped(
    plan: Plan,
    existing: dict[str, Record],
    suite_digest: str,
    device: torch.device | None,
    origins: dict[str, Provenance],
    folder: Path,
) -> dict[str, Record]:
    """Writes the missing records of skipped cells."""
    records = {}
    for cell in plan.skipped:
        if not _says(existing.get(cell.id), cell, origins[cell.id]):
            # Nothing is computed for the cell, so its cost does not matter.
            place = device or accelerator()
            records[cell.id] = record_of(cell, suite_digest, place, Outcome(skipped=cell.skip), origins[cell.id])
            write(records[cell.id], folder)
    return records


def _missing(plan: Plan, existing: dict[str, Record]) -> list[Job]:
    """Returns the jobs, reduced to the cells without numbers.

    Includes cells that an earlier run skipped and that can run now, as after the installation of an optional
    dependency.
    """
    done = {name for name, record in existing.items() if record.status == "ok"}
    return [
        Job(missing, job.suite_digest)
        for job in plan.jobs
        if (missing := tuple(cell for cell in job.cells if cell.id not in done))
    ]


def _artifacts(todo: Sequence[Job], store: Path, *, recompute: bool) -> dict[str, Artifact]:
    """Returns the artifacts that jobs depend on and that are not stored, by name."""
    if store.is_dir():
        sweep(store)
    # Only pending jobs are looked at: finished cells need no artifact any more.
    needed = {name: artifact for job in todo for name, artifact in job.needs.items()}
    stored = read_kept(needed, store, recompute=recompute).keys()
    return {name: artifact for name, artifact in needed.items() if name not in stored}


def _computed(
    todo: list[Job],
    waiting: dict[str, Artifact],
    directory: Path,
    device: torch.device | None,
    jobs: int | None,
    origins: dict[str, Provenance],
    say: Listener,
) -> Generator[tuple[Sourced, list[Record]], None, None]:
    """Yields jobs and the artifacts they depend on, each with its records, in the order of completion."""
    folder, store = directory / "records", directory / "artifacts"
    work = partial(run_piece, folder=folder, store=store)
    yield from Local(itemgetter(-1), jobs, folder, say).run(_graph(todo, waiting, origins, device), work)


def _graph(
    jobs: Sequence[Job], waiting: dict[str, Artifact], origins: dict[str, Provenance], device: torch.device | None
) -> Graph[Sourced]:
    """Returns the graph of jobs, each after the artifacts it depends on, with the provenance of its own cells.

    A unit is sent to a process: with the provenance of all cells, the bytes sent would grow with the square of their
    number.
    """
    graph: Graph[Sourced] = Graph()
    for job in jobs:
        missing = [name for name in job.needs if name in waiting]
        for name in missing:
            artifact = waiting[name]
            graph.add(name, (artifact, {name: origin_of(artifact)}, device_of(artifact, device)))
        own = {cell.id: origins[cell.id] for cell in job.cells}
        graph.add(job.name, (job, own, device_of(job, device)), missing)
    return graph


def run_piece(sourced: Sourced, folder: Path, store: Path) -> list[Record]:
    """Computes a job, or an artifact; a failure is written with its error and ends nothing else.

    Args:
        sourced: a unit of the run's graph.
        folder: folder of the records.
        store: folder of the artifacts.

    Returns:
        The records of a job.

    Raises:
        StaleError: this process imported other code than at the start of the run, so records could not name their code.
    """
    piece, origins, device = sourced
    # An artifact's error is in its file: every dependent job reads it there and fails with that message.
    if isinstance(piece, Artifact):
        compute_artifact(piece, store, device, origins[piece.name])
        return []
    return run_job(piece, folder, device, origins, partial(KeptResults, piece.needs.values(), store))


def run_job(
    job: Job,
    folder: Path,
    device: torch.device,
    origins: dict[str, Provenance],
    read: Callable[[], Artifacts] = dict,
) -> list[Record]:
    """Computes the cells of a job and writes their records.

    Args:
        job: its cells share a subject.
        folder: folder of the records.
        device: device of the computation.
        origins: by id of a cell, the provenance of its code at the start of the run.
        read: returns the artifacts that the cells depend on.

    Returns:
        The records of the cells; a failed cell's record has its error.

    Raises:
        StaleError: this process imported other code than at the start of the run, so records could not name their code.
    """
    refuse_other_code(origins[job.cells[0].id])
    records = []
    for cell, outcome in compute(job.cells, device, read):
        try:
            record = record_of(cell, job.suite_digest, device, outcome, origins[cell.id])
        except RecordError as error:  # a method returned values that no record can hold
            outcome = Outcome(error=f"RecordError: {error}", seconds=outcome.seconds)
            record = record_of(cell, job.suite_digest, device, outcome, origins[cell.id])
        records.append(_written(record, outcome, folder))
    return records


def _written(record: Record, outcome: Outcome, folder: Path) -> Record:
    """Writes arrays and then the record, so that no record exists without its arrays; on an error, neither stays."""
    if not outcome.arrays:
        write(record, folder)
        return record
    path, digest = write_arrays(outcome.arrays, folder, record.id)
    record = replace(record, arrays=path.name, arrays_digest=digest)
    try:
        write(record, folder)
    except OSError:
        with suppress(OSError):  # for example on a full disk: the error to show is the earlier one
            path.unlink()
        raise
    return record


def record_of(cell: Cell, suite_digest: str, device: torch.device, outcome: Outcome, origin: Provenance) -> Record:
    """Returns the record of a cell's outcome, without arrays."""
    request, attack, claim = cell.request, cell.request.attack, outcome.claim
    status = "skipped" if outcome.skipped else "failed" if outcome.error else "ok"
    requires = None if attack is None else RecordedRequirements(catalog.attack(attack.name).requires.to_dict())
    return Record(
        id=cell.id,
        suite=request.suite,
        suite_digest=suite_digest,
        kind=request.kind,
        control=request.control,
        defense=MethodUsed(**request.defense.to_dict()),
        attack=None if attack is None else MethodUsed(**attack.to_dict()),
        task=task_of(request.kind, request.task | outcome.task),  # actual sizes replace the requested ones
        budget=RequestedBudget(request.budget.to_dict()),
        requires=requires,
        claim=None if claim is None else RecordedClaim(**claim),
        noise_multiplier=outcome.noise_multiplier,
        noise=outcome.noise,
        metrics=outcome.metrics,
        status=status,
        reason=outcome.skipped or outcome.error or None,
        seed=request.seed,
        engine=outcome.engine,
        device=_device_words(device),
        provenance=origin,
        seconds=round(outcome.seconds, 3),
        flags=tuple(outcome.flags),
        reported=tuple(Reported(metric=m, value=v, source=s) for m, v, s in cell.reported),
        changes=cell.changes,
    )


def _device_words(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
