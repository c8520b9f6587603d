"""Text in files of strangers: characters that change how a page or terminal reads, markup, and paths of machines."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from .fault import Fault
from .limits import Limits

MOST_NAMED = 5
"""Records that a fault names, of those that have it."""

PATH = "it holds a path"
"""Beginning of the problem of a text with a path of a machine."""

_MARKUP = re.compile(r"<\s*[A-Za-z/!?]|javascript:|data:text/html|\]\(|&#", re.IGNORECASE)
_NAME = re.compile(r"(?!.*\.\.)\w[\w ./:+@=,-]{0,199}", re.ASCII)
_ABSOLUTE = re.compile(r"""(?:^|[\s"'`(=\[,;:])(?:/(?=[\w.])[\w.+-]+/|~/|[A-Za-z]:\\|\\\\\w)""")
_NAMED = (
    ("suite",),
    ("kind",),
    ("defense", "name"),
    ("attack", "name"),
    ("task", "data"),
    ("task", "model"),
)


def printable(text: str, most: int = 200) -> str:
    """Returns the text with characters that do not print replaced by their codes, cut to a length."""
    words = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[: most + 1])
    return words if len(words) <= most else f"{words[: most - 3]}..."


def listed(ids: Iterable[str]) -> str:
    """Returns the first ids in order, and the number of the others."""
    ids = sorted(ids)
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    return f"{', '.join(ids[:MOST_NAMED])}{more}"


def text_faults(data: Any, file: str, limits: Limits) -> list[Fault]:
    """Returns the faults of all strings of a JSON document, keys included.

    Args:
        data: parsed document.
        file: its path below the checked folder.
        limits: of nesting and lengths.
    """
    faults = []
    for path, value in _leaves(data, (), limits.depth):
        if value is _TOO_DEEP:
            problem = f"brackets must be nested at most {limits.depth} deep, and these are nested deeper"
        elif isinstance(value, str):
            problem = _problem(value, path, limits)
        else:
            problem = f"integers must be below 2**63, got one of {value.bit_length()} bits"
        if problem:
            severity = "flagged" if problem.startswith(PATH) else "refused"
            faults.append(Fault(file=file, field=field_of(path), problem=problem, severity=severity))
    return faults


def field_of(path: tuple[str | int, ...]) -> str:
    """Path of a field in words, as "metrics.auc.value" or "flags[0]"."""
    words = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return printable(words.removeprefix("."))


_TOO_DEEP = object()


def _leaves(data: Any, path: tuple[str | int, ...], depth: int) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields every string and every too large integer with its path; a key is a string at the path of its value."""
    if isinstance(data, str):
        if not (data.isalnum() and data.isascii() and len(data) < 100):
            yield path, data
    elif isinstance(data, dict | list):
        if depth == 0:
            yield path, _TOO_DEEP
            return
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            below = (*path, key)
            if isinstance(key, str) and not (key.isascii() and key.isidentifier() and len(key) < 100):
                yield below, key
            if not isinstance(value, float) and value is not None:
                yield from _leaves(value, below, depth - 1)
    elif isinstance(data, int) and data.bit_length() > 63:
        yield path, data


def _problem(text: str, path: tuple[str | int, ...], limits: Limits) -> str:
    """Reason why a string is refused or flagged; empty if it is plain."""
    if len(text) > limits.text:
        return f"text must have at most {limits.text} characters, got {len(text)}"
    if not text.isprintable() and (odd := next((c for c in text if not _plain(c)), None)) is not None:
        name = unicodedata.name(odd, f"U+{ord(odd):04X}")
        return f"text must have printable characters in reading order, got {name.lower()} in {printable(text, 60)!r}"
    if ("<" in text or ":" in text or "](" in text or "&#" in text) and _MARKUP.search(text):
        return f"text must be without markup, got {printable(text, 60)!r}"
    # Letters of other alphabets may look like the letters of a known name. An engine's may be followed by a reason.
    name = text.partition(" (")[0] if path == ("engine",) else text if _is_name(path) else ""
    if name and not _NAME.fullmatch(name):
        return f"a name must be of ASCII letters, digits and ./:+@=,- without '..', got {printable(text, 60)!r}"
    if ("/" in text or "\\" in text) and _ABSOLUTE.search(text):
        return f"{PATH} of the machine that wrote it, which a board would publish: {printable(text, 60)!r}"
    return ""


def _is_name(path: tuple[str | int, ...]) -> bool:
    return path in _NAMED or path[0] == "flags" or (path[0] == "metrics" and len(path) == 2)


def _plain(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
