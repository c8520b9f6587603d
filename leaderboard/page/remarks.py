"""Tables of a page besides the board: papers' figures, assumptions, tuning, unmeasured cells, provenance."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..board.rows import Row
from ..kinds import KINDS
from ..records.files import read_bytes
from ..records.labels import word
from ..records.record import Record, RecordError


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Search for training settings on public data.

    Attributes:
        title: defense and budget.
        setting: data and model.
        headers: of the grid: its settings, then accuracy, interval, n.
        lines: (cells, whether the point was chosen) for each point of the grid.
    """

    title: str
    headers: tuple[str, ...]
    lines: tuple[tuple[tuple[str, ...], bool], ...]
    setting: str


def assumptions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Lists assumptions and unverified parts of a board's claims: (sentence, defenses it concerns), each once.

    Args:
        rows: of the board.
    """
    by_sentence: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.claim is not None and row.claim.epsilon is not None:
            # Finite claims only: an infinite claim assumes nothing.
            for sentence in (*row.claim.assumes, *(f"unverified: {words}" for words in row.claim.unverified)):
                by_sentence.setdefault(sentence, {})[row.label] = None
    return [(sentence, ", ".join(names)) for sentence, names in by_sentence.items()]


def tunings(results: Path, records: Iterable[Record]) -> list[Tuning]:
    """Reads the searches in `tuning/` of a run's output on which its records depend.

    Args:
        results: output of the run.
        records: of the page; a search that none of them names, such as one of a former grid, is left out.

    Returns:
        A search for each file; empty without that folder.

    Raises:
        RecordError: a file does not have its format.
    """
    used = {record.task.tuning_digest for record in records}
    paths = sorted(path for path in (results / "tuning").glob("*.json") if path.stem in used)
    return [_tuning(path) for path in paths]


def _tuning(path: Path) -> Tuning:
    try:
        data = json.loads(read_bytes(path, "tuning"))
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"cannot read tuning {path}: {error}") from None
    # Checked key by key: `audit` writes these files, and a leaf package does not import its types.
    grid = data.get("grid") if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("schema") != 2 or not isinstance(grid, list) or not grid:
        raise RecordError(f"bad tuning {path}: it must have schema 2 and a grid; delete it and tune again")
    if not all(isinstance(point, dict) for point in grid):
        raise RecordError(f"bad tuning {path}: every point of its grid must be an object; delete it and tune again")
    measured = ("accuracy", "low", "high", "n")
    keys = tuple(dict.fromkeys(key for point in grid for key in point if key not in (*measured, "reason")))
    choice = data.get("chosen")
    chosen = choice if isinstance(choice, dict) else {}
    # The chosen point agrees in every setting of the grid that the choice names.
    named = [key for key in keys if key in chosen]
    lines = [
        (
            (*(_cell(point.get(key)) for key in keys), *_accuracy(point), _cell(point.get("n"))),
            # all() of nothing is True, and would mark every point as chosen.
            bool(named) and all(point.get(key) == chosen[key] for key in named),
        )
        for point in grid
    ]
    title = ", ".join(filter(None, (_cell(data.get("defense")), _items(data.get("budget")))))
    headers = (*keys, "accuracy", "95 % interval", "n")
    return Tuning(title=title, headers=headers, lines=tuple(lines), setting=_setting(data.get("request")))


def _setting(request: Any) -> str:
    """Data, model and number of validation examples of a search, as far as its request has them."""
    task = request.get("task") if isinstance(request, dict) else None
    words = [_cell(task.get(key)) for key in ("data", "model")] if isinstance(task, dict) else []
    if isinstance(request, dict) and isinstance(request.get("validation"), int):
        words.append(f"judged on {request['validation']} public examples")
    return ", ".join(filter(None, words))


def _accuracy(point: Mapping[str, Any]) -> tuple[str, str]:
    accuracy, low, high = (point.get(key) for key in ("accuracy", "low", "high"))
    if not isinstance(accuracy, int | float):
        return "n/a", _cell(point.get("reason"))
    ends = f"[{low:.3f}, {high:.3f}]" if isinstance(low, int | float) and isinstance(high, int | float) else ""
    return f"{accuracy:.3f}", ends


def _cell(value: Any) -> str:
    return "" if value is None else word(value)


def _items(table: Any) -> str:
    return ", ".join(f"{key} {word(value)}" for key, value in table.items()) if isinstance(table, dict) else ""


def provenance(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Lists the provenance of the numbers, as (subject, words).

    Args:
        records: all records.
    """
    seconds = sum(record.seconds for record in records)
    claims = [record.claim for record in records if record.claim]
    accountants = (claim.accountant for claim in claims if claim.epsilon is not None)
    relations = (f"{c.relation}, unit {c.unit}, {c.sampling} sampling" for c in claims if c.epsilon is not None)
    origins = [record.provenance for record in records]
    versions = (f"{name} {version}" for origin in origins for name, version in origin.versions.items())
    others = (f"{name}, code {code[:12]}" for origin in origins for name, code in origin.third_party.items())
    statuses = [f"{count} {status}" for status, count in _counts(record.status for record in records)]
    rows = [
        ("records", f"{len(records)}: {', '.join(statuses)}"),
        ("suite", _several(f"{record.suite}, digest {record.suite_digest}" for record in records)),
        ("code", _several(f"leakbench {origin.code}" for origin in origins)),
        ("methods of others", _several(others)),
        ("device", _several(record.device for record in records)),
        ("engine", _several(record.engine for record in records if record.engine)),
        ("versions", _several(versions)),
        ("accountant", _several(accountants)),
        ("claims are about", _several(relations)),
        ("seeds", ", ".join(map(str, sorted({record.seed for record in records})))),
        ("noise", _several(_NOISE[record.noise] for record in records)),
        ("compute time", f"{_duration(seconds)}, all records together"),
    ]
    return [(title, words) for title, words in rows if words]


_NOISE = {
    "none": "none",
    "seeded": "seeded (repeatable; not for a release)",
    "os": "from the operating system",
    "secure": "secure, from the operating system",
}


def unmeasured(records: Iterable[Record]) -> list[tuple[str, str, str, str, int]]:
    """Lists failed and skipped cells: status, cell, seeds, reason, number of records; equal reasons once.

    Args:
        records: those that are not "ok".
    """
    lines: dict[tuple[str, str, str], list[int]] = {}
    for record in records:
        method = record.attack.name if record.attack else record.kind
        control = f" ({record.control} control)" if record.control else ""
        variant = KINDS[record.kind].variant(record.task.noise)
        cell = f"{record.defense.name}{control} x {method}{f', {variant.label}' if variant else ''}"
        lines.setdefault((record.status, cell, record.reason or ""), []).append(record.seed)
    return [
        (status, cell, ", ".join(map(str, sorted(set(seeds)))), reason, len(seeds))
        for (status, cell, reason), seeds in sorted(lines.items())
    ]


def _counts(words: Iterable[str]) -> list[tuple[str, int]]:
    return [(word, len(list(group))) for word, group in groupby(sorted(words))]


def _several(words: Iterable[str]) -> str:
    return "; ".join(sorted(set(words)))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
