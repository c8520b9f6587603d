"""Labels that distinguish settings by their differing values, and tasks without values that depend on the seed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def differences(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the settings in which dictionaries differ, as "clip_norm=1, lr=0.5"; empty strings if they are equal.

    Args:
        items: dictionaries of JSON values.

    Returns:
        A text for each dictionary.
    """
    # In the order of first appearance, which is a method's own order of its settings.
    keys = list(dict.fromkeys(key for item in items for key in item))
    # An absent key counts as None, so a setting whose default is None makes no difference.
    differing = [key for key in keys if len({key_of(item.get(key)) for item in items}) > 1]
    return [", ".join(f"{key}={word(item[key])}" for key in differing if key in item) for item in items]


def word(value: Any) -> str:
    """Formats a setting's value."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def public(task: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the task without values that depend on the seed: of its split, its checkpoint, and the seed itself."""
    return {
        key: public(value) if isinstance(value, dict) else value
        for key, value in task.items()
        if key not in ("seed", "hash", "hashes", "digest", "digests", "client_sizes", "checkpoint")
        and not key.endswith(("_hash", "_digest"))
    }


def without(task: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Returns the task without the named keys."""
    return {key: value for key, value in task.items() if key not in keys}


def key_of(value: Any) -> str:
    """Canonical string of a JSON value, for hashing and comparison; the order of keys does not count."""
    # Trap: 1 and 1.0 are equal in Python and have different keys.
    return json.dumps(value, sort_keys=True, default=dict)
