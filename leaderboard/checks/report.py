"""Faults of a check as lines for a terminal."""

import textwrap
from collections.abc import Iterable
from itertools import groupby

from .fault import Fault

WIDTH = 80
"""Columns of the narrowest terminal that the lines fit."""

_FIELD = 24  # columns of the fields; longer ones have a line of their own


def fault_lines(faults: Iterable[Fault], width: int = WIDTH) -> list[str]:
    """Returns a table of faults: each file on a line of its own, below it field and problem.

    Args:
        faults: ordered by file.
        width: columns to fill.
    """
    lines = []
    for file, own in groupby(faults, key=lambda fault: fault.file):
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
    return lines


def verdict(faults: Iterable[Fault]) -> str:
    """Returns the count of faults in words, as "2 faults refused, 1 flagged"."""
    severities = [fault.severity for fault in faults]
    refused, flagged = severities.count("refused"), severities.count("flagged")
    if not severities:
        return "no fault"
    words = [f"{refused} fault{'s' if refused != 1 else ''} refused"] * bool(refused)
    return ", ".join([*words, *[f"{flagged} flagged"] * bool(flagged)])
