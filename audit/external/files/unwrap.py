"""Names of tensors without the prefixes of wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIXES = ("module.", "_orig_mod.", "_module.")
"""Prefixes of data parallelism, torch.compile and Opacus."""


def without_wrappers(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns tensors under their bare names, and a sentence for each prefix that was removed.

    Args:
        tensors: by name. (Any: PyTorch's, which is imported lazily.)
    """
    bare, notes = dict(tensors), []
    while prefix := next((p for p in PREFIXES if bare and all(n.startswith(p) and n != p for n in bare)), None):
        bare = {name.removeprefix(prefix): tensor for name, tensor in bare.items()}
        notes.append(f"The prefix {prefix!r}, which a wrapper had put before every name, was taken off.")
    return bare, tuple(notes)
