"""Tidy table of a board, from which all formats but the printed tables are made: a line per row and metric.

Metrics are the board's columns and the proved lower bound on epsilon (`epsilon_lower`). A metric
without a value is a line with a null value and its reason. An infinite epsilon is infinite, with its reason; a null
epsilon means that there is no claim. Rows whose privacy unit is a client are in a table of their own, because
their epsilon is another guarantee.
"""

import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..board.content import at_least
from ..board.identity import board_version, row_id
from ..board.proved_bound import NAME, proved_bound
from ..board.rows import Row, Unit
from ..board.table import Board
from ..metrics import METRICS, columns
from .safe_text import portable

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

COLUMNS: dict[str, tuple[type, str]] = {
    "row_id": (str, "digest of suite, defense, settings, budget, task and control; the same when seeds are added"),
    "suite": (str, "name of the suite"),
    "defense": (str, "name of the defense"),
    "settings": (str, "settings of the defense, JSON"),
    "budget": (str, "requested budget, JSON"),
    "task": (str, "resolved task without what depends on the seed, JSON"),
    "data": (str, "data set of the private training"),
    "model": (str, "architecture"),
    "control": (str, "positive (must leak), negative (must not) or public_only; null for a contestant"),
    "controls": (str, "held, FAILED or none: of all controls of the board"),
    "rank": (int, "by the worst AUC, among the comparable contestants of the same guarantee in its table"),
    "rank_reason": (str, "reason for the absence of a rank"),
    "unit": (str, "privacy unit of the claim: record (an example, or a record of a client) or client"),
    "epsilon": (float, "claimed epsilon, nats; infinite without a guarantee, null without a claim"),
    "epsilon_reason": (str, "reason for an infinite or absent epsilon, or a remark on the accounting"),
    "delta": (float, "delta of the claim"),
    "relation": (str, "neighbouring relation of the claim"),
    "sampling": (str, "sampling of the batches"),
    "accountant": (str, "accountant of the claim"),
    "epsilon_assumes": (str, "assumptions of the claim"),
    "epsilon_unverified": (str, "components that the claim trusts without a check"),
    "noise_multiplier": (float, "noise standard deviation / sensitivity"),
    "kind": (str, "kind of result"),
    "metric": (str, "name of the metric, as the column of the board's CSV"),
    "better": (str, "direction that is good for the defender: higher or lower"),
    "value": (float, "mean over seeds, of attacks the worst; null if not measured"),
    "low": (float, "lower end of the 95 % interval, simultaneous over the attacks compared"),
    "high": (float, "upper end of that interval"),
    "n": (int, "number of seeds behind the value"),
    "seeds": (str, "seeds behind the value, separated by spaces"),
    "attack": (str, "attack that reached the value"),
    "looks": (int, "number of attacks compared"),
    "chosen_on": (str, "scores on which the strongest attack was chosen"),
    "interval": (str, "seeds (Student's t over seeds) or own (of the records)"),
    "reason": (str, "reason for the absence of the value or of the interval"),
    "at_least": (bool, "true if attacks failed, are missing or have no such number: the worst case is a lower limit"),
    "largest_under_claim": (float, "largest value that the claim allows any test; of a proved bound, the claim for it"),
    "bound_relation": (str, "neighbouring relation of a proved lower bound on epsilon; null for other metrics"),
    "flags": (str, "flags of the row, separated by spaces"),
    "version": (str, "versions of the package and of the record's schema"),
}
"""Column -> type of its values, and its meaning."""


def tables(board: Board) -> dict[Unit, list[dict[str, Any]]]:
    """Returns the lines of a board by privacy unit; a unit without rows is absent.

    Args:
        board: of any records.
    """
    verdict = "held" if board.trustworthy else "FAILED" if board.controls else "none"
    lines: dict[Unit, list[dict[str, Any]]] = {}
    for row in board.rows:
        of_unit = lines.setdefault(row.unit, [])
        of_unit += [{name: line[name] for name in COLUMNS} for line in _lines(row, verdict)]
    return dict(sorted(lines.items(), key=lambda item: item[0], reverse=True))


