"""Threat models of a board: the accesses of its attacks, and its worst cases among the attacks of an access.

An adversary that sees more can run the attacks of an adversary that sees less, so the worst case for all steps includes
attacks on the final model. Active servers are in no row, and so in no threat model here.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..metrics import METRICS, columns
from ..records.manifest import Expected
from ..records.record import Record
from .rows import Row, attacked_by

WORDS = {
    "LABEL_ONLY": "labels of the final model",
    "BLACK_BOX": "answers of the final model",
    "WHITE_BOX": "parameters of the final model",
    "BROADCAST": "the model before every step or round",
    "FEDERATED": "all messages of a client",
    "ALL_STEPS": "the update of every step",
    "ONE_OFF": "releases beside the steps",
    "UPDATE": "one shared update",
}
"""Access in records -> view of its adversary, from the final model to the training."""

_FINAL = ("LABEL_ONLY", "BLACK_BOX", "WHITE_BOX")

INCLUDED = {
    "BLACK_BOX": _FINAL[:1],
    "WHITE_BOX": _FINAL[:2],
    "BROADCAST": _FINAL,
    "FEDERATED": (*_FINAL, "BROADCAST"),
    "ALL_STEPS": (*_FINAL, "BROADCAST", "ONE_OFF"),
}
"""Access -> other accesses whose attacks its adversary can run, too."""

NOT_ATTACKED = "not attacked under this threat model"


def words(access: str) -> str:
    """Returns the view of an access's adversary in words; the access itself if it is not in the table."""
    return WORDS.get(access, access.replace("_", " ").lower())


def accesses(rows: Sequence[Row]) -> list[str]:
    """Returns the accesses of all attacks that were tried, in the order of the table, others by name.

    Args:
        rows: of a board.
    """
    names = set(_accesses_of_attacks(rows).values())
    return [name for name in WORDS if name in names] + sorted(names - set(WORDS))


def under(rows: Sequence[Row], access: str) -> list[Row]:
    """Returns the rows as if only the attacks of a threat model had been tried (`rows.attacked_by`).

    Args:
        rows: of a board, in its order.
        access: of the adversary. A cell whose attack never ran, so that its access is unknown, counts as missing in
            every threat model.
    """
    of_attack, reached = _accesses_of_attacks(rows), {access, *INCLUDED.get(access, ())}

    def kept(cell: Record | Expected) -> bool:
        needed = cell.requires.access if isinstance(cell, Record) and cell.requires else None
        needed = needed or (of_attack.get(cell.attack.name) if cell.attack else None)
        return needed is None or needed in reached

    return [_with_reason(row) for row in attacked_by(rows, kept)]


def _with_reason(row: Row) -> Row:
    """States that nothing was tried, for kinds without a cell or a refusal."""
    tried = {record.kind for record in (*row.records, *row.unranked)}
    estimates = dict(row.estimates)
    for metric, column in columns():
        if METRICS[metric.name].of_attack and metric.kind not in tried:
            estimates[column.key] = replace(estimates[column.key], reason=NOT_ATTACKED)
    return replace(row, estimates=estimates)


def _accesses_of_attacks(rows: Sequence[Row]) -> dict[str, str]:
    records = [record for row in rows for record in (*row.records, *row.unranked)]
    return {r.attack.name: r.requires.access for r in records if r.attack and r.requires and r.requires.access}
