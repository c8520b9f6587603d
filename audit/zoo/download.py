"""Downloads of checkpoints: by address, size and digest, into the data folder; only whole files are kept."""

from __future__ import annotations

import http.client
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from leakbench.benchmarks.core.data.data_paths import data_folder
from leakbench.leaderboard.records.files import write_bytes

from .index import ZooEntry, ZooError
from .manifest import MANIFEST, MOST_MANIFEST_BYTES, checked_file, parsed, read_manifest

PATIENCE = 30
"""Timeout of a download, seconds without an answer."""
SCHEMES = ("https", "http", "file")


def located(entry: ZooEntry) -> Path:
    """Returns the folder of a checkpoint's files; downloads them unless they are there.

    Raises:
        ZooError: it cannot be obtained, or has another digest.
    """
    url = entry.pinned.url
    if url is None:
        return entry.zoo / entry.name
    kept = data_folder() / "zoo" / entry.pinned.sha256
    if not (kept / MANIFEST).is_file():
        _download(entry, url, kept)
    return kept


def _download(entry: ZooEntry, url: str, kept: Path) -> None:
    if urlsplit(url).scheme not in SCHEMES:
        raise ZooError(f"url of checkpoint {entry.name!r} must begin with {', '.join(SCHEMES)}, got {url!r}")
    content = _fetched(entry, f"{url}/{MANIFEST}", MOST_MANIFEST_BYTES, kept)
    manifest = parsed(content, entry, f"{url}/{MANIFEST}")
    for name, stored in manifest.files.items():
        write_bytes(kept / name, checked_file(_fetched(entry, f"{url}/{name}", stored.bytes, kept), manifest, name))
    # Last: a folder with a manifest is whole.
    write_bytes(kept / MANIFEST, content)
    read_manifest(kept, entry)


def _fetched(entry: ZooEntry, address: str, most: int, kept: Path) -> bytes:
    """Returns the content of an address.

    Args:
        entry: of the checkpoint, for messages.
        address: of a file.
        most: largest accepted number of bytes.
        kept: folder of the checkpoint on this machine, for messages.

    Raises:
        ZooError: no answer, or more bytes.
    """
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:  # noqa: S310 - its scheme was checked
            content = answer.read(most + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ZooError(
            f"checkpoint {entry.name!r} is not on this machine, and {address} could not be downloaded ({reason}); "
            f"connect to the network once, or put its files into {kept}"
        ) from None
    if len(content) > most:
        raise ZooError(f"{address} of checkpoint {entry.name!r} must have at most {most} bytes, and has more")
    return content