def by_row(lines: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Groups the lines of a table by row, in order; each group has all metrics of its row."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        rows.setdefault(line["row_id"], []).append(line)
    return list(rows.values())


def arrow(lines: list[dict[str, Any]], remarks: Mapping[str, str] | None = None) -> "pa.Table":
    """Returns lines as an Arrow table whose fields state their meaning.

    Args:
        lines: of one unit.
        remarks: of the table, beside the version.
    """
    import pyarrow as pa

    types = {str: pa.string(), float: pa.float64(), int: pa.int64(), bool: pa.bool_()}
    fields = [pa.field(name, types[kind], metadata={"meaning": words}) for name, (kind, words) in COLUMNS.items()]
    return pa.Table.from_pylist(
        lines, schema=pa.schema(fields, metadata={"leakbench.version": board_version(), **(remarks or {})})
    )


def to_pandas(*results: str | os.PathLike[str], unit: Unit | None = None) -> "pd.DataFrame":
    """Reads folders of results as a data frame: a line per row of the board and metric, with the columns of `COLUMNS`.

    Args:
        results: outputs of runs.
        unit: privacy unit of the rows; needed if the board has rows of both.

    Raises:
        ValueError: the board has rows of both units and none was named, or none of the unit.
    """
    import pandas as pd
    import pyarrow as pa

    units = tables(Board.from_folders(results))
    if unit is None and len(units) > 1:
        raise ValueError("unit must be 'record' or 'client' for a board of both, whose epsilons are not comparable")
    if unit is not None and unit not in units:
        raise ValueError(f"unit must be one of the board's, {', '.join(units) or 'which has no rows'}, got {unit!r}")
    lines = units[unit] if unit else next(iter(units.values()), [])
    kinds = {pa.int64(): pd.Int64Dtype(), pa.string(): pd.StringDtype()}
    return arrow(lines).to_pandas(types_mapper=kinds.get)


def _lines(row: Row, verdict: str) -> Iterable[dict[str, Any]]:
    claim = row.claim
    shared = portable(
        {
            "row_id": row_id(row),
            "suite": row.suite,
            "defense": row.defense.name,
            "settings": _json(row.defense.settings),
            "budget": _json(row.budget),
            "task": _json(row.task),
            "data": row.task.data,
            "model": row.task.model,
            "control": row.control,
            "controls": verdict,
            "rank": row.rank,
            "rank_reason": row.unplaced or None,
            "unit": row.unit,
            "epsilon": None if claim is None else float("inf") if claim.epsilon is None else claim.epsilon,
            "epsilon_reason": "no claim in these records" if claim is None else claim.reason,
            **{name: claim and getattr(claim, name) for name in ("delta", "relation", "sampling", "accountant")},
            "epsilon_assumes": "; ".join(claim.assumes) if claim and claim.assumes else None,
            "epsilon_unverified": "; ".join(claim.unverified) if claim and claim.unverified else None,
            "noise_multiplier": row.noise_multiplier,
            "flags": " ".join(row.flags),
            "version": board_version(),
        }
    )
    for metric, column in columns():
        estimate = row.estimates[column.key]
        yield shared | portable(
            {
                "kind": metric.kind,
                "metric": column.field or column.key,
                "better": metric.better,
                "value": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "n": estimate.n,
                "seeds": " ".join(map(str, estimate.seeds)),
                "attack": estimate.attack,
                "looks": estimate.looks,
                "chosen_on": estimate.chosen_on,
                "interval": estimate.interval,
                "reason": estimate.reason,
                "at_least": metric.of_attack and at_least(row, estimate),
                "largest_under_claim": estimate.largest,
                "bound_relation": None,
            }
        )
    yield shared | portable(_of_bound(row))


def _of_bound(row: Row) -> dict[str, Any]:
    bound = proved_bound(row)
    return {
        "kind": METRICS[bound.metric].kind,
        "metric": NAME,
        "better": METRICS[bound.metric].better,
        "value": bound.value,
        "low": None,
        "high": None,
        "n": len(bound.seeds),
        "seeds": " ".join(map(str, bound.seeds)),
        "attack": bound.attack,
        "looks": bound.looks,
        "chosen_on": None,
        "interval": None,
        "reason": bound.reason,
        "at_least": False,
        "largest_under_claim": bound.claimed,
        "bound_relation": bound.relation or None,
    }


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=dict)
