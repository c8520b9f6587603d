"""Heat maps of attacks on a client's classes: the fraction that each client holds of each class, and the named classes.

Records of the kind `client_property` have a row for each client and class beside them. A property of a client's whole
data is not what an epsilon for one of its examples is about, and the page says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from ..board.aggregate import BoardCell, over_seeds
from ..board.rows import Row
from ..kinds import KINDS
from ..metrics import METRICS
from ..records.folder import ArraysFolder
from ..records.record import Record, RecordError
from .figures import epsilon_words
from .plots import Style, marker
from .seed_bands import read_columns

KIND = KINDS["client_property"].name
METRIC = METRICS[KINDS[KIND].main]

MOST_CLIENTS, MOST_CLASSES, MOST_MAPS = 20, 30, 16
"""Largest numbers of clients and classes of a map, and of maps of a section."""

_COLUMNS = ("client", "class", "held", "named")


@dataclass(frozen=True, kw_only=True)
class MapCell:
    """Class of a client: the fraction of the client's examples in it, and whether the attack named it."""

    held: float
    named: bool


@dataclass(frozen=True, kw_only=True)
class ClassMap:
    """Heat map of a row of the board and an attack, with one seed.

    Attributes:
        name: of the row.
        key: its mark in the plots.
        attack: label.
        words: metric over seeds, and the row's claim.
        classes: numbers of the columns.
        lines: number of the client and its cells, in the order of the classes.
        attacked: number of clients, those left out included.
        named: number of named classes of all clients.
        right: those among them that are the client's largest, of as many as were named.
        seed: of the record shown.
        remarks: sentences, as on clients left out.
    """

    name: str
    key: Markup
    attack: str
    words: str
    classes: tuple[int, ...]
    lines: tuple[tuple[int, tuple[MapCell, ...]], ...]
    attacked: int
    named: int
    right: int
    seed: int
    remarks: tuple[str, ...] = ()


def class_maps(rows: Sequence[Row], folder: ArraysFolder, style: Style) -> tuple[list[ClassMap], list[str]]:
    """Heat maps of a section, and sentences on records that cannot be drawn.

    Args:
        rows: of the section.
        folder: of the arrays of the records.
        style: method -> (colour, marker).
    """
    maps, left_out = [], []
    for row in rows:
        for cell in row.cells:
            if cell.kind != KIND:
                continue
            try:
                maps.append(class_map(row, cell, folder, style))
            except RecordError as error:
                left_out.append(f"Not shown: {row.label}, {cell.attack}: {error}.")
    if len(maps) > MOST_MAPS:
        left_out.append(f"Not shown: {len(maps) - MOST_MAPS} further rows, whose numbers are on the board.")
    return maps[:MOST_MAPS], left_out


def class_map(row: Row, cell: BoardCell, folder: ArraysFolder, style: Style) -> ClassMap:
    """Heat map of a row's first seed.

    Raises:
        RecordError: arrays are missing or bad.
    """
    record = next(iter(cell.records.values()))
    lines, classes, counts = map_lines(record, folder)
    remarks = []
    if len(lines) > MOST_CLIENTS:
        remarks.append(f"The first {MOST_CLIENTS} of {len(lines)} clients are shown.")
    if len(classes) > MOST_CLASSES:
        remarks.append(f"The first {MOST_CLASSES} of {len(classes)} classes are shown.")
    estimate = over_seeds(METRIC.name, cell)
    words = f"{METRIC.name_in_notes} {estimate.words(METRIC.digits)}"
    words += f" over {estimate.n} seeds" if estimate.n > 1 else ""
    if METRIC.floor is not None and (floor := over_seeds(METRIC.floor.metric, cell)).value is not None:
        words += f" ({METRIC.floor.of}: {floor.value:.{METRIC.digits}f})"
    return ClassMap(
        name=row.label,
        key=marker(*style[row.method]),
        attack=cell.attack or "",
        words=f"{words}, claimed ε {epsilon_words(row)}",
        classes=classes[:MOST_CLASSES],
        lines=tuple((client, cells[:MOST_CLASSES]) for client, cells in lines[:MOST_CLIENTS]),
        **counts,
        seed=record.seed,
        remarks=tuple(remarks),
    )


def map_lines(
    record: Record, folder: ArraysFolder
) -> tuple[list[tuple[int, tuple[MapCell, ...]]], tuple[int, ...], dict[str, int]]:
    """Clients with their cells, the classes, and counts of clients, named classes and right ones.

    Raises:
        RecordError: arrays are missing, bad, or lack a class of a client.
    """
    table = read_columns(record, folder, _COLUMNS)
    if not all(np.isfinite(values).all() for values in table.values()):
        raise RecordError("its arrays must hold finite numbers")
    numbers = {key: table[key].astype(int) for key in ("client", "class")}
    if not np.isin(table["named"], (0, 1)).all():
        raise RecordError("its arrays must hold 0 or 1 as named")
    shares, named = table["held"], table["named"].astype(bool)
    classes, clients = (tuple(np.unique(numbers[key]).tolist()) for key in ("class", "client"))
    places = set(zip(numbers["client"].tolist(), numbers["class"].tolist(), strict=True))
    if not shares.size:
        raise RecordError("no client sent a message")
    if len(places) != shares.size or shares.size != len(classes) * len(clients):
        raise RecordError("its arrays must have each class of each client once")
    if not ((shares >= 0) & (shares <= 1)).all():
        raise RecordError("its arrays must hold fractions of a client's examples")
    order = np.lexsort((numbers["class"], numbers["client"]))
    fractions, names = (values[order].reshape(len(clients), len(classes)) for values in (shares, named))
    if (fractions.sum(axis=1) > 1 + 1e-6).any():
        raise RecordError("its arrays must hold fractions of a client's examples, which sum to 1 at most")
    # A class is right if it is held, and fewer classes than were named are larger.
    larger = np.stack([np.searchsorted(np.sort(-own), -own, side="left") for own in fractions])
    right = names & (fractions > 0) & (larger < names.sum(axis=1, keepdims=True))
    lines = [
        (client, tuple(MapCell(held=float(share), named=bool(name)) for share, name in zip(*cells, strict=True)))
        for client, *cells in zip(clients, fractions, names, strict=True)
    ]
    counts = {"attacked": len(clients), "named": int(names.sum()), "right": int(right.sum())}
    return lines, classes, counts
