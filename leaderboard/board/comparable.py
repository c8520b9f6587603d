"""Comparability of the rows of a table: equal attacks, training splits and code.

A folder may hold several complete requests of a suite under which defenses were trained or attacked differently: with
`--set`, with a changed suite file, or with another version of the code for some of the seeds.
"""

from collections.abc import Iterable

from ..kinds import KINDS
from ..records.labels import key_of
from ..records.record import Record


def attacks_tried(records: Iterable[Record], *, refused: bool = False) -> dict[str, tuple[str, str]]:
    """Returns the attacks that ran, failures included: key of kind, name and settings -> (kind, name).

    Skipped attacks, for example without an extra, do not count: a row is not at a disadvantage for them.

    Args:
        records: of a row, of any status.
        refused: whether to count attacks that refused the release as outside their scope. Such a row was attacked by as
            many as others, though its worst case may be worse than measured.
    """
    attacks = {}
    for record in records:
        if record.attack is not None and (record.status != "skipped" or (refused and record.attack_refused)):
            # The same attack on another batch or step is a different measurement.
            share = record.task.fixed if KINDS[record.kind].own_task else None
            key = key_of((record.kind, record.attack.name, record.attack.settings, share))
            attacks[key] = (record.kind, record.attack.name)
    return attacks


def same_splits(records: Iterable[Record]) -> bool:
    """Returns whether the records have equal fixed settings of the task, and those of a seed the same split.

    Args:
        records: of a section.
    """
    tasks = [(record.seed, record.task) for record in records if not KINDS[record.kind].own_task]
    tables = {key_of(task.fixed) for _, task in tasks}
    splits = {(seed, task.digest) for seed, task in tasks}
    # A single digest for each seed: all rows of a seed have the same members.
    return len(tables) <= 1 and len(splits) == len({seed for seed, _ in splits})


def mixed(records: Iterable[Record]) -> dict[str, list[str]]:
    """Lists the packages and code in which a suite's records differ, by suite; suites of uniform code are left out.

    A package that some records lack is no difference, as when old records are kept. Digests of tuning are not compared,
    because defenses may be tuned separately.

    Args:
        records: of a board; records without numbers do not count.
    """
    versions: dict[str, dict[str, set[str]]] = {}
    for record in records:
        # A failed record has no number that could be mixed with others, and its code may have been fixed since.
        if record.status == "ok":
            origin = record.provenance
            # Twelve hexadecimal digits are 48 bits: no two versions agree by accident.
            code = {"leakbench": f"{origin.version}, source {origin.source[:12]}", **origin.versions}
            code |= {f"the code of {name}": digest[:12] for name, digest in origin.third_party.items()}
            for name, value in code.items():
                versions.setdefault(record.suite, {}).setdefault(name, set()).add(value)
    words = {
        suite: [f"{name} {' and '.join(sorted(values))}" for name, values in sorted(code.items()) if len(values) > 1]
        for suite, code in versions.items()
    }
    return {suite: differing for suite, differing in words.items() if differing}
