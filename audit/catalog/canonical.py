"""Canonical settings of a method, which ids of records and digests of suites are hashed from.

A setting at its default is left out: a method may gain one, and records of its former version keep their ids. Settings
that are older than this rule are in the ids that exist whatever their value, and stay in them.
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
    """Settings that are older than the rule, by kind and name of a method. Adding to this file would move ids."""
    text = (
        importlib.resources.files("leakbench.audit.catalog").joinpath("older_settings.json").read_text(encoding="utf-8")
    )
    return json.loads(text)


def canonical(kind: MethodKind, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method that its ids depend on.

    Args:
        kind: "defenses" or "attacks".
        name: of the method.
        given: every setting, decided.
    """
    always, known = older()[kind].get(name, []), settings(kind, name)
    return {key: value for key, value in given.items() if key in always or not _at_default(known.get(key), value)}


def recorded(kind: MethodKind, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method as a record has them: all, so that a reader need not know the defaults of its day.

    Methods that are older than the rule keep the keys that their records have always had: a setting that they gained
    later is there only where it is set.
    """
    return canonical(kind, name, given) if name in older()[kind] else dict(given)


def _at_default(setting: Setting | None, value: Any) -> bool:
    if setting is None or setting.required:
        return False
    if _text(value) == _text(setting.default):
        return True
    # 1 is 1.0 where a number is asked for, and neither is true: a method without annotations may tell all three apart.
    return value == setting.default and _text(setting.conform(value)) == _text(setting.conform(setting.default))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
