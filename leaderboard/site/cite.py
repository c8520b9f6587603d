r"""Citation of a row as BibTeX, with a digest of the records behind it, so that it pins the numbers.

Names come from strangers: in a field, no character of theirs opens or closes a group, begins a command or a comment.
BibTeX counts braces without regard to backslashes, so an escaped brace is a command with a name.
"""

import json
from collections.abc import Iterable

from ..board.identity import board_version
from ..board.rows import Row, guarantee_words
from ..board.text_formats import tex
from ..exports.publication import Publication
from ..exports.safe_text import portable
from ..records.files import digest_of_bytes
from ..records.record import SEAL, Record
from ..submissions.rows import as_submitted
from .links import row_page
from .site import SiteRow

AUTHOR = "leakbench"
"""Author of a row whose records are the publisher's."""

_BRACES = str.maketrans({"{": "(", "}": ")"})


def bibtex(row: SiteRow, publication: Publication, recorded: Iterable[Record] | None = None) -> str:
    """Returns the BibTeX entry of a row.

    Args:
        row: of the site; a submission's is cited by its submitters, with its tier.
        publication: date of the board, and its address, if stated.
        recorded: records of the row as their files have them, if those of the row have shortened paths.
    """
    submission = row.submission
    author = AUTHOR if submission is None else f"{submission.declaration.who} ({submission.handle})"
    note = [f"row {row.id}", f"tier: {row.tier.tier}"] if submission is not None else [f"row {row.id}"]
    note.append(f"SHA-256 of its records: {records_digest(row, recorded)}")
    fields = {
        "title": _words(f"{row.row.label} ({_budget(row.row)}) on {row.row.suite}"),
        "author": _words(author),
        "year": f"{publication.at.year:04d}",
        "howpublished": _words(f"Leaderboard, {board_version()}"),
        "note": _words(", ".join(note)),
    }
    if publication.url is not None:
        fields["url"] = f"{publication.url.rstrip('/')}/{row_page(row.id)}"
    # Twice in braces: BibTeX splits no author at "and", and changes no title's capitals.
    lines = [
        f"  {name} = {{{{{value}}}}}," if name in ("title", "author") else f"  {name} = {{{value}}},"
        for name, value in fields.items()
    ]
    return "\n".join([f"@misc{{leakbench-{row.id},", *lines, "}", ""])


def records_digest(row: SiteRow, recorded: Iterable[Record] | None = None) -> str:
    """Returns the SHA-256 over ids and seals of the records behind a row, as `ID SEAL` in a line each, by id.

    Records of a submission count as their files have them, without the handle before the name of the defense.

    Args:
        row: of the site.
        recorded: records of the row as their files have them; None for those of the row.
    """
    records = [*row.row.records, *row.row.unranked] if recorded is None else list(recorded)
    if row.submission is not None:
        records = [as_submitted(record, row.submission.handle, row.submission.digest) for record in records]
    lines = sorted({f"{record.id} {_seal(record)}\n" for record in records})
    return digest_of_bytes("".join(lines).encode())


def _seal(record: Record) -> str:
    return json.loads(record.to_json())[SEAL]


def _budget(row: Row) -> str:
    return guarantee_words(row.guarantee).replace("no proved ε", "no proved epsilon")


def _words(text: str) -> str:
    return tex(portable(text).translate(_BRACES))
