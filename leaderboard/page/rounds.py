"""Plots of the rounds of federated trainings: accuracy by round and by bytes sent, loss, and drift of the updates.

Budgets have plots of their own. Numbers are those of the arrays beside the records of the kind `rounds`.
"""

from collections.abc import Callable, Iterable, Sequence

from jaxtyping import Float
from numpy import ndarray

from ..board.rows import Row
from ..metrics import METRICS
from ..records.folder import ArraysFolder
from ..records.labels import word
from .axes import Axis, axis_over
from .figures import Figure
from .levels import public_levels
from .plots import Style
from .round_table import RoundTable, round_table
from .seed_bands import LARGEST, SeedLine, band_figures, readable_tables, seeds_words

ACCURACY, LOSS = METRICS["accuracy"], METRICS["loss"]

_BUDGETS = ("epsilon", "noise_multiplier")


def round_figures(
    rows: Sequence[Row], public_only: Sequence[Row], folder: ArraysFolder, style: Style, name: str
) -> list[Figure]:
    """Draws the rounds of a section; empty if none of its rows has any.

    Args:
        rows: of the section.
        public_only: controls of the same suite, data and model, whose accuracy is a horizontal line.
        folder: of the arrays of the records.
        style: method -> (colour, marker).
        name: unique on the page; a prefix of the plots' names.
    """
    tables, left_out = readable_tables(rows, lambda row: round_table(row, folder))
    if not tables:
        absent = Figure(name=f"{name}-rounds", title="Accuracy by round", caption=tuple(left_out))
        return [absent] if left_out else []
    budgets, figures, drifts = budgets_of(table.row for table in tables), [], []
    of_budgets = any(budget_words(table.row) for table in tables if _without_noise(table.row))
    for i, budget in enumerate(budgets):
        # A method without noise, or with noise of its own, has no budget and stands beside every budget.
        shown = [table for table in tables if budget_words(table.row) in ("", budget)]
        if shown:
            suffix = f", {budget}" if len(budgets) > 1 else ""
            figures += _accuracies(shown, public_only, style, f"{name}-b{i + 1}", suffix, left_out)
            figures += _loss(shown, style, f"{name}-b{i + 1}", suffix)
            if of_budgets:
                drifts += _drift(shown, style, f"{name}-b{i + 1}", suffix)
    if not of_budgets:  # the same lines at every budget
        drifts = _drift(tables, style, f"{name}-b1", "")
    return figures + drifts


def budget_words(row: Row) -> str:
    """Requested epsilon or noise multiplier of a row; empty for a method without either."""
    budget = {key: row.budget.get(key) for key in _BUDGETS}
    return ", ".join(f"{key.replace('_', ' ')} {word(value)}" for key, value in budget.items() if value is not None)


def budgets_of(rows: Iterable[Row]) -> list[str]:
    """Budgets of rows in words, the least first; a single empty text if no row has any."""
    keyed = {budget_words(row): [row.budget.get(key) or 0.0 for key in _BUDGETS] for row in rows if budget_words(row)}
    return sorted(keyed, key=lambda words: keyed[words]) or [""]


def tested_words(rows: Sequence[Row]) -> str:
    """Number of test examples of rows, as "350 held-out examples"."""
    records = [record for row in rows for record in row.records if record.kind == ACCURACY.kind]
    sizes = {record.metrics[ACCURACY.name].n for record in records if ACCURACY.name in record.metrics} - {None}
    counts = sorted(n for n in sizes if n is not None)
    if not counts:
        return "held-out examples"
    return f"{counts[0]}{f' to {counts[-1]}' if len(counts) > 1 else ''} held-out examples"


def _accuracies(
    tables: Sequence[RoundTable],
    public_only: Sequence[Row],
    style: Style,
    name: str,
    suffix: str,
    left_out: Sequence[str],
) -> list[Figure]:
    rows, levels = [table.row for table in tables], public_levels(public_only)
    seeds = seeds_words(len(table.seeds) for table in tables)
    by_round = _lines(tables, style, "accuracy", lambda table: table.rounds)
    by_bytes = _lines(tables, style, "accuracy", lambda table: table.columns["bytes_up"].mean(axis=0))
    values = [value for line in by_round for value in line.values] + [level.y for level in levels[0]]
    y = axis_over("accuracy on held-out data", values, least=ACCURACY.least, most=ACCURACY.most)
    figures = band_figures(
        f"{name}-rounds", f"Accuracy by round{suffix}", by_round, _rounds_axis(tables), y, digits=ACCURACY.digits,
        levels=levels[0], numbered=_accuracy_numbers(tables),
        caption=[f"The global model after each round, on {tested_words(rows)}. {seeds}", *levels[1], *left_out],
    )  # fmt: skip
    sent = [value for line in by_bytes for value in line.x.tolist()]
    if any(value > 0 for value in sent):
        x = axis_over("bytes sent by all clients so far", sent, log=True, digits="~s")
        received = [float(table.columns["bytes_down"][:, -1].mean()) for table in tables]
        figures += band_figures(
            f"{name}-bytes", f"Accuracy by bytes sent{suffix}", by_bytes, x, y, digits=ACCURACY.digits,
            levels=levels[0], numbered=_bytes_numbers(tables),
            caption=[
                "The same accuracies by the bytes of all messages from clients to the server so far, mean over seeds. "
                f"Models on the way to the clients are not in them: {_span(received)} bytes a training. {seeds}",
                *levels[1],
            ],
        )  # fmt: skip
    return figures


