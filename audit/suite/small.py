"""Small forms of suites: the `[small]` table of a file overrides keys of the suite, each as `--set` would.

The small form is the suite's experiment at a size that takes minutes on two cores. It is a separate suite with its own
digest and name, which is `NAME_small`, or the table's `name` where several suites share a small form. The table's key
`without` lists keys of the suite to remove. The small form reports no figures of papers, which apply to the full suite.
"""

from __future__ import annotations

import copy
import importlib.resources
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from .changes import put, values_at

KEY = "small"
"""Name of the table."""


@cache
def small_forms() -> dict[str, str]:
    """Returns a mapping from the name of each small form of a built-in suite to the name of the suite."""
    files = (entry for entry in importlib.resources.files("leakbench.benchmarks.suites").iterdir())
    suites = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".toml")]
    return {small_name(suite): suite["name"] for suite in suites if KEY in suite}


def small_name(raw: Mapping[str, Any]) -> str:
    """Returns the name of a suite's small form."""
    return raw[KEY].get("name", f"{raw['name']}_{KEY}")


def small_form(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document of a suite's small form.

    Args:
        raw: the suite's document, with its `[small]` table.

    Raises:
        ValueError: an override that leads nowhere, or a key in `without` that the suite lacks.
    """
    overrides = ({"name": small_name(raw)} if "name" in raw else {}) | raw[KEY]
    without = overrides.pop("without", [])
    if not isinstance(without, list) or not all(isinstance(name, str) for name in without):
        raise ValueError(f"small.without must be a list of keys, as ['task.views'], got {without!r}")
    form = copy.deepcopy({key: value for key, value in raw.items() if key not in (KEY, "reported")})
    for name in without:
        *above, last = name.split(".")
        tables = [table for table in values_at(form, above) if isinstance(table, dict) and last in table]
        if not tables:
            raise ValueError(f"small.without: the suite has no key {name!r}")
        for table in tables:
            del table[last]
    for path, value in _values(overrides):
        put(form, path, value, f"small.{'.'.join(path)}")
    return form


def _values(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    """Returns paths and values of a table, nested tables included."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _values(value, (*above, key))
        else:
            yield [*above, key], value
