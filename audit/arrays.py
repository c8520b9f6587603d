"""Per-example results beside a record, as Parquet: whoever doubts a number can compute it again."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pandas as pd


def write_arrays(columns: dict[str, Any], folder: Path, name: str) -> Path:
    """Writes `name`.parquet so that a reader sees the whole file or none.

    Args:
        columns: column name -> one value (or list) per example.
        folder: made when absent.
        name: the record's id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.parquet"
    draft = folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        pd.DataFrame(columns).to_parquet(draft, index=False)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path
