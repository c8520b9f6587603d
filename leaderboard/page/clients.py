"""Plots of the clients of federated trainings: epsilon and accuracy of each, sorted, with the worst marked.

A client's rank differs between seeds, so a line is over ranks: the least value of each seed, the second, and so on. The
worst client is that of any seed. Numbers are those of the arrays beside the records of the kind `federation`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ..board.rows import Row
from ..kinds import KINDS
from ..metrics import METRICS
from ..records.folder import ArraysFolder
from ..records.record import Record, RecordError
from .axes import axis_over
from .figures import Figure
from .plots import Point, Style, styles
from .rounds import budget_words, budgets_of, tested_words
from .seed_bands import MARKS, SeedLine, band_figures, read_columns, readable_tables, refuse_outside, seeds_words

KIND = KINDS["federation"].name
ACCURACY, EPSILON = METRICS["accuracy"], METRICS["epsilon"]

_COLUMNS = ("client", "examples", "rounds", "epsilon", "accuracy")

_EVERY_MARK = 12
"""Largest number of clients of which each has a mark."""

_LOG_FROM = 20.0
"""Ratio of the largest to the least epsilon from which on the axis is logarithmic."""

_LOG_TO = 1e9
"""Ratio above which it is not: clients who pay next to nothing would have most of the axis."""


@dataclass(frozen=True, kw_only=True)
class ClientTable:
    """Clients of a row.

    Attributes:
        row: of the board.
        seeds: in order.
        columns: column of the arrays -> its values.
    """

    row: Row
    seeds: tuple[int, ...]
    columns: dict[str, Float[ndarray, "seeds clients"]]

    @property
    def clients(self) -> int:
        """Number of clients."""
        return self.columns["client"].shape[1]

    def worst(self, column: str, sign: int) -> tuple[int, int]:
        """Place (seed, client) of the largest value of `sign` times a column; NaN is none."""
        values = sign * self.columns[column]
        flat = int(np.where(np.isnan(values), -np.inf, values).argmax())
        return divmod(flat, self.clients)

    def client_words(self, place: tuple[int, int]) -> str:
        """Number, size and rounds of the client at a place (seed, client)."""
        number, examples, rounds = (self.columns[key][place] for key in ("client", "examples", "rounds"))
        seed = f", seed {self.seeds[place[0]]}" if len(self.seeds) > 1 else ""
        return f"client {number:.0f}{seed} ({examples:.0f} examples, {rounds:.0f} rounds)"


def client_figures(rows: Sequence[Row], folder: ArraysFolder, style: Style, name: str) -> list[Figure]:
    """Draws the clients of a section; empty if none of its rows has any.

    Args:
        rows: of the section, all of the same privacy unit.
        folder: of the arrays of the records.
        style: method -> (colour, marker).
        name: unique on the page; a prefix of the plots' names.
    """
    tables, left_out = readable_tables(rows, lambda row: client_table(row, folder))
    if not tables:
        absent = Figure(name=f"{name}-client-epsilon", title="Claimed ε by client", caption=tuple(left_out))
        return [absent] if left_out else []
    figures = _epsilons(tables, style, f"{name}-client-epsilon", left_out)
    budgets = budgets_of(table.row for table in tables)
    for i, budget in enumerate(budgets):
        shown = [table for table in tables if budget_words(table.row) in ("", budget)]
        suffix = f", {budget}" if len(budgets) > 1 else ""
        figures += _accuracies(shown, style, f"{name}-client-accuracy-b{i + 1}", suffix)
    return figures


def client_table(row: Row, folder: ArraysFolder) -> ClientTable | None:
    """Clients of a row; None if it has no records of them.

    Raises:
        RecordError: arrays are missing or bad.
    """
    cell = next((cell for cell in row.cells if cell.kind == KIND), None)
    if cell is None:
        return None
    parts = [read_columns(record, folder, _COLUMNS) for record in cell.records.values()]
    sizes = {len(part["client"]) for part in parts}
    if len(sizes) > 1 or not min(sizes):
        raise RecordError("its seeds have different numbers of clients, or none")
    for record, part in zip(cell.records.values(), parts, strict=True):
        _refuse_impossible(record, part)
    return ClientTable(
        row=row, seeds=tuple(cell.records), columns={key: np.stack([part[key] for part in parts]) for key in _COLUMNS}
    )


def _refuse_impossible(record: Record, part: Mapping[str, Float[ndarray, " clients"]]) -> None:
    """Refuses numbers that a quantity cannot have, clients that occur twice, and another epsilon than the record's."""
    for name in ("client", "examples", "rounds"):
        refuse_outside(part, name, whole=True)
    if len(np.unique(part["client"])) < len(part["client"]):
        raise RecordError("its arrays must hold every client once")
    refuse_outside(part, "epsilon", infinite=True)
    refuse_outside(part, "accuracy", ACCURACY.most, missing=True)
    worst, largest = record.metrics.get("epsilon_worst"), float(part["epsilon"].max())
    if worst is not None and not math.isclose(math.inf if worst.value is None else worst.value, largest, rel_tol=1e-6):
        raise RecordError(f"the largest epsilon of its arrays must be the record's, got {largest:.6g}")


