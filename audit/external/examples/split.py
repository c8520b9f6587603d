"""Assignments of examples to groups: CSV of ids and groups, or JSON of groups and their ids."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from pathlib import Path

from leakbench.leaderboard.records.files import refuse_special

GROUPS = {"member": "members", "non_member": "non_members", "population": "population"}
"""Name of a group in a CSV row -> in JSON and in the results."""

_MOST_BYTES = 2**28


def read_split(file: Path) -> tuple[str, dict[str, list[int]]]:
    """Reads an assignment file: its SHA-256, and the ids of each group in it.

    Raises:
        ValueError: another format or group, or an id that is not a whole number or repeats.
    """
    try:
        refuse_special(file)
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"--split-file must have at most {_MOST_BYTES >> 20} MiB, and {file} has more")
        content = file.read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--split-file must be a CSV or JSON file, and {file} is not: {error}") from None
    table = _of_json(file, text) if text.lstrip().startswith("{") else _of_csv(file, text)
    if wrong := [
        example_id for ids in table.values() for example_id in ids if not example_id.isdecimal() or len(example_id) > 18
    ]:
        raise ValueError(f"ids of {file} must be whole numbers, got {wrong[0]!r}")
    groups = {name: [int(example_id) for example_id in ids] for name, ids in table.items() if ids}
    counts = Counter(example_id for ids in groups.values() for example_id in ids)
    if twice := [example_id for example_id, count in counts.items() if count > 1]:
        raise ValueError(f"ids of {file} must be in one group each, once, got {twice[0]} again")
    return hashlib.sha256(content).hexdigest(), groups


def _of_json(file: Path, text: str) -> dict[str, list[str]]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--split-file must be a CSV or JSON file, and {file} is not: {error}") from None
    if strange := [key for key in table if key not in GROUPS.values()]:
        raise ValueError(f"{file} must have the keys {', '.join(GROUPS.values())} alone, got {strange[0]!r}")
    if wrong := [key for key, ids in table.items() if not isinstance(ids, list)]:
        raise ValueError(f"{wrong[0]} of {file} must be a list of ids, got {type(table[wrong[0]]).__name__}")
    return {key: [str(example_id) for example_id in ids] for key, ids in table.items()}


def _of_csv(file: Path, text: str) -> dict[str, list[str]]:
    rows = csv.DictReader(text.splitlines())
    columns = rows.fieldnames or []
    if not {"id", "group"} <= set(columns):
        raise ValueError(f"{file} must have the columns id and group; it has {', '.join(map(str, columns)) or 'none'}")
    table: dict[str, list[str]] = {name: [] for name in GROUPS.values()}
    for row in rows:
        if row["group"] not in GROUPS:
            raise ValueError(f"group of {file} must be {', '.join(GROUPS)}, got {row['group']!r}")
        table[GROUPS[row["group"]]].append((row["id"] or "").strip())
    return table
