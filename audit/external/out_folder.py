"""Check of the output folder, before anything is computed."""

from __future__ import annotations

import os
from pathlib import Path


def check_folder(out: Path | None) -> None:
    """Refuses a folder that cannot be created or written to; creates nothing.

    Args:
        out: folder for results; None for no output.

    Raises:
        ValueError: a file is in its place or above it, or the user may not write there.
    """
    if out is None:
        return
    if out.is_dir():
        existing = out
    else:
        # The nearest path that exists; a dangling link exists as well.
        existing = next((path for path in (out, *out.absolute().parents) if os.path.lexists(path)), out)
        if not existing.is_dir():
            above = "" if existing == out else f", and {existing} is none"
            kind = "file" if existing.is_file() else "path"
            raise ValueError(f"--out must be a folder, got the {kind} {out}{above}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--out must be a folder that can be written to, and {existing} is not")
