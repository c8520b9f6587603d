"""Comparability of records in one table: attacked by the same attacks, trained on the same split, by one code.

A folder may hold several requests of one suite, each of them complete, under which defenses were trained or attacked
differently: by `--set`, a changed suite file, or another version of the code for a part of the seeds.
"""

from collections.abc import Iterable

from ..kinds import KINDS
from ..records.labels import key_of
from ..records.record import Record

TASK = (
    "model_settings", "model_digest", "private", "candidates", "non_member", "public", "optimizer", "schedule",
    "sampling", "statistics",
)  # fmt: skip
"""What a suite decides for all of its defenses; the rest of a task is theirs to override."""

SHARE = ("data", "model", "model_settings", "model_digest", "step", "steps", "batch", "images")
"""What it decides about shared updates."""


def attacks_tried(records: Iterable[Record], *, refused: bool = False) -> dict[str, tuple[str, str]]:
    """The attacks that were run, also those that failed: (kind, name) by all of their settings.

    A skipped attack, as where an extra is not installed, measured nothing, so a row without it lacks nothing.

    Args:
        records: of one row, of any status.
        refused: whether attacks count that were asked and answered that they do not apply to this release: a row was
            attacked by as many then, though it may be worse than what was measured.
    """
    found = {}
    for record in records:
        if record.attack is not None and (record.status != "skipped" or (refused and record.attack_refused)):
            # The same attack on another batch or step is another question.
            own = KINDS[record.kind].own_task
            share = {key: record.task.get(key) for key in SHARE} if own else None
            key = key_of((record.kind, record.attack.name, record.attack.settings, share))
            found[key] = (record.kind, record.attack.name)
    return found


def same_splits(records: Iterable[Record]) -> bool:
    """Whether all were trained on as many examples with the same model, and those of one seed on the same examples.

    Args:
        records: of one section.
    """
    tasks = [(record.seed, record.task) for record in records if not KINDS[record.kind].own_task]
    tables = {key_of({key: task.get(key) for key in TASK}) for _, task in tasks}
    splits = {(seed, task.get("digest")) for seed, task in tasks}
    # One digest for each seed: of one seed all rows have the same members.
    return len(tables) <= 1 and len(splits) == len({seed for seed, _ in splits})


def mixed(records: Iterable[Record]) -> dict[str, list[str]]:
    """Suite -> packages and code, in words, in which its records differ; a suite of one code is left out.

    A package that some lack is no difference, as when records are kept; settings of a defense may be tuned by
    themselves.

    Args:
        records: of a board; those without numbers do not count.
    """
    found: dict[str, dict[str, set[str]]] = {}
    for record in records:
        # What failed has no number that could be mixed with others; its code may have been mended since.
        if record.status == "ok":
            origin = record.provenance
            # Twelve digits are 48 bits, by which no two codes agree by accident.
            code = {"leakbench": f"{origin.version}, source {origin.source[:12]}", **origin.versions}
            code |= {f"the code of {name}": digest[:12] for name, digest in origin.third_party.items()}
            for name, value in code.items():
                found.setdefault(record.suite, {}).setdefault(name, set()).add(value)
    words = {
        suite: [f"{name} {' and '.join(sorted(values))}" for name, values in sorted(code.items()) if len(values) > 1]
        for suite, code in found.items()
    }
    return {suite: differing for suite, differing in words.items() if differing}
