"""Verification of a submission: cells drawn by a hash are computed again in a fresh folder, and compared.

The computation runs the submission's method file with the rights of the user. An attack by path runs in a process
without private data (`audit/isolation`), which is no sandbox; a defense runs in the process of the training.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch

from leakbench.leaderboard.kinds import KINDS
from leakbench.leaderboard.records.files import digest_of_bytes, read_bytes
from leakbench.leaderboard.records.manifest import Expected
from leakbench.leaderboard.records.record import Record
from leakbench.leaderboard.submissions.agreement import (
    Agreement,
    alike,
    fresh_seeds_agree,
    same_claim,
    same_seed,
)
from leakbench.leaderboard.submissions.cells import is_own, without_seed
from leakbench.leaderboard.submissions.check import CheckedSubmission
from leakbench.leaderboard.submissions.declaration import NAME, Declaration
from leakbench.leaderboard.submissions.identity import draw_digest, drawn_cells, fresh_seeds, results_digest
from leakbench.leaderboard.submissions.stamp import CellComparison, Stamp
from leakbench.leaderboard.submissions.tiers import UNVERIFIED

from ..plan import expand as planning
from ..plan.manifest import manifest_of
from ..run import harness
from ..run.progress import Report
from ..run.provenance import library
from ..run.verify import OF_EXTRAS
from ..suite.suite import Suite
from .suites import plain_suite, seeds_in, with_method, with_seeds

REQUEST = "request"
"""Name of a comparison of requests, where a metric has its own."""
MOST_REFUSALS = 2
"""Cells without a number that are computed again besides those that were drawn."""
MOST_LINES = 20
"""Differences between requests that a stamp lists."""


def verify(
    checked: CheckedSubmission,
    *,
    verifier: str,
    cells: int,
    fresh: int,
    salt: str,
    device: torch.device | None = None,
    jobs: int | None = None,
    report: Report = lambda done, total, activity: None,
) -> Stamp:
    """Computes drawn cells of a submission again; its method file is run.

    Args:
        checked: submission that counts.
        verifier: handle of the verifier.
        cells: number of cells to draw; all, if there are fewer.
        fresh: number of fresh seeds at which the drawn cells are computed besides; 0 for none. None are
            computed of a suite on checkpoints, because its zoo has no other seeds.
        salt: text drawn by the verifier, on which the draw depends.
        device: of the computation; None to decide for each training by its cost.
        jobs: processes.
        report: displays the progress.

    Returns:
        The stamp, which is not written.

    Raises:
        ValueError: the submission is set aside, or has nothing to compute again.
    """
    declaration = checked.declaration
    if declaration is None or not checked.counts:
        raise ValueError(f"{checked.path} is set aside; see leakbench submit {checked.path} --check")
    results = results_digest(checked.folder)
    draw = draw_digest(checked.digest, results, salt)

    def own(record: Record) -> bool:
        return is_own(declaration, record.defense.name, record.attack and record.attack.name)

    drawn = drawn_cells(checked.records, draw, cells, own)
    if not drawn:
        raise ValueError(f"{checked.path} has no cell with a number")
    plain = plain_suite(declaration.suite, declaration.small)
    fresh = 0 if plain.zoo is not None else fresh
    seeds, new = seeds_in(plain, checked.digest), fresh_seeds(draw, fresh)
    runner = _Runner(declaration, checked.folder, device, jobs, report)
    with runner.in_a_fresh_folder():
        reported = with_seeds(plain, seeds)
        refused = _drawn_refusals(checked, draw)
        again = runner.run(reported, {record.id for record in (*drawn, *refused)})
        comparisons = [line for record in drawn for line in _same_seed(record, again.get(record.id))]
        comparisons += [line for record in refused for line in _still_refused(record, again.get(record.id))]
        comparisons += _requests(checked, runner.cells(reported))
        if fresh:
            comparisons += _fresh(runner, reported, with_seeds(plain, new), drawn, checked.records)
    declared = digest_of_bytes(read_bytes(checked.folder / NAME, "declaration"))
    return Stamp(
        request=checked.digest,
        declaration=declared,
        results=results,
        verifier=verifier,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=", ".join(sorted({record.device for record in again.values()})) or "none",
        code=library(),
        salt=salt,
        drawn=len(drawn),
        fresh=new,
        cells=tuple(record.id for record in drawn),
        comparisons=tuple(comparisons),
    )


class _Runner:
    """Runs cells of suites in a fresh folder that holds a copy of the submission's method file, and nothing else."""

    def __init__(
        self, declaration: Declaration, source: Path, device: torch.device | None, jobs: int | None, report: Report
    ) -> None:
        self.declaration, self.source = declaration, source
        self.device, self.jobs, self.report = device, jobs, report

    @contextlib.contextmanager
    def in_a_fresh_folder(self) -> Iterator[None]:
        """Works in a temporary folder, in which the method has the path that its records name."""
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            # Nothing else is copied: a compiled file of the submission could be imported in the source's place.
            if self.declaration.method is not None:
                shutil.copyfile(self.source / self.declaration.method.file, self.declaration.method.file)
            yield

    def cells(self, suite: Suite) -> list[Expected]:
        """Returns the cells of a suite with the submission's method."""
        larger = with_method(self.declaration, suite)
        return list(manifest_of(planning.plan(larger), larger, secure_noise=False).cells)

    def run(self, suite: Suite, ids: set[str]) -> dict[str, Record]:
        """Computes cells of a suite, and returns their records by id."""
        larger = with_method(self.declaration, suite)
        folder = Path(f"results-{larger.digest[:16]}")
        records = harness.run(larger, folder, device=self.device, jobs=self.jobs, only=ids, report=self.report)
        return {record.id: record for record in records}


