"""Runs the cells of a suite: train, attack, score, record. One record a cell, written as soon as it is there.

A run over existing results computes only what is missing or failed. A failing cell is a record with its error; the
others go on. Jobs run in processes of their own, each on one core, and write their own records, so a crash loses at
most what is in progress.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from pathlib import Path

import torch

from leaderboard.record import Claim, MethodUsed, Record, RecordError, Reported, read, write

from . import cells as planning
from .arrays import write_arrays
from .cells import Cell, Job, digest_of
from .compute import compute
from .outcome import Outcome
from .pool import execute
from .suite import Suite
from .tuning import tune

Report = Callable[[int, int, str], None]


def pick_device(name: str) -> torch.device:
    """The device called `auto`, `cpu` or `cuda`.

    Raises:
        ValueError: another name, or no CUDA device here.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got '{name}'")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be here, got cuda, and torch finds none; take cpu, or see leakbench doctor")
    cuda = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def run(
    suite: Suite,
    directory: Path,
    *,
    device: torch.device,
    jobs: int | None = None,
    secure_noise: bool = False,
    fail_fast: bool = False,
    report: Report = lambda done, total, what: None,
) -> list[Record]:
    """Runs what is missing of a suite.

    Args:
        suite: with its overrides and selection.
        directory: records go to `directory/records`; those that are there are kept.
        device: where to compute.
        jobs: processes; one a core (8 at most) on the CPU and one on a GPU where None.
        secure_noise: noise from the operating system's generator instead of the cells' seeds.
        fail_fast: stop at the first cell that fails.
        report: called with (cells done, cells in all, what just happened).

    Returns:
        The records of all cells of the suite, in its order, those of former runs included.

    Raises:
        SuiteError: sizes that do not fit.
        RecordError: a torn record in the directory, named; nothing is computed or overwritten.
    """
    if suite.tune is not None:
        planning.plan(suite, secure_noise=secure_noise)  # what does not fit is refused before anything is trained
        suite = tune(suite, directory, device=device, jobs=jobs, report=report)
    plan = planning.plan(suite, secure_noise=secure_noise)
    folder = directory / "records"
    there = {cell.id: read(path) for cell in plan.cells if (path := folder / f"{cell.id}.json").exists()}
    for cell in plan.skipped:
        if cell.id not in there or there[cell.id].status == "failed":
            there[cell.id] = _record(cell, suite.digest, device, Outcome(skipped=cell.skip))
            write(there[cell.id], folder)
    # What was skipped in former runs and can be run now, as with an extra that came since, is missing too.
    done = {name for name, record in there.items() if record.status == "ok"}
    todo = [
        Job(missing, job.suite_digest)
        for job in plan.jobs
        if (missing := tuple(cell for cell in job.cells if cell.id not in done))
    ]
    total = len(plan.cells)
    finished = total - sum(len(job.cells) for job in todo)
    report(finished, total, f"{finished} of {total} cells are there already" if finished else "starting")
    work = partial(run_job, folder=folder, device=device)
    with closing(execute(todo, work, device=device, jobs=jobs, drafts=folder)) as executed:
        for job, records in executed:
            there.update({record.id: record for record in records})
            finished += len(records)
            report(finished, total, job.words)
            if fail_fast and any(record.status == "failed" for record in records):
                break
    return [there[cell.id] for cell in plan.cells if cell.id in there]


def run_job(job: Job, folder: Path, device: torch.device) -> list[Record]:
    """Computes the cells of one job and writes their records.

    Args:
        job: its cells share what is computed once.
        folder: where records go.
        device: where to compute.

    Returns:
        Their records; a cell that fails has one with its error.
    """
    records = []
    for cell, outcome in compute(job.cells, device):
        try:
            record = _record(cell, job.suite_digest, device, outcome)
        except RecordError as error:  # a method returned what no record can hold
            outcome = Outcome(error=f"RecordError: {error}", seconds=outcome.seconds)
            record = _record(cell, job.suite_digest, device, outcome)
        if outcome.arrays:
            write_arrays(outcome.arrays, folder, cell.id)
        records.append(record)
        write(record, folder)
    return records


def _record(cell: Cell, suite_digest: str, device: torch.device, outcome: Outcome) -> Record:
    request = cell.request
    attack = request["attack"]
    claim = outcome.claim
    status = "skipped" if outcome.skipped else "failed" if outcome.error else "ok"
    return Record(
        id=digest_of(request),
        suite=request["suite"],
        suite_digest=suite_digest,
        kind=request["kind"],
        control=request["control"],
        defense=MethodUsed(**request["defense"]),
        attack=None if attack is None else MethodUsed(**attack),
        task=request["task"] | outcome.task,
        budget=request["budget"],
        requires=None if attack is None else planning.requires(attack["name"]),
        claim=None if claim is None else Claim(**claim),
        noise_multiplier=outcome.noise_multiplier,
        noise=outcome.noise,
        metrics=outcome.metrics,
        status=status,
        reason=outcome.skipped or outcome.error or None,
        seed=request["seed"],
        engine=outcome.engine,
        device=_device_words(device),
        code_version=code_version(),
        seconds=round(outcome.seconds, 3),
        flags=tuple(outcome.flags),
        reported=tuple(Reported(metric=m, value=v, source=s) for m, v, s in cell.reported),
        arrays=f"{cell.id}.parquet" if outcome.arrays else None,
        versions=_versions(),
    )


def _device_words(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


@cache
def code_version() -> str:
    """Version of the distribution, or of the checkout when it is not installed."""
    try:
        return importlib.metadata.version("leakbench")
    except importlib.metadata.PackageNotFoundError:
        return "unreleased checkout"


@cache
def _versions() -> dict[str, str]:
    names = ("torch", "numpy", "scipy", "dp-accounting")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}
