"""Cells and jobs: what is to be recorded, and what is computed together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from .artifact import Artifact
from .request import Request, digest_of


@dataclass(frozen=True)
class Cell:
    """One defense against one attack, or utility, at one budget and seed: what becomes one record.

    Attributes:
        request: everything that decides the result.
        subject: what is attacked, a key of `leakbench.audit.subjects.SUBJECTS`.
        skip: why it cannot be run; empty if it can.
        reported: the papers' figures for it, as (metric, value, source).
        needs: artifacts that have to be computed before.
        changes: overrides of the suite's file that touch it, in words.
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
        """Kind of its result, as `membership`."""
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
        """What its cells attack, a key of `leakbench.audit.subjects.SUBJECTS`."""
        return self.cells[0].subject

    @property
    def name(self) -> str:
        """Hash of what its cells ask for: the same cells are the same job."""
        return digest_of({"cells": [cell.id for cell in self.cells]})

    @property
    def needs(self) -> dict[str, Artifact]:
        """What its cells wait for, by name."""
        return {artifact.name: artifact for cell in self.cells for artifact in cell.needs}

    @property
    def words(self) -> str:
        """What it is, for progress."""
        # Of the first cell: what is told here, the training or the update, is the same for all cells of a job.
        first = self.cells[0].request
        control = f" ({first.control} control)" if first.control else ""
        noise = "" if first.release_noise is None else f", noise {first.release_noise}"
        verb = "train" if first.release_noise is None else "share"
        return f"{verb} {first.defense.name}{control}{noise}, seed {first.seed}"


@dataclass
class Plan:
    """All cells of a run, those that are computed together in one job.

    Attributes:
        jobs: to be computed.
        skipped: cells that cannot be run, each with its reason.
    """

    jobs: list[Job] = field(default_factory=list)
    skipped: list[Cell] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)

    @property
    def cells(self) -> list[Cell]:
        """Every cell: those of jobs in the order of the suite, then those that cannot be run."""
        return [cell for job in self.jobs for cell in job.cells] + self.skipped

    def add(self, cells: list[Cell], suite_digest: str) -> None:
        """Files cells that are computed together, without those that are there: two entries may come to the same."""
        new = [cell for cell in cells if cell.id not in self._ids]
        self._ids |= {cell.id for cell in new}
        self.skipped += [cell for cell in new if cell.skip]
        if wanted := tuple(cell for cell in new if not cell.skip):
            self.jobs.append(Job(wanted, suite_digest))