def _claimed(table: ClientTable) -> bool:
    """True if the worst client's epsilon is the claim of the records."""
    records = next(cell for cell in table.row.cells if cell.kind == KIND).records.values()
    claims = [None if record.claim is None else record.claim.epsilon for record in records]
    return all(
        claim is not None and math.isclose(claim, float(own.max()), rel_tol=1e-6)
        for claim, own in zip(claims, table.columns["epsilon"], strict=True)
    )


def _epsilons(tables: Sequence[ClientTable], style: Style, name: str, left_out: Sequence[str]) -> list[Figure]:
    """Plot of the epsilons of all rows; rows whose clients have the same epsilons share a line."""
    title = "Claimed ε by client"
    # Methods of one noise and schedule have equal epsilons, and their lines would hide one another.
    groups: dict[tuple[tuple[float, ...], ...], list[ClientTable]] = {}
    for table in tables:
        key = tuple(map(tuple, np.sort(table.columns["epsilon"], axis=1).tolist()))
        groups.setdefault(key, []).append(table)
    lines, same, infinite = [], [], []
    proved = [table for table in tables if np.isfinite(table.columns["epsilon"]).all()]
    for group in groups.values():
        names, epsilons = _names(group, tables), np.sort(group[0].columns["epsilon"], axis=1)
        finite = np.isfinite(epsilons).all(axis=0)
        if not finite.all():
            count = int((~np.isfinite(epsilons)).any(axis=0).sum())
            share = "every client" if count == group[0].clients else f"{count} of {group[0].clients} clients"
            infinite.append(f"{names} ({share})")
        if not finite.any():
            continue
        series = _names(group[:1], tables)
        if len(group) > 1:
            series += f" and {len(group) - 1} more"
            same.append(f"One line for {names}: their clients have the same ε.")
        lines.append(_line(group[0], "epsilon", epsilons, series, style[group[0].row.method], sign=1))
    caption = [
        f"ε of every client after the training, from the least to the largest; {_unit_words(tables)} "
        f"{_clients_words(tables)} {seeds_words(len(table.seeds) for table in tables)}"
    ]
    if proved:
        leading = max(proved, key=lambda table: float(table.columns["epsilon"].max()))
        claimed = ", whose ε is the row's claim" * all(map(_claimed, proved))
        caption.append(
            f"Filled: the worst client of any seed{claimed}. "
            f"The largest is {_largest(leading, leading.worst('epsilon', 1))}."
        )
    if infinite:
        caption.append(f"Not drawn, because ε is infinite: {'; '.join(infinite)}.")
    caption += [*same, *left_out]
    if not lines:
        return [Figure(name=name, title=title, caption=tuple(caption))]
    if _several_budgets(tables):
        # Rows of a method then differ in their budgets, so each has a colour and a marker of its own.
        own = styles({line.series: line.series for line in lines})
        lines = [replace(line, style=own[line.series]) for line in lines]
    lines = labelled(lines, sign=1)
    values = [value for line in lines for value in line.values]
    log = min(values) > 0 and _LOG_FROM < max(values) / min(values) < _LOG_TO
    y = axis_over("claimed ε", values, log=log, least=0.0)
    x = axis_over("clients, sorted by ε", [1.0, *(line.x[-1] for line in lines)], least=0.0, digits="d")
    numbers = ("defense", "clients", "least ε", "median ε", "largest ε", "worst client"), _epsilon_numbers(tables)
    return band_figures(name, title, lines, x, y, digits=EPSILON.digits, caption=caption, numbered=numbers)


