"""Ids of examples by their content, so that they are the same in whatever order, file or group they come.

Who is matched with whom, and which half chooses a threshold, follows from ids. By their places in the owner's files
these would be the same for every split: of files that are sorted by class, scores that tell nothing but classes would
then prove an epsilon.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


def content_ids(inputs: Float[Tensor, "n ..."], labels: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Ids of examples; copies get different ones, in their order.

    Args:
        inputs: as the model is fed.
        labels: of these.
    """
    rows = np.ascontiguousarray(inputs.detach().cpu().flatten(1).double().numpy())
    classes = labels.detach().cpu().tolist()
    return ids_of(f"{label} ".encode() + row.tobytes() for row, label in zip(rows, classes, strict=True))


def ids_of(contents: Iterable[bytes]) -> Int[Tensor, " n"]:
    """Ids of 62 bits, by the SHA-256 of each content and how often it came before."""
    seen: Counter[bytes] = Counter()
    found = []
    for content in contents:
        digest = hashlib.sha256(content).digest()
        found.append(hashlib.sha256(digest + str(seen[digest]).encode()).digest())
        seen[digest] += 1
    return torch.tensor([int.from_bytes(one[:8], "big") >> 2 for one in found], dtype=torch.int64)
