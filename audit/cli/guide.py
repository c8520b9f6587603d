"""Descriptions of methods and suites for the pages of a site, read without importing any method."""

from __future__ import annotations

import importlib.resources
from functools import cache

from leakbench.leaderboard.site.site import Guide, MethodWords

from ..catalog.listing import MethodKind, column, describe, names


def guide() -> Guide:
    """Returns the descriptions of all methods and suites of the catalogue."""
    families = defense_families()
    return Guide(
        defenses={name: _words("defenses", name, families.get(name, "other")) for name in names("defenses")},
        attacks={name: _words("attacks", name) for name in names("attacks")},
        suites={name: describe("suites", name) for name in names("suites")},
    )


def _words(kind: MethodKind, name: str, family: str = "") -> MethodWords:
    source = column(f"leakbench.{kind}", "source").get(name, "")
    return MethodWords(summary=describe(kind, name), source=source, family=family)


@cache
def defense_families() -> dict[str, str]:
    """Returns the part of a step that each defense changes: the heading above its row in the README of defenses.

    Returns:
        Name of a defense -> first words of the heading, in lower case, as "bound" or "two blocks".
    """
    text = importlib.resources.files("leakbench.defenses").joinpath("README.md").read_text(encoding="utf-8")
    families, family = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            family = line.removeprefix("## ").partition(":")[0].partition("(")[0].strip().lower()
        elif line.startswith("| `"):
            families[line.split("`")[1]] = family
    return families
