"""Overrides of a suite by `--set`: the cells they affect, and their description on a board.

A paper's figure applies to the unchanged suite file. A cell affected by an override is another experiment: its record
names the override, and no figure of a paper is shown with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..catalog.messages import no_such

FREE = frozenset({"seeds", "name", "about", "controls"})
"""Top-level keys that select or name cells without changing any cell."""

NOT_SET = "not set"


@dataclass(frozen=True)
class Change:
    """An override.

    Attributes:
        path: keys, such as ("task", "epochs").
        method: name of the affected entry of `defense` or `attack`; empty for every entry.
        words: "task.epochs 80 -> 4".
    """

    path: tuple[str, ...]
    method: str
    words: str


def change(raw: Mapping[str, Any], path: list[str], value: object) -> Change:
    """Returns an override of a document, before it is applied.

    Args:
        raw: the current document.
        path: keys of the override.
        value: the new value.
    """
    method = ""
    if path[0] in ("defense", "attack") and len(path) > 1:
        entries = raw.get(path[0], [])
        named = entries[int(path[1])] if path[1].isdecimal() and int(path[1]) < len(entries) else None
        method = str(named.get("name", "")) if isinstance(named, dict) else path[1]
    before = " and ".join(dict.fromkeys(_words(old) for old in values_at(raw, path)))
    return Change(tuple(path), method, f"{'.'.join(path)} {before} -> {_words(value)}")


def touching(
    changes: Iterable[Change], *, defense: str, attack: str | None, own: Iterable[str], shared: bool
) -> tuple[str, ...]:
    """Returns the descriptions of the overrides that affect a cell.

    Args:
        changes: overrides of the suite.
        defense: name of the cell's defense.
        attack: name of the cell's attack; None for utility.
        own: training keys that the defense sets itself, for any task.
        shared: whether the cell is about a shared update.
    """
    own = set(own)

    def touches(change: Change) -> bool:
        match change.path:
            case ("defense", *_):
                return change.method in ("", defense)
            case ("attack", *_):
                return attack is not None and change.method in ("", attack)
            case ("share", *_):
                return shared
            case ("public_only", *_):
                return defense == "public_only"
            case ("task", key, *_):
                return key not in own
            case (table, *_):
                return table not in FREE
            case _:
                return True

    return tuple(change.words for change in changes if touches(change))


def put(node: Any, path: list[str], value: Any, override: str) -> None:
    """Sets a value at a path of a document; a name in the path of a list selects all its entries of that name.

    Args:
        node: the document, which is modified.
        path: keys, such as ["task", "epochs"].
        value: the new value.
        override: as written, for the message.

    Raises:
        ValueError: the path leads nowhere.
    """
    key, *below = path
    if isinstance(node, dict) and below:
        # A missing table is created: the schema decides whether it is allowed.
        put(node.setdefault(key, {}), below, value, override)
    elif isinstance(node, dict):
        node[key] = value
    elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        if below:
            put(node[int(key)], below, value, override)
        else:
            node[int(key)] = value
    elif isinstance(node, list) and below:
        # A method may be listed twice, with different settings.
        named = [entry for entry in node if isinstance(entry, dict) and entry.get("name") == key]
        if not named:
            known = [str(entry.get("name")) for entry in node if isinstance(entry, dict)]
            raise ValueError(f"override {override!r}: {no_such('entry', key, known)}")
        for entry in named:
            put(entry, below, value, override)
    else:
        raise ValueError(f"override {override!r} leads nowhere: there is no table to put {key!r} in")


def values_at(node: object, path: list[str]) -> list[object]:
    """Returns the values at a path; a name in the path of a list selects all its entries of that name."""
    if not path:
        return [node]
    key, *below = path
    if isinstance(node, Mapping):
        return values_at(node[key], below) if key in node else [NOT_SET]
    if isinstance(node, list):
        if key.isdecimal() and int(key) < len(node):
            return values_at(node[int(key)], below)
        return [
            value
            for entry in node
            if isinstance(entry, Mapping) and entry.get("name") == key
            for value in values_at(entry, below)
        ]
    return [NOT_SET]


def _words(value: object) -> str:
    return NOT_SET if value is NOT_SET else json.dumps(value, default=str)
