"""Installed versions of leakbench's dependencies, compared with the combinations that its tests passed with.

`tested_versions.json` is written by the test lanes (`tests/lanes.py --record`), never by hand.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

CORE = (
    *("torch", "numpy", "scipy", "scikit-learn", "threadpoolctl", "dp-accounting", "pydantic", "typer", "rich"),
    *("pandas", "pyarrow", "jinja2", "altair", "vl-convert-python", "pillow", "safetensors", "jaxtyping", "llvmlite"),
)
"""Distributions that every installation has."""

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "engines": {"opacus": "opacus", "backpack-for-pytorch": "backpack"},
    "images": {"torchvision": "torchvision", "torchmetrics": "torchmetrics", "lpips": "lpips", "kymatio": "kymatio"},
}
"""Extra -> its distributions, each with the module that it installs."""

_RECORDED = Path(__file__).with_name("tested_versions.json")


class Environment(NamedTuple):
    """Versions with which all default tests passed.

    Attributes:
        lane: "newest" or "lowest": which of the available versions that pyproject.toml admits were installed.
        python: Python's minor version, as "3.12".
        on: date of the tests, as "2026-11-26".
        versions: as returned by `installed`.
    """

    lane: str
    python: str
    on: str
    versions: Mapping[str, str]

    def differing(self, installed: Mapping[str, str]) -> dict[str, str]:
        """Returns the tested versions that differ from those in `installed`; extras missing on either side are ignored.

        Args:
            installed: installed versions, as returned by `installed`.
        """
        needed = {"python", *CORE}
        versions_here = {
            name: installed.get(name, "" if name in needed else mine) for name, mine in self.versions.items()
        }
        return {name: mine for name, mine in self.versions.items() if versions_here[name] != mine}

    def __str__(self) -> str:
        """Describes the environment for use inside a sentence."""
        return f"{self.lane} versions on Python {self.python}, {self.on}"


def version(name: str) -> str | None:
    """Returns the installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str]:
    """Returns the versions of Python and all installed dependencies, without Python's patch level and build tags."""
    extras = (name for distributions in EXTRAS.values() for name in distributions)
    versions = {name: version(name) for name in (*CORE, *extras)}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python} | {name: number.partition("+")[0] for name, number in versions.items() if number}


@cache
def environments() -> tuple[Environment, ...]:
    """Returns the environments in which the tests passed: the latest for each lane and Python version."""
    return tuple(Environment(**entry) for entry in json.loads(_RECORDED.read_text(encoding="utf-8")))


def verdict(installed: Mapping[str, str], known: tuple[Environment, ...] | None = None) -> str:
    """Returns a sentence: whether these versions were tested together, else how the nearest tested environment differs.

    Args:
        installed: as returned by `installed`.
        known: environments to compare with; by default all recorded.
    """
    known = environments() if known is None else known
    if not known:
        return "no versions were tested together"
    nearest = min(known, key=lambda versions: len(versions.differing(installed)))
    differing = ", ".join(f"{name} {number}" for name, number in nearest.differing(installed).items())
    absent = ", ".join(name for name in installed if name not in nearest.versions)
    sentence = f"tested together ({nearest})"
    if differing:
        sentence = f"not tested together; the nearest that were ({nearest}) have {differing}"
    return f"{sentence}, without {absent}" if absent else sentence


def show_versions() -> None:
    """Prints the versions of Python, leakbench and its dependencies, and whether they were tested together.

    The output is meant for bug reports; `leakbench doctor` also describes the machine.
    """
    versions = {"leakbench": version("leakbench") or "not installed"} | installed()
    print(
        "\n".join(
            [*(f"{name:<20} {number}" for name, number in versions.items()), f"{'versions':<20} {verdict(installed())}"]
        )
    )
