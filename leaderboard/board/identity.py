"""Id of a row, which does not change when seeds or records are added, and version of a board."""

from functools import cache

import leakbench

from ..records.files import digest_of_bytes
from ..records.labels import key_of
from ..records.record import SCHEMA
from .rows import Row

DIGITS = 16
"""Hexadecimal digits of a row's id, as many as of a record's: 64 bits."""


def row_id(row: Row) -> str:
    """Returns a digest of suite, defense with its settings, budget, task, control and kind of noise.

    Seeds, attacks, metrics, claims, flags and code are no part of it, so a row keeps its id when they are added or
    measured again. Caveat: a row of shared updates alone has the task of its update, so its id changes with the first
    record of a training.

    Args:
        row: of any board.

    Returns:
        Hexadecimal digits.
    """
    # `secure` noise has rows of its own (`rows_from`), which nothing else tells apart.
    secure = any(record.noise == "secure" for record in (*row.records, *row.unranked))
    identity = (row.suite, row.defense.name, row.defense.settings, row.budget, row.task, row.control, secure)
    return digest_of_bytes(key_of(identity).encode())[:DIGITS]


@cache
def board_version() -> str:
    """Returns the versions of the package and of the record's schema, as "leakbench 0.1.0, record schema 2"."""
    return f"leakbench {leakbench.__version__}, record schema {SCHEMA}"
