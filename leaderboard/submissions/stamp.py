"""Stamp of a verification, `VERIFIED.json`: which cells somebody else computed again, where, and how they compare.

A stamp names the digests of the submission that it is about, so one that was copied, or whose submission changed, is no
evidence. Anybody can write the file: it counts if a verifier that the board trusts has signed it (`VERIFIED.sig`).
"""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..records.fields import Provenance
from ..records.files import digest_of_bytes, read_bytes, write_bytes
from ..records.validation import RecordError, build, conform, parse_json
from .declaration import NAME as DECLARATION
from .declaration import is_handle
from .identity import results_digest
from .signature import OF_STAMP, check_signature

NAME, SIGNATURE = "VERIFIED.json", "VERIFIED.sig"
SCHEMA = 1

CellVerdict = Literal["identical", "agrees", "differs", "not judged"]
"""`identical`: equal to the last digit; `agrees`: within the intervals; `not judged`: no interval decides."""


@dataclass(frozen=True, kw_only=True)
class CellComparison:
    """Number of a record beside the same number computed again.

    Attributes:
        cell: id of the record.
        words: cell in words.
        seeds: "same", or "fresh" for seeds drawn by the verification.
        metric: its name, or "claim".
        reported: value of the record, or the mean over its seeds beside fresh ones; None for an infinite epsilon.
        again: value computed again, or the mean over the fresh seeds.
        low: lower end of the interval of the difference again - reported; None without an interval.
        high: upper end.
        verdict: on the comparison.
        main: whether the metric is the one by which the cell counts as computed again.
        reason: rule that decided, in words.
    """

    cell: str
    words: str
    seeds: Literal["same", "fresh"]
    metric: str
    reported: float | None
    again: float | None
    low: float | None = None
    high: float | None = None
    verdict: CellVerdict
    main: bool
    reason: str

    def __post_init__(self) -> None:
        conform(self)


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Content of `VERIFIED.json`.

    Attributes:
        schema: version of this layout.
        request: digest of the submission's request.
        declaration: SHA-256 of its declaration.
        results: digest of its records, arrays and manifests.
        verifier: handle of the verifier.
        date: day of the verification, as 2026-01-31.
        machine: kind of machine, as in records: no name of a host.
        code: provenance of the code that computed again.
        salt: drawn by the verifier, from which cells and fresh seeds follow.
        drawn: number of cells that were drawn.
        fresh: seeds that were computed besides.
        cells: ids of the cells that were drawn.
        comparisons: of all compared numbers.
    """

    schema: int = SCHEMA
    request: str
    declaration: str
    results: str
    verifier: str
    date: str
    machine: str
    code: Provenance
    salt: str
    drawn: int
    fresh: tuple[int, ...] = ()
    cells: tuple[str, ...]
    comparisons: tuple[CellComparison, ...]

    def __post_init__(self) -> None:
        conform(self)
        if self.schema != SCHEMA:
            raise RecordError(f"schema must be {SCHEMA} for this version of the code, got {self.schema}")
        if not is_handle(self.verifier):
            raise RecordError(f"verifier must be a handle in lower case, got {self.verifier!r}")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", self.date):
            raise RecordError(f"date must be a day as 2026-01-31, got {self.date!r}")
        if self.drawn < 1 or len(self.cells) != self.drawn or len(set(self.cells)) != self.drawn:
            raise RecordError(f"cells must be {self.drawn} distinct ids, got {len(self.cells)}")
        if lacking := set(self.cells) - {comparison.cell for comparison in self.comparisons}:
            raise RecordError(f"comparisons must be about every cell, {min(lacking)} has none")

    @property
    def holds(self) -> bool:
        """True if nothing differs, and the main number of every cell agrees, by its own seed or by fresh ones."""
        judged = {c.cell for c in self.comparisons if c.main and c.verdict in ("identical", "agrees")}
        return judged >= set(self.cells) and not self.differing

    @property
    def differing(self) -> list[CellComparison]:
        """Comparisons whose numbers differ."""
        return [comparison for comparison in self.comparisons if comparison.verdict == "differs"]


def write_stamp(stamp: Stamp, folder: Path) -> Path:
    """Writes a stamp beside its submission, whole or not at all, and removes the signature of an old one."""
    (folder / SIGNATURE).unlink(missing_ok=True)
    return write_bytes(folder / NAME, json.dumps(dataclasses.asdict(stamp), indent=1, allow_nan=False).encode() + b"\n")


def read_stamp(folder: Path) -> Stamp | None:
    """Reads the stamp of a submission; None without one. It may be forged: see `why_no_evidence`.

    Raises:
        RecordError: the file is no stamp.
    """
    path = folder / NAME
    if not path.exists() and not path.is_symlink():
        return None
    try:
        return build(Stamp, parse_json(read_bytes(path, "stamp").decode()))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"must be a stamp of leakbench verify: {str(error).replace(str(path), NAME)}") from None


def why_no_evidence(stamp: Stamp, folder: Path, handle: str, digest: str, verifiers: Path | None) -> str:
    """Returns the reason why a stamp is no evidence for a submission; empty if it is.

    Args:
        stamp: of its folder.
        folder: of the submission.
        handle: of its submitter.
        digest: of its request.
        verifiers: the board's file of allowed signers, with the verifiers' handles; None without one.
    """
    declaration = digest_of_bytes(read_bytes(folder / DECLARATION, "declaration"))
    current = {"request": digest, "declaration": declaration, "results": results_digest(folder)}
    for name, value in current.items():
        if getattr(stamp, name) != value:
            return f"it is about another {name}: it was copied, or the submission has changed since"
    if stamp.verifier == handle:
        return f"its verifier {handle} is the submitter"
    if verifiers is None or not verifiers.is_file():
        return "the board has no file of trusted verifiers, so nobody vouches for it"
    try:
        check_signature(read_bytes(folder / NAME, "stamp"), folder / SIGNATURE, verifiers, stamp.verifier, OF_STAMP)
    except RecordError as error:
        return f"its signature {SIGNATURE} {error}"
    return ""
