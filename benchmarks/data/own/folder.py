"""Images in folders, one folder per class, as in torchvision's ImageFolder.

Classes are the folders in the order of their names; images below a folder are found at any depth, in the order of their
paths. If the path has `train/` and `test/` (or `val/`, `validation/`) and nothing else, they are the parts. Hidden
files, and files without an image's suffix, are skipped. Suites follow symbolic links, as torchvision does; audits
refuse them, because a folder of another owner may link to any file. In audits a CSV file of labels may replace the
folders of classes.
"""

import csv
import hashlib
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ...core.data.data_paths import TEST, TRAIN, existing, refuse_irregular, stamp
from ...core.data.dealing import LabelledImages
from ...core.data.encoded import decoded
from ...core.data.images import SUFFIXES, Encoded, decode
from ...core.data.sizes import DEFAULT_SIZES, Sizes
from ...core.data.splits import Splits
from ...core.data.stored import Reading, StoredExamples

_MOST_FILES = 10_000_000
_SHOWN = 4


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
    root = existing(path, noun="folder", file=False)
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
        contents = f"got {len(names)} folder{'' if len(names) == 1 else 's'}" + f" and {loose} loose images" * bool(
            loose
        )
        raise ValueError(
            f"{root} must hold one folder a class, at least two of them: a classifier needs two; {contents}"
        )
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
        for image in images:
            refuse_irregular(image, f"each image of {root / name}")
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
    return LabelledImages.renumbered(pixels, torch.tensor(labels), train=train, noun=address)


def read_examples(source: str, root: Path, reading: Reading) -> tuple[StoredExamples, str]:
    """Reads all images below a folder, and the SHA-256 of their relative names and bytes, in the order of names.

    Raises:
        ValueError: a link, no class, a label without its image, or an image that cannot be used.
    """
    files = _files(source, root)
    images = [name for name in files if Path(name).suffix.lower() in SUFFIXES]
    if not images:
        raise ValueError(f"{source} must hold images ({', '.join(sorted(SUFFIXES))}), got {len(files)} other files")
    for name in images:
        refuse_irregular(root / name, f"each image of {source}")
    if reading.labels is None:
        names, labels = _by_folder(source, images)
        shown = ", ".join(f"{i} = {name}" for i, name in enumerate(names[:_SHOWN]))
        more_of_them = ", ..." if len(names) > _SHOWN else ""
        notes = (f"classes of {source} are its folders in the order of their names: {shown}{more_of_them}",)
    else:
        images, labels = _by_file(source, Path(reading.labels), set(images))
        names, notes = None, ()
    stored, more = decoded(source, [(name, (root / name).read_bytes) for name in images], reading)
    digest = hashlib.sha256()
    for name in images:
        content = (root / name).read_bytes()
        digest.update(f"{len(name.encode())}:{name}:{len(content)}:".encode() + content)
    if reading.labels is not None:
        digest.update(Path(reading.labels).read_bytes())
    examples = StoredExamples(
        inputs=stored,
        labels=np.asarray(labels),
        ids=np.asarray(images),
        class_names=names,
        notes=(*notes, *more),
    )
    return examples, digest.hexdigest()


def _files(source: str, root: Path) -> list[str]:
    """Lists the relative names of all files, sorted and without hidden files."""
    files: list[str] = []
    for below, folders, inside in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        for name in (*folders, *inside):
            if Path(below, name).is_symlink():
                raise ValueError(
                    f"{source} must hold no links, which may lead anywhere, got {Path(below, name).relative_to(root)}"
                )
        files += [Path(below, name).relative_to(root).as_posix() for name in inside if not name.startswith(".")]
        if len(files) > _MOST_FILES:
            raise ValueError(f"{source} must hold at most {_MOST_FILES} files, got more")
    return sorted(files)


def _by_folder(source: str, images: list[str]) -> tuple[tuple[str, ...], list[int]]:
    """Returns the names of the classes, and each image's class number."""
    loose = [name for name in images if "/" not in name]
    if loose:
        raise ValueError(
            f"images of {source} must be in a folder of their class, got {loose[0]} beside the folders; or give a file "
            "of labels (--reading labels=FILE.csv)"
        )
    names = tuple(sorted({name.partition("/")[0] for name in images}))
    number = {name: i for i, name in enumerate(names)}
    return names, [number[name.partition("/")[0]] for name in images]


def _by_file(source: str, labels: Path, images: set[str]) -> tuple[list[str], list[int]]:
    """Returns images and labels in the order of a table with columns file and label."""
    try:
        refuse_irregular(labels, f"labels {labels.name}")
        with labels.open(newline="", encoding="utf-8") as opened:
            rows = list(csv.DictReader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"labels {labels.name} must be a CSV file of UTF-8, got {error}") from error
    if not rows or not {"file", "label"} <= set(rows[0]):
        header = ", ".join(map(str, rows[0])) if rows else "no row"
        raise ValueError(f"labels {labels.name} must have columns file and label, got {header}")
    strange = [row["file"] for row in rows if row["file"] not in images]
    if strange:
        raise ValueError(f"files of {labels.name} must be images of {source}, got {strange[0]!r}")
    wrong = [row["label"] for row in rows if not (row["label"] or "").strip().isdecimal()]
    if wrong:
        raise ValueError(f"labels of {labels.name} must be whole numbers from 0, got {wrong[0]!r}")
    return [row["file"] for row in rows], [int(row["label"]) for row in rows]
