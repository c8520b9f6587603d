"""Cells, each of which becomes a record, and jobs, groups of cells that are computed together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from .artifact import Artifact
from .request import Request, digest_of


@dataclass(frozen=True)
class Cell:
    """A defense against an attack, or utility, at one budget and seed; becomes a record.

    Attributes:
        request: full specification of the result.
        subject: the attacked object, a key of `leakbench.audit.subjects.SUBJECTS`.
        skip: reason why it cannot run; empty if it can.
        reported: the papers' figures for it, as (metric, value, source).
        needs: artifacts that have to be computed before.
        changes: overrides of the suite's file that affect it, in words.
    """

    request: Request
    subject: str
    skip: str = ""
    reported: tuple[tuple[str, float, str], ...] = ()
    needs: tuple[Artifact, ...] = ()
    changes: tuple[str, ...] = ()

    @cached_property
    def id(self) -> str:
        """Name of its record."""
        return self.request.id

    @property
    def kind(self) -> str:
        """Kind of its result, such as `membership`."""
        return self.request.kind


@dataclass(frozen=True)
class Job:
    """Cells that are computed together, because they attack the same subject.

    Attributes:
        cells: in order; at least one.
        suite_digest: of the suite file.
    """

    cells: tuple[Cell, ...]
    suite_digest: str

    @property
    def subject(self) -> str:
        """Subject of its cells, a key of `leakbench.audit.subjects.SUBJECTS`."""
        return self.cells[0].subject

    @property
    def name(self) -> str:
        """Hash of its cells' ids: the same cells are the same job."""
        return digest_of({"cells": [cell.id for cell in self.cells]})

    @property
    def needs(self) -> dict[str, Artifact]:
        """Artifacts that its cells depend on, by name."""
        return {artifact.name: artifact for cell in self.cells for artifact in cell.needs}

    @property
    def words(self) -> str:
        """Description for progress output."""
        # From the first cell: training or update are the same for all cells of a job.
        first = self.cells[0].request
        control = f" ({first.control} control)" if first.control else ""
        noise = "" if first.release_noise is None else f", noise {first.release_noise}"
        verb = "share" if first.release_noise is not None else "attack" if first.training.zoo else "train"
        return f"{verb} {first.defense.name}{control}{noise}, seed {first.seed}"


@dataclass
class Plan:
    """All cells of a run, grouped into jobs.

    Attributes:
        jobs: to be computed.
        skipped: cells that cannot run, each with its reason.
    """

    jobs: list[Job] = field(default_factory=list)
    skipped: list[Cell] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)

    @property
    def cells(self) -> list[Cell]:
        """Every cell: those of jobs in the order of the suite, then the skipped ones."""
        return [cell for job in self.jobs for cell in job.cells] + self.skipped

    def only(self, ids: Collection[str]) -> Plan:
        """Returns the part of the plan with these cells, each computed as in the whole plan.

        Args:
            ids: of cells; unknown ids are left out.
        """
        part = Plan()
        for job in self.jobs:
            part.add([cell for cell in job.cells if cell.id in ids], job.suite_digest)
        part.skipped += [cell for cell in self.skipped if cell.id in ids]
        return part

    def add(self, cells: list[Cell], suite_digest: str) -> None:
        """Adds cells of a job, without those already present: two entries may expand to the same cell."""
        new = [cell for cell in cells if cell.id not in self._ids]
        self._ids |= {cell.id for cell in new}
        self.skipped += [cell for cell in new if cell.skip]
        if runnable := tuple(cell for cell in new if not cell.skip):
            self.jobs.append(Job(runnable, suite_digest))
