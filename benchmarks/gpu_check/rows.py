"""Rows that a part prints as lines of JSON, and the settings that it is given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

CheckedFigure = float | int | str | None
"""A number, a word, or None for a figure that was not measured."""


class NotMeasured(RuntimeError):
    """A part, or a figure, cannot be measured on this machine; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class PartSettings:
    """Settings of a part.

    Attributes:
        device: "cpu" or "cuda".
        small: whether sizes are small, as a test of the check itself.
        seconds: budget, after which the part's process is ended.
        jobs: processes of pytest and of suites.
        folder: for files of the part.
    """

    device: str
    small: bool
    seconds: float
    jobs: int
    folder: Path

    def to_json(self) -> str:
        """Returns the settings for the command line of the part's process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> PartSettings:
        """Returns the settings of a command line."""
        values = json.loads(text)
        return cls(**{**values, "folder": Path(values["folder"])})


@dataclass(frozen=True, kw_only=True)
class CheckedRow:
    """A line of a part's table.

    Attributes:
        name: of the case.
        figures: by column.
        wrong: sentences on numbers that are wrong; empty if none is.
        remarks: reasons of figures that were not measured.
    """

    name: str
    figures: Mapping[str, CheckedFigure] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def to_line(self) -> str:
        """Returns the row as a line of JSON."""
        return json.dumps({"row": asdict(self)})

    @classmethod
    def from_line(cls, line: str) -> CheckedRow | None:
        """Returns the row of a line, or None for a line that holds none: libraries print, too."""
        try:
            values = json.loads(line)["row"]
            return cls(
                name=values["name"],
                figures=values["figures"],
                wrong=tuple(values["wrong"]),
                remarks=tuple(values["remarks"]),
            )
        except (ValueError, KeyError, TypeError):
            return None


class Measure(Protocol):
    """Function of a part's module."""

    def __call__(self, settings: PartSettings) -> Iterator[CheckedRow]:
        """Yields rows as they are measured; raises `NotMeasured` if the part cannot run here."""
        ...
