"""Splits of data sets, kept between the cells that use the same, and never more of them than there is room for."""

from __future__ import annotations

import torch

from benchmarks import data as datasets
from benchmarks.core import Sizes, Splits

# A training's, a shared update's and another seed's; together at most so large, unless one alone is larger.
_MOST = 3
_MOST_BYTES = 2**30
# From here on, a data set is in memory under one seed at a time.
_LARGE_BYTES = 2**28

_Key = tuple[str, int, Sizes, torch.device]
_kept: dict[_Key, Splits] = {}  # the one that was used last comes last


def load_data(name: str, seed: int, sizes: Sizes, device: torch.device) -> Splits:
    """A data set's splits on a device; the last few are kept, because all cells of a seed use the same.

    Not those of one's own data, which may change while this process lives.
    """
    if ":" in name:
        return _load(name, seed, sizes, device)
    key = (name, seed, sizes, device)
    splits = _kept.pop(key, None)
    if splits is None:
        for other in [key for key, kept in _kept.items() if key[0] == name and _bytes(kept) >= _LARGE_BYTES]:
            del _kept[other]
        splits = _load(name, seed, sizes, device)
    _kept[key] = splits
    while len(_kept) > 1 and (len(_kept) > _MOST or sum(map(_bytes, _kept.values())) > _MOST_BYTES):
        del _kept[next(iter(_kept))]
    return splits


def _load(name: str, seed: int, sizes: Sizes, device: torch.device) -> Splits:
    return datasets.load(name, seed=seed, sizes=sizes).to(device)


def _bytes(splits: Splits) -> int:
    """Memory of the images: the pools are slices of one tensor."""
    return splits.private.inputs.untyped_storage().nbytes()
