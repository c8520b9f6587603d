"""Cache of data splits shared by cells, evicting the least recently used, bounded in number and in bytes."""

from __future__ import annotations

import torch

from leakbench.benchmarks import data as datasets
from leakbench.benchmarks.core import Sizes, Splits

# Largest number of splits: for a training, a shared update, and another seed.
_MOST = 3
_MOST_BYTES = 2**30  # of all together, unless a single entry is larger
# Data sets of at least this size are kept under one seed only.
_LARGE_BYTES = 2**28

_Key = tuple[str, int, Sizes, torch.device]
_kept: dict[_Key, Splits] = {}  # in order of last use


_CPU = torch.device("cpu")


def load_data(name: str, seed: int, sizes: Sizes, device: torch.device = _CPU) -> Splits:
    """Returns a data set's splits on a device, cached for the other cells of the seed."""
    # A path leads to the user's own data, which may change during this process.
    if ":" in name:
        return _load(name, seed, sizes, device)
    key = (name, seed, sizes, device)
    splits = _kept.pop(key, None)  # reinserted at the end below: a dictionary keeps the order of insertion
    if splits is None:
        # Before the next load, so that two large data sets are never in memory together.
        for old_key in [key for key, kept in _kept.items() if key[0] == name and _bytes(kept) >= _LARGE_BYTES]:
            del _kept[old_key]
        splits = _load(name, seed, sizes, device)
    _kept[key] = splits
    while len(_kept) > 1 and (len(_kept) > _MOST or sum(map(_bytes, _kept.values())) > _MOST_BYTES):
        del _kept[next(iter(_kept))]
    return splits


def _load(name: str, seed: int, sizes: Sizes, device: torch.device) -> Splits:
    return datasets.load(name, seed=seed, sizes=sizes).to(device)


def _bytes(splits: Splits) -> int:
    """Returns the bytes of the inputs of all pools, which are slices of one tensor."""
    return splits.private.inputs.untyped_storage().nbytes()