def _accuracies(tables: Sequence[ClientTable], style: Style, name: str, suffix: str) -> list[Figure]:
    lines, rows = [], []
    for table in tables:
        # NaN, of clients none of whose classes is tested, is last.
        ordered, method = -np.sort(-table.columns["accuracy"], axis=1), table.row.method
        if not np.isfinite(ordered).all(axis=0).any():
            continue
        lines.append(_line(table, "accuracy", ordered, method, style[method], sign=-1))
        place = table.worst("accuracy", -1)
        mean = float(np.nanmean(ordered))
        ends = (f"{value:.{ACCURACY.digits}f}" for value in (mean, table.columns["accuracy"][place]))
        rows.append((table.row.label, *ends, table.client_words(place)))
    if not lines:
        return []
    lines = labelled(lines, sign=-1)
    values = [value for line in lines for value in line.values]
    y = axis_over("accuracy", values, least=ACCURACY.least, most=ACCURACY.most)
    x = axis_over("clients, sorted by accuracy", [1.0, *(line.x[-1] for line in lines)], least=0.0, digits="d")
    caption = [
        f"The global model on {tested_words([table.row for table in tables])}, weighted to the classes that each "
        f"client holds, from the best client to the worst. Filled: the worst client of any seed. "
        f"{_clients_words(tables)} {seeds_words(len(table.seeds) for table in tables)}"
    ]
    if any(np.isnan(table.columns["accuracy"]).any() for table in tables):
        caption.append("Clients none of whose classes is tested have no accuracy, and no place.")
    return band_figures(
        name, f"Accuracy by client{suffix}", lines, x, y, digits=ACCURACY.digits, caption=caption,
        numbered=(("defense", "mean over clients", "worst", "worst client"), rows),
    )  # fmt: skip


def _line(
    table: ClientTable,
    column: str,
    ordered: Float[ndarray, "seeds clients"],
    series: str,
    style: tuple[int, str],
    *,
    sign: int,
) -> SeedLine:
    """Line over the ranks whose values are finite in all seeds, with the worst client at its end."""
    finite = np.flatnonzero(np.isfinite(ordered).all(axis=0))
    ranks = finite + 1.0
    # The mark of the worst client replaces the last rank's.
    count = len(ranks)
    marked = range(count) if count <= _EVERY_MARK else sorted({i * (count - 1) // MARKS for i in range(MARKS)})
    extra = ()
    # An infinite epsilon is the worst, and has no place on the axis.
    if not np.isinf(ordered).any():
        place = table.worst(column, sign)
        value, client = float(table.columns[column][place]), table.client_words(place)
        label = f"worst: {client.partition(' (')[0]}"
        digits = EPSILON.digits if sign > 0 else ACCURACY.digits
        words = f"{series}, worst: {client}, {'ε' if sign > 0 else 'accuracy'} {value:.{digits}f}"
        extra = (Point(x=float(ranks[-1]), y=value, series=series, title=words, label=label),)
        marked = [i for i in marked if i < count - 1]
    return SeedLine(
        series=series, style=style, x=ranks, y=ordered[:, finite], marked=list(marked), extra=extra, hollow=True,
        titles=[f"rank {rank:.0f} of {ordered.shape[1]}" for rank in ranks],
    )  # fmt: skip


def labelled(lines: Sequence[SeedLine], *, sign: int) -> list[SeedLine]:
    """Keeps the label of the worst client of all lines, and drops those of the others.

    Args:
        lines: with their worst clients as further marks.
        sign: 1 if large values are bad, else -1.
    """
    worst = max(((sign * point.y, -i) for i, line in enumerate(lines) for point in line.extra), default=(0.0, 0))
    return [
        line if i == -worst[1] else replace(line, extra=tuple(replace(point, label="") for point in line.extra))
        for i, line in enumerate(lines)
    ]


def _names(group: Sequence[ClientTable], tables: Sequence[ClientTable]) -> str:
    """Methods of a group of rows, with their budgets if all rows have several."""
    by_budget: dict[str, list[str]] = {}
    for table in group:
        by_budget.setdefault(budget_words(table.row) if _several_budgets(tables) else "", []).append(table.row.method)
    return "; ".join(", ".join(names) + f" at {words}" * bool(words) for words, names in by_budget.items())


def _several_budgets(tables: Sequence[ClientTable]) -> bool:
    return len({budget_words(table.row) for table in tables} - {""}) > 1


def _epsilon_numbers(tables: Sequence[ClientTable]) -> list[tuple[str, ...]]:
    rows = []
    for table in tables:
        epsilons, place = table.columns["epsilon"], table.worst("epsilon", 1)
        middle = float(np.median(epsilons, axis=1).mean())
        ends = (_epsilon(value) for value in (float(epsilons.min()), middle, float(epsilons[place])))
        rows.append((table.row.label, str(table.clients), *ends, table.client_words(place)))
    return rows


def _epsilon(value: float) -> str:
    return f"{value:.{EPSILON.digits}f}" if math.isfinite(value) else "∞"


def _largest(table: ClientTable, place: tuple[int, int]) -> str:
    return f"{_epsilon(float(table.columns['epsilon'][place]))}, of {table.client_words(place)} in {table.row.label}"


def _clients_words(tables: Sequence[ClientTable]) -> str:
    counts = sorted({table.clients for table in tables})
    return f"{counts[0]}{f' to {counts[-1]}' if len(counts) > 1 else ''} clients."


def _unit_words(tables: Sequence[ClientTable]) -> str:
    by_client = any(table.row.claim is not None and table.row.claim.unit == "client" for table in tables)
    return "it is about a client with all of its examples." if by_client else "it is about one example of a client."
