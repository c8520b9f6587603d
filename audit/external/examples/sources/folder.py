"""Folders of images: a sub-folder per class, sorted by name as in torchvision's ImageFolder, or a file of labels."""

from __future__ import annotations

import csv
import hashlib
import os
from pathlib import Path

import numpy as np

from leakbench.benchmarks.core.data.images import SUFFIXES

from .encoded import decoded
from .raw import RawExamples, Reading, checked

_MOST_FILES = 10_000_000
_SHOWN = 4


def read_folder(source: str, root: Path, reading: Reading) -> tuple[RawExamples, str]:
    """Reads all images below a folder, and the SHA-256 of their relative names and bytes, in the order of names.

    Raises:
        ValueError: a link, no class, a label without its image, or an image that cannot be used.
    """
    files = _files(source, root)
    images = [name for name in files if Path(name).suffix.lower() in SUFFIXES]
    if not images:
        raise ValueError(f"{source} must hold images ({', '.join(sorted(SUFFIXES))}), got {len(files)} other files")
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
    raw = checked(
        source,
        reading,
        inputs=stored,
        labels=np.asarray(labels),
        ids=np.asarray(images),
        class_names=names,
        notes=(*notes, *more),
    )
    return raw, digest.hexdigest()


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
        with labels.open(newline="", encoding="utf-8") as opened:
            rows = list(csv.DictReader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"labels {labels.name} must be a CSV file of UTF-8, got {error}") from error
    if not rows or not {"file", "label"} <= set(rows[0]):
        got = ", ".join(map(str, rows[0])) if rows else "no row"
        raise ValueError(f"labels {labels.name} must have columns file and label, got {got}")
    strange = [row["file"] for row in rows if row["file"] not in images]
    if strange:
        raise ValueError(f"files of {labels.name} must be images of {source}, got {strange[0]!r}")
    wrong = [row["label"] for row in rows if not (row["label"] or "").strip().isdecimal()]
    if wrong:
        raise ValueError(f"labels of {labels.name} must be whole numbers from 0, got {wrong[0]!r}")
    return [row["file"] for row in rows], [int(row["label"]) for row in rows]