def _drawn_refusals(checked: CheckedSubmission, draw: str) -> list[Record]:
    """Returns some cells of the method whose attack is said not to apply: a number could hide behind the sentence."""
    refused = [record for record in checked.own if record.attack_refused]
    return sorted(refused, key=lambda record: digest_of_bytes(f"{draw} {record.id}".encode()))[:MOST_REFUSALS]


def _still_refused(reported: Record, again: Record | None) -> list[CellComparison]:
    """Returns a line if a cell without a number has one when it is computed again."""
    if again is not None and again.attack_refused:
        return []
    reason = (
        "the code makes no such cell" if again is None else f"it is reported as skipped, and again it {again.status}"
    )
    return [_line(reported, "same", REQUEST, None, None, Agreement("differs", reason))]


def _requests(checked: CheckedSubmission, planned: Iterable[Expected]) -> list[CellComparison]:
    """Returns the differences between the requested cells and those that the method's code requests.

    A check cannot know them: a cell that was left out, or skipped for a reason that the code does not give.
    """
    plan = {cell.id: cell for cell in planned}
    requested = {cell.id: cell for manifest in checked.manifests for cell in manifest.cells}
    lines = []
    for name in sorted(plan.keys() | requested.keys()):
        theirs, ours = requested.get(name), plan.get(name)
        cell = ours or theirs
        if theirs is None:
            reason = "the code requests this cell, and the submission does not"
        elif ours is None:
            reason = "the submission requests this cell, and the code does not"
        elif theirs.skip and not ours.skip:
            reason = f"the submission skips this cell, and the code does not: {theirs.skip}"
        else:
            continue
        if cell is not None:
            lines.append(
                CellComparison(
                    cell=name, words=cell.words, seeds="same", metric=REQUEST, reported=None, again=None,
                    verdict="differs", main=False, reason=reason,
                )
            )  # fmt: skip
    return lines[:MOST_LINES]


def _unverified(record: Record) -> list[str]:
    return sorted(flag for flag in record.flags if flag.startswith(UNVERIFIED))