def _loss(tables: Sequence[RoundTable], style: Style, name: str, suffix: str) -> list[Figure]:
    """Plot of the loss on held-out data; empty if no round has a finite loss in every seed."""
    lines = _lines(tables, style, "loss", lambda table: table.rounds)
    if not lines:
        return []
    values = [value for line in lines for value in line.values]
    wide = 0 < 10 * min(values) < max(values)
    y = axis_over(f"loss on held-out data ({LOSS.unit})", values, log=wide, least=LOSS.least)
    rows = [table.row for table in tables]
    caption = [
        f"Mean loss of the global model after each round, on {tested_words(rows)}. "
        f"{seeds_words(len(table.seeds) for table in tables)}"
    ]
    if sum(len(line.x) for line in lines) < sum(len(table.rounds) for table in tables):
        caption.append("Rounds in which the loss of some seed is not finite are left out.")
    return band_figures(
        f"{name}-loss", f"Loss by round{suffix}", lines, _rounds_axis(tables), y, digits=LOSS.digits, caption=caption
    )


def _drift(tables: Sequence[RoundTable], style: Style, name: str, suffix: str) -> list[Figure]:
    """Plot of the relative drift of methods without noise; empty if no round has any."""
    quiet = [table for table in tables if _without_noise(table.row)]
    lines = [line for line in _lines(quiet, style, "drift", lambda table: table.rounds) if (line.y > 0).all()]
    if not lines:
        return []
    x = _rounds_axis(quiet)
    y = axis_over("relative drift", [value for line in lines for value in line.values], log=True)
    caption = [
        "Squared distance of the clients' updates from their mean, averaged with the weights of the clients, over the "
        "squared norm of that mean. Methods with noise are left out, because it would measure their noise, and so are "
        f"rounds with fewer than two replies. {seeds_words(len(table.seeds) for table in quiet)}"
    ]
    return band_figures(
        f"{name}-drift", f"Relative drift of the clients' updates{suffix}", lines, x, y, digits=3, caption=caption
    )


def _lines(
    tables: Sequence[RoundTable],
    style: Style,
    column: str,
    position: Callable[[RoundTable], Float[ndarray, " rounds"]],
) -> list[SeedLine]:
    lines = []
    for table in tables:
        values, places = table.columns[column], position(table)
        # Before the first message the bytes are 0, which a logarithmic axis does not have.
        measured = (values <= LARGEST).all(axis=0) & (places > 0)
        if measured.any():
            lines.append(
                SeedLine(
                    series=table.row.method,
                    style=style[table.row.method],
                    x=places[measured],
                    y=values[:, measured],
                    titles=[f"round {number:.0f}" for number in table.rounds[measured]],
                )
            )
    return lines


def _without_noise(row: Row) -> bool:
    return not row.noise_multiplier and (row.claim is None or row.claim.epsilon is None)


def _rounds_axis(tables: Sequence[RoundTable]) -> Axis:
    most = max(float(table.rounds[-1]) for table in tables)
    return axis_over("round", [1.0, most], least=0.0, digits="d")


def _accuracy_numbers(tables: Sequence[RoundTable]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = []
    for table in tables:
        last = table.columns["accuracy"][:, -1]
        ends = (f"{value:.{ACCURACY.digits}f}" for value in (last.mean(), last.min(), last.max()))
        rows.append((table.row.label, str(len(table.seeds)), f"{table.rounds[-1]:.0f}", *ends))
    return ("defense", "seeds", "last round", "accuracy after it", "least seed", "largest seed"), rows


def _bytes_numbers(tables: Sequence[RoundTable]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = []
    for table in tables:
        sent, received = (table.columns[key][:, -1].mean() for key in ("bytes_up", "bytes_down"))
        accuracy = table.columns["accuracy"][:, -1].mean()
        rows.append((table.row.label, f"{sent:,.0f}", f"{received:,.0f}", f"{accuracy:.{ACCURACY.digits}f}"))
    return ("defense", "bytes sent in all", "bytes received in all", "accuracy after the last round"), rows


def _span(values: Sequence[float]) -> str:
    least, most = (f"{end:,.0f}" for end in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"
