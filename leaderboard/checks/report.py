"""Faults of a check, and the difference of two boards, as lines for a terminal."""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from .difference import BoardDiff, Differences, ItemChange
from .fault import Fault
from .text import printable

WIDTH = 80
"""Columns of the narrowest terminal that the lines fit."""

MOST_ALIKE = 20
"""Faults shown of those that differ in files and numbers alone."""

_FIELD = 24  # columns of the fields; longer ones have a line of their own


def fault_lines(faults: Iterable[Fault], width: int = WIDTH) -> list[str]:
    """Returns a table of faults: each file on a line of its own, below it field and problem.

    Of faults that differ in files and numbers alone, the first `MOST_ALIKE` are shown, and the rest is counted.

    Args:
        faults: ordered by file.
        width: columns to fill.
    """
    lines = []
    counts: Counter[tuple[str, str, str]] = Counter()
    shown = []
    for fault in faults:
        counts[_likeness(fault)] += 1
        if counts[_likeness(fault)] <= MOST_ALIKE:
            shown.append(fault)
    for file, own in groupby(shown, key=lambda fault: fault.file):
        lines += textwrap.wrap(file, width)
        for fault in own:
            field = f"  {fault.field or '(file)'}"
            words = fault.problem if fault.severity == "refused" else f"[flagged] {fault.problem}"
            problem = textwrap.wrap(words, width - _FIELD - 1)
            if len(field) < _FIELD:
                lines.append(f"{field:<{_FIELD}} {problem[0]}")
                problem = problem[1:]
            else:
                lines += textwrap.wrap(field, width, subsequent_indent="    ")
            lines += [" " * (_FIELD + 1) + line for line in problem]
    for (severity, field, problem), count in counts.items():
        if count > MOST_ALIKE:
            words = f"{count - MOST_ALIKE} more {severity}, as {field or 'those of files'}: {problem}; --json has all"
            lines += textwrap.wrap(words, width, subsequent_indent="  ")
    return lines


def _likeness(fault: Fault) -> tuple[str, str, str]:
    """Returns a fault's severity, field and problem, with ids, digests and numbers replaced by a sign."""
    field, problem = (re.sub(_NUMBER, "#", text) for text in (fault.field, fault.problem))
    return fault.severity, field, problem


_NUMBER = re.compile(r"\b[0-9a-f]{16,}|[-+]?\d[\d.e+-]*")


def verdict(faults: Iterable[Fault]) -> str:
    """Returns the count of faults in words, as "2 faults refused, 1 flagged"."""
    severities = [fault.severity for fault in faults]
    refused, flagged = severities.count("refused"), severities.count("flagged")
    if not severities:
        return "no fault"
    words = [f"{refused} fault{'s' if refused != 1 else ''} refused"] * bool(refused)
    return ", ".join([*words, *[f"{flagged} flagged"] * bool(flagged)])


def diff_lines(difference: BoardDiff, width: int = WIDTH) -> list[str]:
    """Returns a difference: its drift, then rows and cells.

    Args:
        difference: of two boards.
        width: columns to fill.
    """
    if difference.equal:
        return ["no difference"]
    lines = []
    for drift in difference.drift:
        if drift.changed:
            words = (
                f"{drift.name}: {drift.changed} of {drift.compared} differ, {drift.disjoint} with disjoint intervals; "
                f"mean {drift.mean:+.4g}, largest {drift.largest:+.4g} ({drift.where})"
            )
            lines += textwrap.wrap(words, width, subsequent_indent="  ")
    parts = {"rows": difference.rows} | ({} if difference.cells is None else {"cells": difference.cells})
    for noun, part in parts.items():
        lines += _part(noun, part, width)
    return lines


def _part(noun: str, part: Differences, width: int) -> list[str]:
    counts = f"{len(part.added)} added, {len(part.removed)} removed, {len(part.changed)} changed, {part.same} equal"
    lines = [f"{noun}: {counts}"]
    for sign, names in (("+", part.added), ("-", part.removed)):
        for name in names:
            lines += textwrap.wrap(f"{sign} {name}", width, subsequent_indent="  ")
    for change in part.changed:
        lines += textwrap.wrap(f"~ {change.name}", width, subsequent_indent="  ")
        for words in _words(change):
            lines += textwrap.wrap(words, width, initial_indent="    ", subsequent_indent="      ")
    return lines


def _words(change: ItemChange) -> Iterator[str]:
    for number in change.numbers:
        words = f"{number.name}: {_value(*number.before)} -> {_value(*number.after)}"
        difference = "" if number.difference is None else f" ({number.difference:+.4g})"
        yield words + difference + (", disjoint intervals" if number.disjoint else "")
    for name, (before, after) in change.fields.items():
        yield f"{name}: {_short(before)} -> {_short(after)}"


def _value(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.4g}" + ("" if low is None or high is None else f" [{low:.4g}, {high:.4g}]")


def _short(value: Any) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value, sort_keys=True), 100)
