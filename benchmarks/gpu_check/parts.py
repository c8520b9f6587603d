"""Table of the parts, and the program of a part's process: a name, and settings as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass

from .rows import NotMeasured, PartSettings


@dataclass(frozen=True, kw_only=True)
class CheckPart:
    """A part of the check.

    Attributes:
        name: on the command line.
        module: of this package, with a function `measure`.
        function: its function, if another.
        seconds: budget out of six minutes.
        about: heading of its table.
    """

    name: str
    module: str
    function: str = "measure"
    seconds: float
    about: str


PARTS = (
    CheckPart(name="sums", module="sums", seconds=30, about="Sums against the float64 reference"),
    CheckPart(name="contributions", module="contributions", seconds=40, about="Longest contribution of one example"),
    CheckPart(name="tests", module="gpu_tests", seconds=85, about="Tests that need a GPU"),
    CheckPart(name="steps", module="private_steps", seconds=90, about="A private step"),
    CheckPart(name="noise", module="device_noise", seconds=15, about="Noise of a step"),
    CheckPart(name="inversion", module="restarts", seconds=15, about="An iteration of Inverting Gradients"),
    CheckPart(
        name="cell", module="suite_runs", function="measure_cell", seconds=40, about="One cell of rs_table2_cifar10"
    ),
    CheckPart(name="quick", module="suite_runs", function="measure_quick", seconds=45, about="Suite quick"),
)
"""In the order in which they run: numbers first. A part's unused seconds are those of later ones."""


def run(name: str, settings: PartSettings) -> None:
    """Prints the rows of a part as lines of JSON, or the reason why it cannot be measured here."""
    part = next(part for part in PARTS if part.name == name)
    try:
        for row in getattr(importlib.import_module(f"{__package__}.{part.module}"), part.function)(settings):
            print(row.to_line(), flush=True)
    except NotMeasured as reason:
        print(json.dumps({"missing": str(reason)}), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], PartSettings.from_json(sys.argv[2]))
