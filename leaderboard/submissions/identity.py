"""Digest of a submission, and what follows from it: its seeds, and the cells and seeds of a verification.

The digest covers the request: what decides the computation, and who asks. Seeds follow from it, so a submitter cannot
draw seeds again without another request. Caveat: any byte of the method's file makes another request, so seeds can
still be shopped for at the price of a whole run per attempt. Cells to verify and fresh seeds are therefore drawn by a
hash of the results too, and of a salt that the verifier draws: without it a submitter could change a free field of a
record, such as its seconds, until the draw avoids a forged cell.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from ..records.files import digest_of_bytes, read_bytes
from ..records.record import Record
from .declaration import Declaration

REPORTED = range(2**16, 2**31)
"""Seeds of submissions: above those that suites use."""
FRESH = range(2**31, 2**32)
"""Seeds of verifications: none is a submission's."""


def request_digest(declaration: Declaration) -> str:
    """Returns the digest of a submission's request, 32 hexadecimal digits: the name of its folder.

    Licence, contact, hardware and other words are no part of it, nor is the order of keys.

    Args:
        declaration: of the submission.
    """
    method, checkpoint = declaration.method, declaration.checkpoint
    content = {
        "schema": declaration.schema_,
        "handle": declaration.handle,
        "kind": declaration.kind,
        "suite": declaration.suite,
        "small": declaration.small,
        "suite_digest": declaration.suite_digest,
        "method": None if method is None else method.model_dump(),
        "checkpoint": None if checkpoint is None else checkpoint.sha256,
    }
    return digest_of_bytes(json.dumps(content, sort_keys=True, allow_nan=False).encode())[:32]


def code_digest(method_file: Path) -> str:
    """Returns the digest by which records name a third-party method of a single file; the file is not run.

    Args:
        method_file: of the submission.
    """
    content = read_bytes(method_file, "method file")
    return digest_of_bytes(f"{method_file.name} {len(content)}\n".encode() + content)


def results_digest(folder: Path) -> str:
    """Returns the SHA-256 over names and contents of all records, arrays and manifests of a submission.

    Args:
        folder: of the submission.
    """
    records = folder / "records"
    files = sorted(path for path in records.iterdir() if not path.name.startswith(".")) if records.is_dir() else []
    lines = [f"{path.name} {digest_of_bytes(read_bytes(path))}\n" for path in files]
    return digest_of_bytes("".join(lines).encode())


def seeds_of(digest: str, number: int) -> tuple[int, ...]:
    """Returns the seeds of a submission, distinct and from `REPORTED`.

    Args:
        digest: of its request.
        number: of seeds; fewer seeds are the first of more.
    """
    return _drawn(f"leakbench seeds {digest}", number, REPORTED)


def fresh_seeds(draw: str, number: int) -> tuple[int, ...]:
    """Returns the seeds of a verification, distinct and from `FRESH`.

    Args:
        draw: digest of `draw_digest`.
        number: of seeds.
    """
    return _drawn(f"leakbench fresh {draw}", number, FRESH)


def draw_digest(digest: str, results: str, salt: str) -> str:
    """Returns the hash that draws the cells and fresh seeds of a verification.

    Args:
        digest: of the request.
        results: digest of the results.
        salt: text that the verifier drew after the submission was made.
    """
    return digest_of_bytes(json.dumps(["leakbench draw", digest, results, salt]).encode())


def drawn_cells(records: Iterable[Record], draw: str, number: int, own: Callable[[Record], bool]) -> list[Record]:
    """Returns cells to compute again, stratified by kind of result: utility, then each kind of attack, in turns.

    Cells of the submission's method come first in every stratum.

    Args:
        records: of the submission; only those with numbers are drawn.
        draw: digest of `draw_digest`.
        number: of cells; all, if there are fewer.
        own: returns whether a record is of the submission's method.
    """
    strata: dict[tuple[bool, str], list[Record]] = {}
    for record in records:
        if record.status == "ok":
            strata.setdefault((not own(record), record.kind), []).append(record)

    def place(record: Record) -> str:
        return digest_of_bytes(f"{draw} {record.id}".encode())

    ordered = sorted(strata.items(), key=lambda item: (item[0][0], item[0][1] != "utility", item[0][1]))
    columns = [sorted(cells, key=place) for _, cells in ordered]
    longest = max(map(len, columns), default=0)
    return [column[turn] for turn in range(longest) for column in columns if turn < len(column)][:number]


def _drawn(purpose: str, number: int, among: range) -> tuple[int, ...]:
    seeds: dict[int, None] = {}
    place = 0
    while len(seeds) < number:
        word = hashlib.sha256(f"{purpose} {place}".encode()).digest()
        # The modulus of a word of 256 bits is uniform up to 2**-225.
        seeds[among[int.from_bytes(word) % len(among)]] = None
        place += 1
    return tuple(seeds)
