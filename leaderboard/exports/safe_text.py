"""Text of records made safe for an export: no path of a machine, no lone surrogate, names that fit a file system."""

import re
from typing import Any

from ..records.files import digest_of_bytes

# Quoted paths may have spaces. A slash after a word or a dot belongs to a fraction or a relative path, two slashes to a
# URL; a single name after a slash says nothing of a machine. A colon may be that of a data set, `folder:PATH`.
_ROOT = r"(?:file:/+|~[\w-]*/|[A-Za-z]:[\\/]+|/(?=[^\s/'\"]+/))"
_PATH = re.compile(
    rf"""(?P<quote>['"]){_ROOT}(?P<quoted>[^'"\n]+)(?P=quote)|(?<![\w./\\<]){_ROOT}(?P<bare>[^\s'",;()\[\]<>`]+)"""
)


def portable(value: Any) -> Any:
    """Returns a JSON value whose strings have file names instead of absolute paths, and no lone surrogates.

    Args:
        value: a string, or a list or dictionary with strings.
    """
    if isinstance(value, str):
        if value.isascii() and not {"/", "\\"} & set(value):
            return value
        # JSON may hold half a surrogate pair, which no encoding can write.
        return _PATH.sub(_file_name, value.encode("utf-8", "replace").decode())
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    return [portable(item) for item in value] if isinstance(value, list | tuple) else value


def _file_name(match: re.Match[str]) -> str:
    quote = match["quote"] or ""
    name = re.split(r"[\\/]", (match["quoted"] or match["bare"]).rstrip("\\/"))[-1]
    return f"{quote}{name}{quote}"


def in_one_line(text: str) -> str:
    """Returns the text without line breaks of any kind, for a comment of YAML or LaTeX."""
    return "".join(c if c.isprintable() else " " for c in " ".join(portable(text).split()))


def slug(text: str) -> str:
    """Returns a name of letters, digits, `_`, `.` and `-`, with a digest if the text has other characters."""
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip(".-")[:80]
    return (
        cleaned
        if cleaned and cleaned == text
        else f"{cleaned or 'x'}-{digest_of_bytes(text.encode('utf-8', 'replace'))[:8]}"
    )
