"""Features of a public encoder in a NumPy archive: vectors and classes, to train a model such as `linear` on.

Transfer learning keeps an encoder trained on public data, and trains a head on its features of private data. `leakbench
features` writes such files. Arrays are called `x_train`, `y_train`, `x_test`, `y_test`, or `x` and `y`: floats [n,
dim], the encoder's output, and classes. Features are standardised here by public statistics: arrays `mean` and `std`
[dim] of the file, which must come from other data, or else those of the public pool. Standardised values are clipped to
[-10, 10], a constant, so that inputs have a known range as images do.

Caveat: a file does not show that its encoder, `mean` and `std` are public. Every claim on training on these features
assumes that no private example took part in making them.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...core.data.data_paths import existing, stamp
from ...core.data.dealing import LabelledImages
from ...core.data.sizes import DEFAULT_SIZES, Sizes
from ...core.data.splits import Splits, content_digest
from .npz import array_pair, class_array, read_archive

NAMES = (("x_train", "y_train"), ("x", "y"))
TEST_NAMES = (("x_test", "y_test"),)
STATISTICS = ("mean", "std")

LARGEST = 10.0
"""Bound at which standardised values are clipped, such as those of a feature that is almost never active."""

# Standard deviation below which a feature counts as constant, relative to its largest value: rounding of float32.
_CONSTANT = 1e-6

Statistics = tuple[Tensor, Tensor]
"""Mean and standard deviation of each feature, float64 [dim]."""


def features(path: str, *, address: str, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """Your NumPy archive of vectors and classes, as features of a public encoder; see `leakbench features`.

    Args:
        path: of the file.
        address: as the user wrote it, for errors.
        seed: decides which examples are members.
        sizes: of the pools; 40 %, 40 % and 20 % of the training part by default.

    Returns:
        The pools; inputs [n, dim], standardised by public statistics, in [-10, 10].

    Raises:
        ValueError: the file is damaged, its arrays are not finite vectors and classes, or there are no public
        statistics.
    """
    file = existing(path, noun="features", file=True)
    dataset, stored_statistics = _read(file, address, stamp([file]))
    splits = dataset.deal(name=f"features:{file.stem}", about="", seed=seed, sizes=sizes)
    if stored_statistics is None and not len(splits.public):
        raise ValueError(
            f"features of {address} must have public examples to be standardised by, got none; set task.public, or put "
            "arrays mean and std of other, public data into the file"
        )
    mean, std = statistics(splits.public.inputs) if stored_statistics is None else stored_statistics
    # By identity, because without non-members two pools are the test set, which must be standardised only once.
    pools = {id(pool): pool for pool in (splits.private, splits.non_member, splits.public, splits.test) if pool}
    for pool in pools.values():
        standardise_(pool.inputs, mean, std)
    by = "its public pool" if stored_statistics is None else "statistics in the file"
    return replace(
        splits,
        low=-LARGEST,
        high=LARGEST,
        digest=content_digest(splits.digest, mean, std),
        scaled_by_public=stored_statistics is None,
        about=f"features of one's own, {len(dataset.labels)} of {len(mean)} numbers, standardised by {by}",
    )


def statistics(rows: Tensor) -> Statistics:
    """Mean and standard deviation of each feature; the latter is 1 if a feature is constant.

    Args:
        rows: public examples [n, dim].
    """
    deviation, mean = torch.std_mean(rows.double(), dim=0, correction=0)
    constant = deviation <= _CONSTANT * rows.abs().amax(dim=0)
    return mean, torch.where(constant, 1.0, deviation)


def standardise_(rows: Tensor, mean: Tensor, std: Tensor) -> None:
    """Computes (rows - mean) / std, cut to the range of valid inputs, in place."""
    rows.sub_(mean.to(rows.dtype)).div_(std.to(rows.dtype)).clamp_(-LARGEST, LARGEST)


@lru_cache(maxsize=1)
def _read(file: Path, address: str, state: int) -> tuple[LabelledImages, Statistics | None]:
    arrays = read_archive(file, {name for pair in (*NAMES, *TEST_NAMES, STATISTICS) for name in pair}, address=address)
    pairs = [array_pair(file, arrays, NAMES)]
    if any(x in arrays for x, _ in TEST_NAMES):
        pairs.append(array_pair(file, arrays, TEST_NAMES))
    rows = [_vectors(file, x, arrays[x]) for x, _ in pairs]
    classes = [
        class_array(file, y, arrays[y], len(part), noun="example") for (_, y), part in zip(pairs, rows, strict=True)
    ]
    if len({part.shape[1] for part in rows}) > 1:
        dimensions = " and ".join(str(part.shape[1]) for part in rows)
        raise ValueError(f"features of {file} must be as many in training as in test, got {dimensions}")
    dataset = LabelledImages.renumbered(
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(classes)),
        train=len(rows[0]),
        noun=address,
    )
    return dataset, _stored_statistics(file, arrays, rows[0].shape[1])


def _vectors(file: Path, name: str, array: np.ndarray) -> np.ndarray:
    """Vectors as float32 [n, dim]."""
    if array.ndim != 2 or 0 in array.shape or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"{name} of {file} must be floats [n, dim], got {array.dtype} of shape {list(array.shape)}; images are "
            "read by npz:PATH"
        )
    with np.errstate(over="ignore"):  # values too large for float32 become infinite, and are refused below
        narrow = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(narrow).all():
        row = int(np.isfinite(narrow).all(axis=1).argmin())
        raise ValueError(f"{name} of {file} must be finite as floats of 32 bits, got another value in row {row}")
    return narrow


def _stored_statistics(file: Path, arrays: dict[str, np.ndarray], dim: int) -> Statistics | None:
    """Statistics of the file; None if it has none."""
    names = [name for name in STATISTICS if name in arrays]
    if not names:
        return None
    for name in STATISTICS:
        array = arrays.get(name)
        if array is None or array.shape != (dim,) or not np.issubdtype(array.dtype, np.floating):
            description = "none" if array is None else f"{array.dtype} of shape {list(array.shape)}"
            raise ValueError(f"{name} of {file} must be floats [{dim}], one a feature, got {description}")
        if not np.isfinite(array).all() or (name == "std" and not (array > 0).all()):
            rule = "finite" if name == "mean" else "finite and positive, 1 for a constant feature"
            raise ValueError(f"{name} of {file} must be {rule}, got values from {array.min():g} to {array.max():g}")
    mean, std = (torch.from_numpy(arrays[name].astype(np.float64)) for name in STATISTICS)
    return mean, std
