"""Per-example arrays of a record, as Parquet, from which its numbers can be recomputed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas as pd

from leakbench.leaderboard.records.files import digest_of_bytes, write_bytes


def write_arrays(columns: dict[str, Any], folder: Path, name: str) -> tuple[Path, str]:
    """Writes `name`.parquet atomically: a reader sees the whole file or none.

    Args:
        columns: column name -> one value (or list) per example.
        folder: created if absent.
        name: the record's id.

    Returns:
        The path, and its SHA-256, which the record stores.

    Raises:
        WriteError: for example on a full disk.
    """
    # In memory: the digest is of the intended content, independent of the disk.
    file = io.BytesIO()
    pd.DataFrame(columns).to_parquet(file, index=False)
    content = file.getvalue()
    return write_bytes(folder / f"{name}.parquet", content), digest_of_bytes(content)
