"""Limits of sizes within which files of strangers are read. Standard library only."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest folder that a check reads; anything beyond is refused unread.

    Attributes:
        files: number of files in the folder.
        bytes: of all arrays together, which are read in turn.
        documents: bytes of all records and manifests together, which are in memory at once.
        record: bytes of a record.
        manifest: bytes of a manifest.
        arrays: bytes of a file of arrays, as it lies on disk.
        decoded: bytes to which a file of arrays may declare to decode.
        rows: number of rows that it may declare.
        depth: number of nested brackets of JSON.
        text: characters of a string in JSON.
        whole: largest magnitude of an integer that readers in other languages keep exact.
    """

    files: int = 100_000
    bytes: int = 64 * 1024 * MIB
    documents: int = 512 * MIB
    record: int = 4 * MIB
    manifest: int = 32 * MIB
    arrays: int = 256 * MIB
    decoded: int = 1024 * MIB
    rows: int = 100_000_000
    depth: int = 32
    text: int = 20_000
    whole: int = 2**63


LIMITS = Limits()
