"""Per-example arrays beside a record, as Parquet: whoever doubts a number can compute it again from them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas as pd

from leakbench.leaderboard.records.files import digest_of_bytes, write_bytes


def write_arrays(columns: dict[str, Any], folder: Path, name: str) -> tuple[Path, str]:
    """Writes `name`.parquet so that a reader sees the whole file or none.

    Args:
        columns: column name -> one value (or list) per example.
        folder: made when absent.
        name: the record's id.

    Returns:
        The path, and the SHA-256 that the record keeps of it.

    Raises:
        WriteError: as on a full disk.
    """
    # In memory: the digest is of what was meant to be written, whatever the disk makes of it.
    file = io.BytesIO()
    pd.DataFrame(columns).to_parquet(file, index=False)
    content = file.getvalue()
    return write_bytes(folder / f"{name}.parquet", content), digest_of_bytes(content)
