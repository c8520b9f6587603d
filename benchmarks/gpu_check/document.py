"""Results of the check as plain data, JSON and Markdown, written anew after every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from ..speed import report
from .processes import PartOutcome
from .rows import CheckedFigure, CheckedRow

NAME = "gpu_check"


def document(outcomes: Sequence[PartOutcome], environment: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the results as plain data.

    Args:
        outcomes: of the parts that have begun.
        environment: of the machine.
        settings: of the check.
    """
    return {
        "benchmark": NAME,
        "environment": environment,
        "settings": settings,
        "wrong": [sentence for outcome in outcomes for sentence in outcome.wrong],
        "parts": [{**asdict(outcome), "seconds": round(outcome.seconds, 1)} for outcome in outcomes],
    }


def verdict(outcomes: Sequence[PartOutcome]) -> str:
    """Returns a sentence on all parts: wrong numbers, and what was not measured."""
    wrong = [sentence for outcome in outcomes for sentence in outcome.wrong]
    missing = [f"{outcome.name} ({outcome.status})" for outcome in outcomes if outcome.status != "done"]
    checked = f"{sum(len(outcome.rows) for outcome in outcomes)} rows of {len(outcomes)} parts"
    incomplete = f"; incomplete: {', '.join(missing)}" if missing else ""
    return (f"WRONG: {len(wrong)} in {checked}" if wrong else f"nothing wrong in {checked}") + incomplete


def markdown(outcomes: Sequence[PartOutcome], environment: dict[str, Any]) -> str:
    """Formats the results as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    lines = [
        "# GPU check",
        "",
        f"{environment['device']}; {environment['cpu']}, {environment['cores']} cores; {environment['system']}; "
        f"CUDA {environment['cuda'] or 'n/a'}, Python {environment['python']}, {versions}. {environment['date']}.",
        "",
        f"{verdict(outcomes)}.",
        "",
        *(f"- **wrong**: {sentence}" for outcome in outcomes for sentence in outcome.wrong),
        "",
    ]
    return "\n".join([*lines, *(table(outcome).markdown() for outcome in outcomes)])


def table(outcome: PartOutcome) -> report.TextTable:
    """Returns the table of a part, with a column for each figure that any row has."""
    columns = list(dict.fromkeys(column for row in outcome.rows for column in row.figures))
    cells = pd.DataFrame(
        [[row.name, *(formatted(row.figures.get(column)) for column in columns)] for row in outcome.rows],
        columns=[outcome.name, *columns],
    )
    remarks = list(dict.fromkeys(f"{row.name}: {remark}." for row in outcome.rows for remark in row.remarks))
    status = outcome.status + (f", {outcome.reason}" if outcome.reason else "")
    return report.TextTable(
        title=f"{outcome.about} ({status}; {outcome.seconds:.0f} s)", cells=cells, remarks=remarks, words=1
    )


def formatted(figure: CheckedFigure) -> str:
    """Formats a figure: four digits, seven near 1, where a contribution meets its bound, or a word."""
    if figure is None:
        return "n/a"
    if isinstance(figure, int):
        return f"{figure:,}"
    if isinstance(figure, str):
        return figure
    return f"{figure:.6f}" if abs(figure - 1) < 1e-2 else f"{figure:.4g}"


def line(row: CheckedRow) -> str:
    """Formats a row for the terminal, as it comes in."""
    figures = ", ".join(f"{column} {formatted(figure)}" for column, figure in row.figures.items())
    remarks = [*(f"WRONG: {sentence}" for sentence in row.wrong), *row.remarks]
    return f"{row.name}: {'; '.join(text for text in (figures, *remarks) if text)}"


def write(outcomes: Sequence[PartOutcome], environment: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    """Writes gpu_check.json and gpu_check.md, each as a whole."""
    report.write_json(document(outcomes, environment, settings), folder / f"{NAME}.json")
    report.write(folder / f"{NAME}.md", markdown(outcomes, environment))
