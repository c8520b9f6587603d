"""Faults of a submission's method or checkpoint: its file, compared with the code that computed the records."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..checks.fault import Fault
from ..checks.text import MOST_NAMED, listed, printable
from ..records.files import digest_of_bytes, read_bytes
from ..records.record import Record
from ..records.task import TrainingTask
from .cells import is_own
from .declaration import NAME, Declaration
from .identity import code_digest

LARGEST_METHOD = 2**20
"""Bytes of a method's file."""


def code_faults(
    folder: Path, path: str, declaration: Declaration, records: Iterable[Record], single_file: Callable[[Path], str]
) -> Iterator[Fault]:
    """Yields faults of the method's file or the checkpoint, compared with the code that computed the records.

    Args:
        folder: of the submission.
        path: of the folder below its root, for faults.
        declaration: of the submission.
        records: of the submission.
        single_file: returns why a method's file is not all of its code; empty if it is.
    """
    method, checkpoint = declaration.method, declaration.checkpoint
    roles: dict[str, str] = {}
    if method is not None:
        file = folder / method.file
        if not file.is_file():
            yield Fault(
                file=f"{path}/{NAME}",
                field="method.file",
                problem=f"must lie beside the declaration, and {method.file} does not",
            )
            return
        if file.stat().st_size > LARGEST_METHOD:
            yield Fault(file=f"{path}/{method.file}", field="", problem=f"must have at most {LARGEST_METHOD} bytes")
            return
        actual = digest_of_bytes(read_bytes(file))
        if actual != method.sha256:
            yield Fault(
                file=f"{path}/{NAME}", field="method.sha256", problem=f"must be that of {method.file}, {actual}"
            )
        if why := single_file(file):
            yield Fault(file=f"{path}/{method.file}", field="", problem=why)
        roles = {f"{declaration.kind} {method.name}": code_digest(file)}
    elif checkpoint is not None:
        records = [*records]
        yield from _checkpoint(folder, path, declaration, records)
    others: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for role, code in record.provenance.third_party.items():
            if role not in roles:
                others.setdefault((role, "is code of a third party that the declaration does not name"), []).append(
                    record.id
                )
            elif code != roles[role]:
                problem = "was computed by another file than the one that lies here"
                others.setdefault((role, problem), []).append(record.id)
        for role in roles:
            own = is_own(declaration, record.defense.name, record.attack and record.attack.name)
            if own and role not in record.provenance.third_party:
                others.setdefault((role, "has no digest of the code that computed it"), []).append(record.id)
    for (role, problem), ids in sorted(others.items()):
        yield Fault(
            file=f"{path}/records",
            field=f"provenance.third_party.{printable(role)}",
            problem=f"{problem}: {listed(ids)}",
        )


def _checkpoint(folder: Path, path: str, declaration: Declaration, records: Iterable[Record]) -> Iterator[Fault]:
    checkpoint = declaration.checkpoint
    if checkpoint is None:
        return
    tasks = [record.task for record in records]
    named = {task.checkpoint.sha256 for task in tasks if isinstance(task, TrainingTask) and task.checkpoint is not None}
    if not named:
        problem = "its records are of trainings and name no checkpoint, so this digest is the submitter's word"
        yield Fault(file=f"{path}/{NAME}", field="checkpoint.sha256", problem=problem, severity="flagged")
    elif checkpoint.sha256 not in named:
        problem = f"must be that of a checkpoint that its records name, one of {', '.join(sorted(named)[:MOST_NAMED])}"
        yield Fault(file=f"{path}/{NAME}", field="checkpoint.sha256", problem=printable(problem, 400))
    if checkpoint.file is None:
        return
    if not (folder / checkpoint.file).is_file():
        yield Fault(
            file=f"{path}/{NAME}",
            field="checkpoint.file",
            problem=f"must lie beside the declaration: {checkpoint.file}",
        )
    elif (actual := digest_of_bytes(read_bytes(folder / checkpoint.file))) != checkpoint.sha256:
        yield Fault(
            file=f"{path}/{NAME}", field="checkpoint.sha256", problem=f"must be that of {checkpoint.file}, {actual}"
        )
