"""Arrays in a NumPy archive: images and classes, with or without a test part.

Arrays are called `x_train`, `y_train`, `x_test`, `y_test`, or `x` and `y`, or `images` and `labels`. Images are bytes,
or floats in [0, 1]: [n, height, width], [n, height, width, channels] or [n, channels, height, width]. Pickled objects
are refused and never loaded, because a pickle can run any program.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ...core.data.archives import array_pair, class_array, read_archive
from ...core.data.data_paths import existing, stamp
from ...core.data.dealing import LabelledImages
from ...core.data.images import refuse_too_large
from ...core.data.sizes import DEFAULT_SIZES, Sizes
from ...core.data.splits import Splits

NAMES = (("x_train", "y_train"), ("x", "y"), ("images", "labels"), ("train_images", "train_labels"))
TEST_NAMES = (("x_test", "y_test"), ("test_images", "test_labels"))


def npz(path: str, *, address: str, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """Your NumPy archive: arrays of images and classes, x and y, or x_train, y_train, x_test and y_test.

    Args:
        path: of the file.
        address: as the user wrote it, for errors.
        seed: decides which examples are members.
        sizes: of the pools; 40 %, 40 % and 20 % of the training part by default.

    Raises:
        ValueError: the file is damaged, or its arrays are not images and classes.
    """
    file = existing(path, what="npz", file=True)
    dataset = _decoded(file, address, stamp([file]))
    about = f"NumPy arrays of one's own, {len(dataset.labels)} images"
    return dataset.deal(name=f"npz:{file.stem}", about=about, seed=seed, sizes=sizes)


@lru_cache(maxsize=2)
def _decoded(file: Path, address: str, state: int) -> LabelledImages:
    arrays = read_archive(file, {name for pair in (*NAMES, *TEST_NAMES) for name in pair})
    x_name, y_name = array_pair(file, arrays, NAMES)
    parts = [(x_name, y_name)]
    if any(x in arrays for x, _ in TEST_NAMES):
        parts.append(array_pair(file, arrays, TEST_NAMES))
    images, labels = [], []
    for x_name, y_name in parts:
        images.append(_images(file, x_name, arrays[x_name]))
        labels.append(class_array(file, y_name, arrays[y_name], len(images[-1])))
    if any(part.shape[1:] != images[0].shape[1:] or part.dtype != images[0].dtype for part in images):
        got = " and ".join(
            f"{name} {part.dtype}{list(part.shape)}" for (name, _), part in zip(parts, images, strict=True)
        )
        raise ValueError(f"images of {file} must be alike in training and test, got {got}")
    total = sum(len(part) for part in images)
    refuse_too_large(total, total, int(np.prod(images[0].shape[1:])), address=address)
    return LabelledImages.renumbered(
        torch.from_numpy(np.concatenate(images)),
        torch.from_numpy(np.concatenate(labels)),
        train=len(images[0]),
        what=address,
    )


def _images(file: Path, name: str, array: np.ndarray) -> np.ndarray:
    """Images as [n, channels, height, width], bytes or float32."""
    first, last = array.shape[1:2], array.shape[-1:]
    if array.ndim == 3:
        array = array[:, None]
    # Both or neither may be channels: [n, 3, 5, 3] is refused, because either reading is a guess.
    elif array.ndim != 4 or (first[0] in (1, 3)) == (last[0] in (1, 3)):
        raise ValueError(
            f"{name} of {file} must be [n, height, width], or have its 1 or 3 channels either second or last, got "
            f"shape {list(array.shape)}"
        )
    elif last[0] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if 0 in array.shape:
        raise ValueError(f"{name} of {file} must hold images, got shape {list(array.shape)}")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{name} of {file} must be bytes (uint8) or floats in [0, 1], got {array.dtype}")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # also catches NaN
        raise ValueError(
            f"{name} of {file} must be in [0, 1] where it is floats, got values from {low:g} to {high:g}; scale them, "
            "or store bytes"
        )
    return np.ascontiguousarray(array, dtype=np.float32)
