"""Changes of a suite by `--set`: which cells they touch, and their words on a board.

A paper's figure is for the suite as its file has it. A cell that an override touches is another experiment: its record
names the override, and no figure of a paper stands beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FREE = frozenset({"seeds", "name", "about", "controls"})
"""Tables that decide which cells there are, and not what any of them is."""

NOT_SET = "not set"


@dataclass(frozen=True)
class Change:
    """One override.

    Attributes:
        path: keys, as ("task", "epochs").
        method: of an entry of `defense` or `attack`, its name; empty for every one.
        words: "task.epochs 80 -> 4".
    """

    path: tuple[str, ...]
    method: str
    words: str


def change(raw: Mapping[str, Any], path: list[str], value: object) -> Change:
    """An override of a document, before it is applied.

    Args:
        raw: the document as it is.
        path: keys of the override.
        value: the new one.
    """
    method = ""
    if path[0] in ("defense", "attack") and len(path) > 1:
        entries = raw.get(path[0], [])
        named = entries[int(path[1])] if path[1].isdecimal() and int(path[1]) < len(entries) else None
        method = str(named.get("name", "")) if isinstance(named, dict) else path[1]
    before = " and ".join(dict.fromkeys(_words(old) for old in _values(raw, path)))
    return Change(tuple(path), method, f"{'.'.join(path)} {before} -> {_words(value)}")


def touching(
    changes: Iterable[Change], *, defense: str, attack: str | None, own: Iterable[str], shared: bool
) -> tuple[str, ...]:
    """Words of the changes that touch a cell.

    Args:
        changes: of its suite.
        defense: its name.
        attack: its name; None for utility.
        own: training keys that the defense decides itself, whatever the task.
        shared: whether the cell is about a shared update.
    """
    own = set(own)

    def touches(one: Change) -> bool:
        match one.path:
            case ("defense", *_):
                return one.method in ("", defense)
            case ("attack", *_):
                return attack is not None and one.method in ("", attack)
            case ("share", *_):
                return shared
            case ("task", key, *_):
                return key not in own
            case (table, *_):
                return table not in FREE
            case _:
                return True

    return tuple(one.words for one in changes if touches(one))


def _values(node: object, path: list[str]) -> list[object]:
    """Values at a path; of every entry of that name in a list."""
    if not path:
        return [node]
    key, *below = path
    if isinstance(node, Mapping):
        return _values(node[key], below) if key in node else [NOT_SET]
    if isinstance(node, list):
        if key.isdecimal() and int(key) < len(node):
            return _values(node[int(key)], below)
        return [
            value
            for one in node
            if isinstance(one, Mapping) and one.get("name") == key
            for value in _values(one, below)
        ]
    return [NOT_SET]


def _words(value: object) -> str:
    return NOT_SET if value is NOT_SET else json.dumps(value, default=str)
