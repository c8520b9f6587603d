"""Files of the leaderboard at private-machinelearning.github.io: entries with their claims of accuracy.

Mokhtari et al., "Rethinking Benchmarks for Differentially Private Image Classification", 2026 (arXiv 2601.17189), whose
board holds claims of accuracy by data set and use of public data. An entry is a suite, a claim is a row of the board.
What attacks measured stands under `analyses`, which that board shows as verification.

Caveat: the format is published by examples alone, without a schema or a reader of its own.
"""

import html
from decimal import Decimal
from typing import Any

from ..board.identity import board_version
from ..board.table import Board
from .publication import Publication
from .safe_text import slug
from .tidy import by_row, tables
from .yaml_text import yaml_text

_PUBLIC = ("public_in_distribution", "pretrained_on_public", "tuned_on_public")


def private_ml(board: Board, publication: Publication) -> dict[str, bytes]:
    """Returns a file for each data set and use of public data, as `DATA_no.yml` and `DATA_any.yml`.

    Controls, rows without an accuracy, without a claim, or with a refuted one are left out, and named in a comment.

    Args:
        board: of any records.
        publication: its ORG is the author of the entries.
    """
    entries: dict[str, dict[str, list[Any]]] = {}
    left_out: dict[str, list[str]] = {}
    for unit, lines in tables(board).items():
        for row in by_row(lines):
            first = row[0]
            public = [flag for flag in first["flags"].split() if flag in _PUBLIC]
            name = slug(first["data"]) + ("_client" if unit == "client" else "") + ("_any" if public else "_no")
            suites = entries.setdefault(f"{name}.yml", {})
            if reason := _excluded(row):
                left_out.setdefault(f"{name}.yml", []).append(f"left out: {first['defense']}, {reason}")
            else:
                suites.setdefault(first["suite"], []).append(_claim(row, public))
    return {
        name: yaml_text(
            [_entry(suite, claims, publication) for suite, claims in suites.items()],
            comments=[board_version(), *left_out.get(name, [])],
        )
        for name, suites in entries.items()
    }


def _excluded(row: list[Any]) -> str:
    first = row[0]
    if first["control"]:
        return f"{first['control']} control"
    if first["epsilon"] is None:
        return "no claim in these records"
    if "claim_violated" in first["flags"].split():
        return "its claim was refuted"
    return "" if _value(row, "accuracy") else "no accuracy was measured"


def _value(row: list[Any], metric: str) -> Any:
    """Line of a metric with a value; None without one."""
    return next((line for line in row if line["metric"] == metric and line["value"] is not None), None)


def _entry(suite: str, claims: list[Any], publication: Publication) -> dict[str, Any]:
    # That board's own entries have N/A where there is no paper and no code, and its page prints strings as HTML.
    return {
        "name": html.escape(f"leakbench, suite {suite}"),
        "url": "N/A",
        "authors": publication.organization or "N/A",
        "code": "N/A",
        "venue": "N/A",
        "venue_date": publication.at.date().isoformat(),
        "claims": claims,
    }


def _claim(row: list[Any], public: list[str]) -> dict[str, Any]:
    first = row[0]
    words = {"public_data": " ".join(public)} if public else {}
    method = f"{first['defense']} {first['settings']}, {first['model']}, row {first['row_id']}"
    return words | {
        "model": html.escape(method),
        "epsilon": first["epsilon"],
        "delta": first["delta"],
        # Exact: the decimal digits of the number, with the point moved.
        "private_accuracy": f"{(Decimal(repr(_value(row, 'accuracy')['value'])) * 100).normalize():f}%",
        "dp_accountant": html.escape(first["accountant"]),
        "analyses": [_analysis(line) for name in ("auc", "tpr_at_1pct_fpr") if (line := _value(row, name))],
    }


def _analysis(line: Any) -> dict[str, Any]:
    interval = "" if line["low"] is None else f" [{line['low']}, {line['high']}]"
    bound = "≥" if line["at_least"] else ""
    words = f"{line['metric']} {bound}{line['value']}{interval} by {line['attack']}, controls {line['controls']}"
    return {"claim": html.escape(words), "citation": "leakbench", "url": "N/A", "code": "N/A"}
