"""Difference of two folders of records, or of two boards: rows and cells added, removed and changed.

A cell is the same in both if its suite, methods with settings, budget, task and seed are, whatever its id. What remains
is paired by its name where that is unambiguous, and its settings then differ. Times and machines are no differences:
two runs of the same code with the same seeds are equal if their numbers are.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..board.table import Board
from ..metrics import columns
from ..records.fields import Provenance
from ..records.files import read_bytes
from ..records.folder import read_folder
from ..records.labels import key_of, public
from ..records.left_out import FLAG as LEFT_OUT
from ..records.record import Record
from ..records.validation import RecordError, json_values, parse_json
from .cells import cell_key
from .text import printable

ACTIVE = "active_server."
"""Prefix of an active server's metrics, whose drift is no honest attack's."""


@dataclass(frozen=True, kw_only=True)
class NumberChange:
    """Number that differs between the two sides.

    Attributes:
        name: of the metric, or field of a board's row.
        before: value, low and high; None for what was not measured.
        after: the same.
        difference: after - before; None without both values.
        disjoint: whether the intervals have no point in common; None without both intervals.
    """

    name: str
    before: tuple[float | None, float | None, float | None]
    after: tuple[float | None, float | None, float | None]
    difference: float | None
    disjoint: bool | None


@dataclass(frozen=True, kw_only=True)
class ItemChange:
    """Row or cell that differs.

    Attributes:
        name: in words.
        numbers: that differ.
        fields: others that differ, as name -> (before, after), in JSON values.
    """

    name: str
    numbers: tuple[NumberChange, ...] = ()
    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.numbers or self.fields)


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Rows or cells of one side against the other.

    Attributes:
        added: names of those that only the second side has.
        removed: names of those that only the first side has.
        changed: those that differ.
        same: number of the others.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[ItemChange, ...]
    same: int

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclass(frozen=True, kw_only=True)
class Drift:
    """ItemChange of a number over all rows or cells that have it on both sides.

    Attributes:
        name: of the metric.
        compared: number of values on both sides.
        changed: number of those that differ.
        mean: of the differences, zeros included.
        largest: difference of the largest magnitude, with its sign.
        where: name of the row or cell that has it.
        disjoint: number of pairs of disjoint intervals.
    """

    name: str
    compared: int
    changed: int
    mean: float
    largest: float
    where: str
    disjoint: int


@dataclass(frozen=True, kw_only=True)
class BoardDiff:
    """Difference of two boards.

    Attributes:
        rows: of the boards.
        cells: of the records; None if a side is a board without records.
        drift: by metric of the cells, else by field of the rows.
    """

    rows: Differences
    cells: Differences | None
    drift: tuple[Drift, ...]

    @property
    def equal(self) -> bool:
        """True if nothing differs."""
        return not self.rows and not self.cells

    def to_dict(self) -> dict[str, Any]:
        """Returns the difference as plain JSON values."""
        return json_values(asdict(self) | {"equal": self.equal})


@dataclass(frozen=True)
class _Item:
    """Row or cell, by what is compared of it."""

    name: str
    numbers: Mapping[str, tuple[float | None, float | None, float | None]]
    fields: Mapping[str, Any]


_Side = tuple[dict[str, _Item], dict[str, _Item] | None]


def diff(before: Path, after: Path) -> BoardDiff:
    """Compares two folders of records, or two files `board.json` that `leaderboard page` or `build` wrote.

    Args:
        before: output of a run, its folder of records, or a board.
        after: the same.

    Raises:
        RecordError: there is no such folder or file, or it holds no records, a bad record or no board; a check names
            all faults of a folder.
        BoardError: a cell and seed was recorded twice.
    """
    (rows, cells), (rows_after, cells_after) = _side(before), _side(after)
    of_rows, compared = _compared(rows, rows_after)
    of_cells = None
    if cells is not None and cells_after is not None:
        of_cells, compared = _compared(cells, cells_after)
    return BoardDiff(rows=of_rows, cells=of_cells, drift=tuple(_drifts(compared)))


def _side(path: Path) -> _Side:
    """Reads a side: its rows and, for a folder, its cells."""
    if path.suffix == ".json" and not path.is_dir():
        try:
            content = parse_json(read_bytes(path, "board").decode())
            return _keyed(_lines(content)), None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, RecordError):
                raise
            raise RecordError(f"{path} is no board: it must be the board.json of leaderboard page or build") from None
    folder = read_folder(path)
    board = Board.from_records(folder.records, folder.complete)
    return _keyed(_lines(board.to_dict())), _keyed(map(_cell, folder.records))


def _keyed(items: Iterable[tuple[str, _Item]]) -> dict[str, _Item]:
    return dict(sorted(items, key=lambda item: (item[1].name, item[0])))


def _lines(board: Mapping[str, Any]) -> Iterable[tuple[str, _Item]]:
    """Yields the rows of a board, and the results of its active servers."""
    yield from map(_row, board["rows"])
    yield from map(_active, board.get("active_server", []))


def _active(result: Mapping[str, Any]) -> tuple[str, _Item]:
    words = [result[key] for key in ("suite", "defense", "attack", "kind", "variant")]
    name = printable(f"{words[0]}: {words[1]} x {', '.join(filter(None, words[2:]))}, active server")
    measured = result["measured"]
    numbers = {ACTIVE + measured["metric"]: (measured["value"], measured["low"], measured["high"])}
    fields = {key: result[key] for key in ("claim", "releases", "seeds", "flags", "reasons")}
    return key_of(["active server", *words]), _Item(name, numbers, fields)


def _row(row: Mapping[str, Any]) -> tuple[str, _Item]:
    identity = [row["suite"], row["defense"], row["budget"], row["control"], row["task"]]
    numbers = {}
    for _, column in columns():
        estimate = row[column.field or column.key]
        numbers[column.field or column.key] = (estimate["value"], estimate["low"], estimate["high"])
    fields = {key: row[key] for key in ("rank", "epsilon", "noise_multiplier", "seeds", "flags", "failed", "skipped")}
    fields["flags"] = [flag for flag in row["flags"] if flag != LEFT_OUT]  # arrays make no difference of numbers
    fields |= {"settings": row["defense"]["settings"], "budget": row["budget"], "task": row["task"]}
    return key_of(identity), _Item(printable(f"{row['suite']}: {row['label']}"), numbers, fields)


def _cell(record: Record) -> tuple[str, _Item]:
    apart = ACTIVE if record.active_server else ""
    numbers = {apart + name: (metric.value, metric.low, metric.high) for name, metric in record.metrics.items()}
    fields = {
        "status": record.status,
        "reason": record.reason if record.status != "ok" else None,
        "claim": json_values(record.claim),
        "flags": sorted(set(record.flags) - {LEFT_OUT}),
        "noise_multiplier": record.noise_multiplier,
        "noise": record.noise,
        "engine": record.engine,
        "provenance": record.provenance,
        "suite_digest": record.suite_digest,
        "changes": list(record.changes),
        "reported": json_values(record.reported),
        "settings": record.defense.settings,
        "attack": {} if record.attack is None else record.attack.settings,
        "budget": dict(record.budget),
        "task": public(record.task),
        "arrays_digest": record.arrays_digest,
        "n": {name: metric.n for name, metric in record.metrics.items()},
    }
    attack = record.attack.name if record.attack else record.kind
    variant = "" if record.task.noise is None else f", noise {record.task.noise}"
    control = f" ({record.control} control)" if record.control else ""
    name = f"{record.suite}: {record.defense.name}{control} x {attack}{variant}, seed {record.seed}"
    return cell_key(record), _Item(printable(name), numbers, fields)


_Pairs = list[tuple[_Item, _Item]]


def _compared(before: Mapping[str, _Item], after: Mapping[str, _Item]) -> tuple[Differences, _Pairs]:
    before, after = dict(before), _renamed(before, after)
    pairs = [(item, after[key]) for key, item in before.items() if key in after]
    changes = [_change(*pair) for pair in pairs]
    changed = tuple(change for change in changes if change)
    differences = Differences(
        added=tuple(item.name for key, item in after.items() if key not in before),
        removed=tuple(item.name for key, item in before.items() if key not in after),
        changed=changed,
        same=len(pairs) - len(changed),
    )
    return differences, pairs


def _renamed(before: Mapping[str, _Item], after: Mapping[str, _Item]) -> dict[str, _Item]:
    """Returns the second side with keys of the first for items that only a name pairs, once on either side."""
    names = Counter(item.name for item in before.values()), Counter(item.name for item in after.values())
    keys = {item.name: key for key, item in before.items() if key not in after}
    return {
        keys[item.name]
        if key not in before and item.name in keys and (names[0][item.name], names[1][item.name]) == (1, 1)
        else key: item
        for key, item in after.items()
    }


def _change(before: _Item, after: _Item) -> ItemChange:
    none = (None, None, None)
    names = [*before.numbers, *(name for name in after.numbers if name not in before.numbers)]
    numbers = [(name, before.numbers.get(name, none), after.numbers.get(name, none)) for name in names]
    fields: dict[str, tuple[Any, Any]] = {}
    for name, old in before.fields.items():
        new = after.fields[name]
        if isinstance(old, Provenance):
            # Another checkout, or packages that do not compute, are no difference.
            old, new = (_code(old), _code(new)) if old.differences(new) else ({}, {})
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            fields |= {f"{name}.{key}": (old.get(key), new.get(key)) for key in keys}
        elif old != new:
            fields[name] = (old, new)
    return ItemChange(
        name=before.name,
        numbers=tuple(_number(name, a, b) for name, a, b in numbers if a != b),
        fields=fields,
    )


def _code(provenance: Provenance) -> dict[str, Any]:
    """Returns what computed a record, by name: versions, digests of code and of tuning."""
    own = {"version": provenance.version, "source": provenance.source[:12], "tuning": provenance.tuning}
    return own | provenance.versions | provenance.third_party


def _number(name: str, before: Any, after: Any) -> NumberChange:
    (a, a_low, a_high), (b, b_low, b_high) = before, after
    difference = None if a is None or b is None else b - a
    intervals = None not in (a_low, a_high, b_low, b_high)
    disjoint = (a_high < b_low or b_high < a_low) if intervals else None
    return NumberChange(name=name, before=before, after=after, difference=difference, disjoint=disjoint)


def _drifts(pairs: _Pairs) -> Iterable[Drift]:
    """Yields the drift of every number, in the order of its first appearance."""
    for name in dict.fromkeys(name for before, _ in pairs for name in before.numbers):
        both = [
            (a.name, _number(name, a.numbers[name], b.numbers[name]))
            for a, b in pairs
            if name in a.numbers and name in b.numbers
        ]
        differences = [(place, number.difference) for place, number in both if number.difference is not None]
        if not differences:
            continue
        where, largest = max(differences, key=lambda entry: abs(entry[1]))
        yield Drift(
            name=name,
            compared=len(differences),
            changed=sum(difference != 0 for _, difference in differences),
            mean=sum(difference for _, difference in differences) / len(differences),
            largest=largest,
            where=where,
            disjoint=sum(bool(number.disjoint) for _, number in both),
        )
