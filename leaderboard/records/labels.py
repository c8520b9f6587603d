"""Tells settings apart in few words, and reduces tasks to what makes two cells comparable."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def differences(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells dictionaries apart, as "clip_norm=1, lr=0.5"; empty strings when they are equal.

    Args:
        items: dictionaries of JSON values.

    Returns:
        One text for each of them.
    """
    # In the order of first appearance, which is a method's own order of its settings.
    keys = list(dict.fromkeys(key for item in items for key in item))
    differing = [key for key in keys if len({key_of(item.get(key)) for item in items}) > 1]
    return [", ".join(f"{key}={word(item[key])}" for key in differing if key in item) for item in items]


def word(value: Any) -> str:
    """A setting's value for a reader."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def public(task: Mapping[str, Any]) -> dict[str, Any]:
    """A task without what a seed decides: hashes of its split, and the seed itself."""
    return {
        key: public(value) if isinstance(value, dict) else value
        for key, value in task.items()
        if key not in ("seed", "hash", "hashes", "digest", "digests") and not key.endswith(("_hash", "_digest"))
    }


def without(task: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A task without the keys named."""
    return {key: value for key, value in task.items() if key not in keys}


def key_of(value: Any) -> str:
    """A hashable stand-in for a JSON value; equal for equal ones, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True)
