"""Requests of a folder against the suites that this version knows by name: other files, cells left out, forged ids."""

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..kinds import JUDGED
from ..records.labels import key_of
from ..records.manifest import Expected, Manifest
from ..records.record import Record
from ..records.task import TrainingTask
from .fault import Fault
from .text import printable

LONGEST = 2000
"""Characters up to which a word of a command is parsed."""

Zoo = Mapping[str, tuple[str, str]]
"""SHA-256 of a checkpoint's manifest -> its name and the SHA-256 of its weights."""


@dataclass(frozen=True, kw_only=True)
class KnownSuite:
    """Suite of this version.

    Attributes:
        digest: of its file.
        cells: all of them; empty if they cannot be listed here, as without the suite's data.
        checkpoints: of its zoo; empty for a suite that trains.
    """

    digest: str
    cells: Sequence[Expected] = ()
    checkpoints: Zoo = field(default_factory=dict)


KnownSuites = Callable[[Sequence[Manifest]], Sequence[KnownSuite | None]]
"""Requests -> the suites of their names, with the seeds that they ask for; None for a name that this version lacks."""


def checkpoint_faults(records: Mapping[str, Record], zoos: Mapping[str, Zoo]) -> Iterator[Fault]:
    """Yields records of checkpoints that their zoo lacks, or that name another one than their digest.

    Args:
        records: by path below the checked folder, valid.
        zoos: by digest of the suite that attacks their checkpoints.
    """
    for file, record in records.items():
        task, zoo = record.task, zoos.get(record.suite_digest)
        if not zoo or record.status != "ok" or not isinstance(task, TrainingTask):
            continue
        if (pinned := zoo.get(task.checkpoint_digest)) is None:
            problem = "it is that of no checkpoint of the suite's zoo as it is here"
            yield Fault(file=file, field="task.checkpoint_digest", problem=problem)
        elif task.checkpoint is not None and (task.checkpoint.name, task.checkpoint.sha256) != pinned:
            problem = f"it must be {pinned[0]}, whose weights have the SHA-256 {pinned[1]}, by its checkpoint_digest"
            yield Fault(file=file, field="task.checkpoint", problem=problem)


def suite_faults(
    manifests: Mapping[str, Manifest], records: Sequence[Record], known: Mapping[str, KnownSuite | None]
) -> Iterator[Fault]:
    """Yields the differences between requests and the suites of their names.

    Args:
        manifests: by path below the checked folder.
        records: of the folder, valid.
        known: suites of this version, by the same paths.
    """
    changed = {record.suite for record in records if record.changes}
    requested = {cell.id for manifest in manifests.values() for cell in manifest.cells}
    compared: set[str] = set()
    for file, manifest in manifests.items():
        suite = known.get(file)
        if suite is None:
            continue
        if suite.digest != manifest.suite_digest:
            if manifest.suite not in changed:
                problem = (
                    f"its file is not that of suite {printable(manifest.suite)} of this version, and no record says "
                    "what was changed; another version may have changed it"
                )
                yield Fault(file=file, field="suite_digest", problem=problem, severity="flagged")
            continue
        own = {cell.id for cell in suite.cells}
        added, methods = _added(manifest), {method for cell in suite.cells for method in _methods(cell)}
        counts: Counter[str] = Counter()
        for i, cell in enumerate(manifest.cells):
            if not own or cell.id in own:
                continue
            # Ids of an added method depend on its code, which no check runs.
            foreign = {name for name, _ in _methods(cell) - methods}
            if foreign and foreign <= added:
                counts.update(foreign)
            else:
                problem = f"{cell.id} is no cell of its suite: the id does not follow from the suite of that digest"
                yield Fault(file=file, field=f"cells[{i}].id", problem=problem)
        for name, count in counts.items():
            problem = (
                f"{count} cells are of {printable(name)}, which the command added to the suite: not compared with it"
            )
            yield Fault(file=file, field="cells", problem=problem, severity="flagged")
        if own.isdisjoint(compared):  # two requests of one suite together are the whole of it
            compared |= own
            yield from _left_out(file, [cell for cell in suite.cells if cell.id not in requested], len(own))


def _methods(cell: Expected) -> set[tuple[str, str]]:
    """Names and settings of a cell's defense and attack."""
    methods = [cell.defense] if cell.attack is None else [cell.defense, cell.attack]
    return {(method.name, key_of(method.settings)) for method in methods}


def _added(manifest: Manifest) -> set[str]:
    """Names of the methods that a request's command adds to the suite."""
    names = set()
    for option, word in zip(manifest.command, manifest.command[1:], strict=False):
        if option in ("--add-defense", "--add-attack"):
            try:
                # Time grows with the cube of the number of dots in a key.
                name = tomllib.loads(f"entry = {word}")["entry"]["name"] if len(word) <= LONGEST else word
            except (tomllib.TOMLDecodeError, TypeError, KeyError, RecursionError):
                name = word
            names.add(str(name))
    return names


def _left_out(file: str, cells: Sequence[Expected], of: int) -> Iterator[Fault]:
    """Yields cells of the suite that no request has; a defense's own cells may be left out, a control may not."""
    controls = [cell for cell in cells if cell.control in JUDGED]
    if controls:
        problem = f"{len(controls)} cells of the suite's controls are not requested, as {controls[0].words}"
        yield Fault(file=file, field="controls", problem=f"{problem}, seed {controls[0].seed}; run the whole suite")
    if others := [cell for cell in cells if cell.control not in JUDGED]:
        problem = f"{len(others)} of {of} cells of the suite are not requested, as {others[0].words}"
        yield Fault(file=file, field="cells", problem=f"{problem}, seed {others[0].seed}", severity="flagged")
