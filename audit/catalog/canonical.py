"""Canonical settings of a method, from which ids of records and digests of suites are hashed.

A setting at its default is omitted, so that records keep their ids when a method gains a setting. Settings older than
this rule are always included, because existing ids contain them.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from .methods import MethodKind, settings
from .settings import Setting


@cache
def older() -> dict[str, dict[str, list[str]]]:
    """Returns settings older than the rule, by kind and name of a method; adding to their file changes ids."""
    text = (
        importlib.resources.files("leakbench.audit.catalog").joinpath("older_settings.json").read_text(encoding="utf-8")
    )
    return json.loads(text)


def canonical(kind: MethodKind, name: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a method that its ids depend on.

    Args:
        kind: "defenses" or "attacks".
        name: of the method.
        chosen: every setting, resolved.
    """
    always, known = older()[kind].get(name, []), settings(kind, name)
    return {key: value for key, value in chosen.items() if key in always or not _at_default(known.get(key), value)}


def recorded(kind: MethodKind, name: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a method in record form: all, so that no reader needs the defaults of that version.

    Methods older than the rule are the exception: their records leave out settings that were added later and are at
    their default.
    """
    return canonical(kind, name, chosen) if name in older()[kind] else dict(chosen)


def _at_default(setting: Setting | None, value: Any) -> bool:
    if setting is None or setting.required:
        return False
    if _text(value) == _text(setting.default):
        return True
    # 1 equals 1.0 where the type is a number; without a type annotation, 1, 1.0 and true are three values.
    return value == setting.default and _text(setting.conform(value)) == _text(setting.conform(setting.default))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
