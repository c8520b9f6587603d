"""JSON object in a file of an untrusted folder: no link, limited size, unique names, no NaN."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from .checks.limits import FileRefused, shown

_MAX_BYTES = 8 << 20


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object of an untrusted file.

    Args:
        path: of a file in UTF-8.

    Raises:
        FileRefused: other content, as a clause that the caller puts after the folder.
        OSError: the file does not exist or cannot be read.
    """
    refuse_link(path)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(handle, "rb") as file:
        content = file.read(_MAX_BYTES + 1) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    if not 0 < len(content) <= _MAX_BYTES:
        raise FileRefused(f"{path.name} must be a file of 1 to {_MAX_BYTES} bytes")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise FileRefused(f"{path.name} must have each name once, and has {shown(twice)} twice")
        return fields

    def no_number(text: str) -> Any:
        raise FileRefused(f"numbers of {path.name} must be finite, got {text}")

    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=once, parse_constant=no_number)
    except FileRefused:
        raise
    except (ValueError, RecursionError):
        raise FileRefused(f"{path.name} must be JSON in UTF-8") from None
    if not isinstance(document, dict):
        raise FileRefused(f"{path.name} must be a JSON object")
    return document


def refuse_link(path: Path) -> None:
    """Raises `FileRefused` for a symbolic link, which may lead out of the folder."""
    if path.is_symlink():
        raise FileRefused(
            f"its {path.name} is a link, as in the cache of Hugging Face; copy the folder by cp -rL and name the copy"
        )
