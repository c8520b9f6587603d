"""Error messages for unknown names, with the nearest known name as a suggestion, else with all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CatalogError(ValueError):
    """An unknown name, invalid settings, or a method whose file is in error."""


def near_miss(word: str, options: Iterable[str]) -> str | None:
    """Returns the option most similar to the word, if any is."""
    close = difflib.get_close_matches(word, list(options), n=1)
    return close[0] if close else None


def no_such(kind: str, name: str, options: Iterable[str]) -> str:
    """Returns a sentence such as "no defense named 'pcpd'; did you mean 'pcdp'?"."""
    return f"no {kind} named {name!r}; {way_out(name, options)}"


def way_out(word: str, options: Iterable[str]) -> str:
    """Returns a clause such as "did you mean 'clip_norm'?", or all options if none is similar."""
    options = list(options)  # read twice, and it may be an iterator
    near = near_miss(word, options)
    return f"did you mean {near!r}?" if near else f"there are {', '.join(options) or 'none'}"


def in_one_line(error: BaseException) -> str:
    """Returns class and message of an exception without line breaks, for records, progress and errors."""
    words = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {words}"
