"""Copies of rows and records without paths of the machine on which they were made, for pages.

A path may be in any text of a record: a data set `folder:PATH`, a defense by a file, a reason. Rows are grouped and get
their ids before, so that two data sets of equal file names stay two rows.
"""

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from ..exports.safe_text import portable
from ..records.record import Record
from ..records.validation import OpenFields

T = TypeVar("T")


class PortableCopies:
    """Copies whose text has no path; of a record once, because cells of several boards share it."""

    def __init__(self) -> None:
        # The record itself is kept too, so that no other gets its identity.
        self._records: dict[int, tuple[Record, Record]] = {}

    def of(self, value: T) -> T:
        """Returns a value with the text of its dataclasses, mappings and sequences made portable; itself if it was.

        Args:
            value: of dataclasses of the board; a record is read only if its text has a path.
        """
        return self._of(value)

    def _of(self, value: Any) -> Any:
        if isinstance(value, str):
            return portable(value)
        if isinstance(value, Record):
            if id(value) not in self._records:
                self._records[id(value)] = value, value if _clean(value) else self._fields(value)
            return self._records[id(value)][1]
        if dataclasses.is_dataclass(value):
            return self._fields(value)
        if isinstance(value, OpenFields):
            return type(value)({self._of(key): self._of(item) for key, item in value.items()})
        if isinstance(value, Mapping):
            return {self._of(key): self._of(item) for key, item in value.items()}
        if isinstance(value, list | tuple | frozenset):
            return type(value)(map(self._of, value))
        return value

    def _fields(self, value: Any) -> Any:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: new for name, old in fields.items() if (new := self._of(old)) is not old and new != old}
        if not changed:
            return value
        # Not `replace`: a record was checked when it was read, and its shortened text need not pass again.
        shortened = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(shortened, name, new)
        return shortened


def _clean(record: Record) -> bool:
    """True if the text of a record, as one JSON document, has no path and can be encoded."""
    text = json.dumps(vars(record), default=vars, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    # A backslash of JSON escapes a quote or begins another; neither is part of a path of this rule.
    return portable(text) == text