def _same_seed(reported: Record, again: Record | None) -> list[CellComparison]:
    """Compares all numbers of a cell with those computed again by its own seed."""
    if again is None or again.status != "ok":
        reason = "the code makes no such cell" if again is None else f"it {again.status}: {again.reason}"
        return [_line(reported, "same", "claim", None, None, Agreement("differs", f"computed again, {reason}"))]
    equal_code = alike(reported, again)
    claims = [None if record.claim is None else record.claim.epsilon for record in (reported, again)]
    claim = same_claim(reported.claim, again.claim, alike=equal_code)
    lines = (
        [] if reported.claim is again.claim is None else [_line(reported, "same", "claim", claims[0], claims[1], claim)]
    )
    if _unverified(reported) != _unverified(again):
        reason = f"it is flagged {_unverified(reported)}, and again {_unverified(again)}"
        lines.append(_line(reported, "same", "flags", None, None, Agreement("differs", reason)))
    for name in sorted(reported.metrics.keys() | again.metrics.keys()):
        metrics = [record.metrics.get(name) for record in (reported, again)]
        if metrics[0] is None or metrics[1] is None:
            agreement, values = Agreement("differs", "only one of both has the metric"), (None, None)
        else:
            agreement = same_seed(metrics[0], metrics[1], alike=equal_code, optional=name in OF_EXTRAS)
            values = (metrics[0].value, metrics[1].value)
        lines.append(_line(reported, "same", name, *values, agreement))
    return lines


def _fresh(
    runner: _Runner, suite: Suite, fresh: Suite, drawn: list[Record], reported: Iterable[Record]
) -> list[CellComparison]:
    """Compares the main metric of drawn cells, over the reported seeds, with the same over fresh seeds."""
    old, new = _by_cell(runner.cells(suite)), _by_cell(runner.cells(fresh))
    cell_of = {cell.id: key for key, cells in old.items() for cell in cells}
    # Two drawn cells may be the same but for their seeds, and are one comparison.
    keys = {cell_of[record.id] for record in drawn if record.id in cell_of}
    again = runner.run(fresh, {cell.id for key in keys for cell in new.get(key, [])})
    by_id = {record.id: record for record in reported}
    lines = []
    for record in drawn:
        if (key := cell_of.get(record.id)) is None:  # the comparison by its own seed says so
            continue
        name = main_metric(record)
        samples = [
            [table[c.id].metrics[name] for c in cells if c.id in table and name in table[c.id].metrics]
            for table, cells in ((by_id, old[key]), (again, new.get(key, [])))
        ]
        means = [_mean([metric.value for metric in sample if metric.value is not None]) for sample in samples]
        agreement = fresh_seeds_agree(*samples, looks=len(keys))
        lines.append(_line(record, "fresh", name, means[0], means[1], agreement))
    return lines


def main_metric(record: Record) -> str:
    """Returns the metric by which a cell counts as computed again: its kind's main one, or the first with a value."""
    main = KINDS[record.kind].main
    measured = [name for name, metric in record.metrics.items() if metric.value is not None]
    return main if main in measured or not measured else measured[0]


def _by_cell(cells: Iterable[Expected]) -> dict[str, list[Expected]]:
    """Groups cells that differ in their seeds alone."""
    groups: dict[str, list[Expected]] = {}
    for cell in cells:
        groups.setdefault(without_seed(cell), []).append(cell)
    return groups


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _line(
    record: Record,
    seeds: Literal["same", "fresh"],
    metric: str,
    reported: float | None,
    again: float | None,
    agreement: Agreement,
) -> CellComparison:
    attack = record.attack.name if record.attack else record.kind
    return CellComparison(
        cell=record.id,
        words=f"{record.defense.name} x {attack}" + (f" ({record.control} control)" if record.control else ""),
        seeds=seeds,
        metric=metric,
        reported=reported,
        again=again,
        low=agreement.low,
        high=agreement.high,
        verdict=agreement.verdict,
        main=metric == main_metric(record),
        reason=agreement.reason,
    )
