"""Images in folders, one folder per class, as in torchvision's ImageFolder.

Classes are the folders in the order of their names; images below a folder are found at any depth, in the order of their
paths. If the path has `train/` and `test/` (or `val/`, `validation/`) and nothing else, they are the parts. Hidden
files, and files without an image's suffix, are skipped.
"""

import os
from functools import lru_cache
from pathlib import Path

import torch

from ...core.data.data_paths import TEST, TRAIN, existing, stamp
from ...core.data.dealing import LabelledImages
from ...core.data.images import SUFFIXES, Encoded, decode
from ...core.data.sizes import DEFAULT_SIZES, Sizes
from ...core.data.splits import Splits


def folder(
    path: str,
    *,
    address: str,
    seed: int = 0,
    sizes: Sizes = DEFAULT_SIZES,
    size: int | None = None,
    channels: int | None = None,
) -> Splits:
    """Your images in folders, one per class; train/ and test/ above them, or all in one set.

    Args:
        path: folder of the classes' folders, or of the parts.
        address: as the user wrote it, for errors.
        seed: decides which examples are members.
        sizes: of the pools; 40 %, 40 % and 20 % of the training part by default.
        size: side of the square to which images are resized and cropped, in pixels; None: as stored.
        channels: 1 or 3 to convert to; None: as stored.

    Raises:
        ValueError: there are fewer than two classes, or an image cannot be used.
    """
    root = existing(path, what="folder", file=False)
    files, labels, train = listed(root)
    dataset = _decoded(tuple(files), tuple(labels), train, address, size, channels, stamp(files))
    return dataset.deal(
        name=f"folder:{root.name}", about=f"images of one's own, {len(files)} files", seed=seed, sizes=sizes
    )


def listed(root: Path) -> tuple[list[Path], list[int], int]:
    """Lists the images of a folder with their classes, training part first, and the number of training images."""
    below = {entry.name: entry for entry in _entries(root) if entry.is_dir()}
    test = next((name for name in TEST if name in below), None)
    if test is None or not set(below) <= {TRAIN, *TEST} or TRAIN not in below or not _classes(below[TRAIN]):
        files, labels = _images(root, list(enumerate(_two_or_more(root))))
        return files, labels, len(files)
    names = _two_or_more(below[TRAIN])
    if strange := [name for name in _classes(below[test]) if name not in names]:
        raise ValueError(f"classes of {below[test]} must be among those of {below[TRAIN]}, got {strange[0]!r}")
    files, labels = _images(below[TRAIN], list(enumerate(names)))
    tested, marks = _images(below[test], [(i, name) for i, name in enumerate(names) if (below[test] / name).is_dir()])
    return files + tested, labels + marks, len(files)


def _entries(root: Path) -> list[Path]:
    # macOS adds `__MACOSX` to the archives that it packs.
    return sorted(entry for entry in root.iterdir() if not entry.name.startswith((".", "__MACOSX")))


def _classes(root: Path) -> list[str]:
    return [entry.name for entry in _entries(root) if entry.is_dir()]


def _two_or_more(root: Path) -> list[str]:
    names = _classes(root)
    if len(names) < 2:
        loose = sum(entry.suffix.lower() in SUFFIXES for entry in _entries(root))
        got = f"got {len(names)} folder{'' if len(names) == 1 else 's'}" + f" and {loose} loose images" * bool(loose)
        raise ValueError(f"{root} must hold one folder a class, at least two of them: a classifier needs two; {got}")
    return names


def _images(root: Path, numbered: list[tuple[int, str]]) -> tuple[list[Path], list[int]]:
    """Lists all images of the classes, with the number of each image's class."""
    files: list[Path] = []
    labels: list[int] = []
    for number, name in numbered:
        images = sorted(
            Path(below, file)
            # Links are followed, as by torchvision's ImageFolder.
            for below, _, inside in os.walk(root / name, followlinks=True)
            for file in inside
            if not file.startswith(".") and Path(file).suffix.lower() in SUFFIXES
        )
        if not images:
            raise ValueError(f"{root / name} must hold images, got none of {', '.join(sorted(SUFFIXES))}")
        files += images
        labels += [number] * len(images)
    return files, labels


@lru_cache(maxsize=2)
def _decoded(
    files: tuple[Path, ...],
    labels: tuple[int, ...],
    train: int,
    address: str,
    size: int | None,
    channels: int | None,
    state: int,  # of the files; only a part of the cache key
) -> LabelledImages:
    encoded: list[Encoded] = [(str(file), file.read_bytes) for file in files]
    pixels = torch.from_numpy(decode(encoded, len(files), size=size, channels=channels, address=address))
    return LabelledImages.renumbered(pixels, torch.tensor(labels), train=train, what=address)
