"""Rounds of a row of the board: columns of the arrays beside its records, of the rounds that all of its seeds have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ..board.rows import Row
from ..kinds import KINDS
from ..metrics import METRICS
from ..records.folder import ArraysFolder
from ..records.record import RecordError
from .seed_bands import read_columns, refuse_outside

KIND = KINDS["rounds"].name

_COLUMNS = ("round", "accuracy", "loss", "bytes_up", "bytes_down", "drift")


@dataclass(frozen=True, kw_only=True)
class RoundTable:
    """Rounds of a row that all of its seeds have.

    Attributes:
        row: of the board.
        seeds: in order.
        rounds: numbers, from 1.
        columns: column of the arrays -> its values.
    """

    row: Row
    seeds: tuple[int, ...]
    rounds: Float[ndarray, " rounds"]
    columns: dict[str, Float[ndarray, "seeds rounds"]]


def round_table(row: Row, folder: ArraysFolder) -> RoundTable | None:
    """Rounds of a row; None if it has no records of them.

    Raises:
        RecordError: arrays are missing or bad.
    """
    cell = next((cell for cell in row.cells if cell.kind == KIND), None)
    if cell is None:
        return None
    parts = [read_columns(record, folder, _COLUMNS) for record in cell.records.values()]
    rounds = min((part["round"] for part in parts), key=len)
    if not len(rounds):
        raise RecordError("its arrays have no round")
    if not all(np.array_equal(part["round"][: len(rounds)], rounds) for part in parts):
        raise RecordError("its seeds have different rounds")
    for part in parts:
        _refuse_impossible(part)
    stacked = {key: np.stack([part[key][: len(rounds)] for part in parts]) for key in _COLUMNS[1:]}
    return RoundTable(row=row, seeds=tuple(cell.records), rounds=rounds + 1, columns=stacked)


def _refuse_impossible(part: Mapping[str, Float[ndarray, " rounds"]]) -> None:
    """Refuses rounds out of order, bytes that become fewer, and numbers that a quantity cannot have."""
    refuse_outside(part, "round", whole=True)
    refuse_outside(part, "accuracy", METRICS["accuracy"].most)
    for name in ("bytes_up", "bytes_down"):
        refuse_outside(part, name, whole=True)
        if (np.diff(part[name]) < 0).any():
            raise RecordError(f"its arrays must hold {name} so far, which never become fewer")
    # A model that diverged has a loss without a finite value, and keeps its other curves.
    refuse_outside(part, "loss", math.inf, missing=True, infinite=True)
    refuse_outside(part, "drift", missing=True, infinite=True)
    if (np.diff(part["round"]) <= 0).any():
        raise RecordError("its arrays must hold the rounds in order")
