"""Parquet files as on the Hugging Face Hub: a column of encoded images and a column of classes.

The image column is a struct of `bytes` and `path`, or plain bytes, called `image` or `img`; the class is an integer
called `label`, `labels` or `fine_label`. A folder is read with all files below it, in the order of their names: files
whose names start with `train` and `test` (or `val`, `validation`) are the parts, otherwise all are one set. Labels with
gaps, or from 1, are renumbered; null and negative labels, which mark a test part without labels, are refused.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ...core.data.data_paths import TEST, TRAIN, existing, refuse_pointer, stamp
from ...core.data.dealing import LabelledImages
from ...core.data.images import Encoded, decode, reason
from ...core.data.sizes import DEFAULT_SIZES, Sizes
from ...core.data.splits import Splits

IMAGES = ("image", "img")
LABELS = ("label", "labels", "fine_label")
ROWS = 1024
"""Rows read at a time."""


def parquet(
    path: str,
    *,
    address: str,
    seed: int = 0,
    sizes: Sizes = DEFAULT_SIZES,
    size: int | None = None,
    channels: int | None = None,
) -> Splits:
    """Your Parquet file, or folder of them, as on the Hugging Face Hub: encoded images and classes.

    Args:
        path: of the file or the folder.
        address: as the user wrote it, for errors.
        seed: decides which examples are members.
        sizes: of the pools; 40 %, 40 % and 20 % of the training part by default.
        size: side of the square to which images are resized and cropped, in pixels; None: as stored.
        channels: 1 or 3 to convert to; None: as stored.

    Raises:
        ValueError: a file is damaged or has other columns, or an image cannot be used.
    """
    root = existing(path, what="parquet")
    dataset = read(root, address=address, size=size, channels=channels)
    about = f"Parquet of one's own, {len(dataset.labels)} rows"
    return dataset.deal(name=f"parquet:{root.stem}", about=about, seed=seed, sizes=sizes)


def read(root: Path, *, address: str, size: int | None = None, channels: int | None = None) -> LabelledImages:
    """Reads a file or folder whole; cached until it changes.

    Args:
        root: file or folder.
        address: as the user wrote it, for errors.
        size: see `parquet`.
        channels: see `parquet`.
    """
    train, test = _parts(root)
    return _decoded(tuple(train), tuple(test), address, size, channels, stamp([*train, *test]))


def _parts(root: Path) -> tuple[list[Path], list[Path]]:
    if root.is_file():
        return [root], []
    below = (file for file in root.rglob("*.parquet") if file.is_file())
    # Hidden folders are caches, such as that of the Hub's downloader.
    files = sorted(file for file in below if not any(p.startswith(".") for p in file.relative_to(root).parts))
    if not files:
        raise ValueError(f"path of parquet must be a file or a folder with *.parquet below it, got none in {root}")
    train = [file for file in files if file.name.startswith(TRAIN)]
    for part in TEST:
        # A test part without a training part is one set, because there is nothing else to deal from.
        if train and (test := [file for file in files if file.name.startswith(part)]):
            return train, test
    return files, []


@lru_cache(maxsize=2)
def _decoded(
    train: tuple[Path, ...],
    test: tuple[Path, ...],
    address: str,
    size: int | None,
    channels: int | None,
    state: int,  # of the files; only a part of the cache key
) -> LabelledImages:
    tables = {file: _table(file) for file in (*train, *test)}
    names = {file: _columns(file, table.schema_arrow) for file, table in tables.items()}
    counts = {file: table.metadata.num_rows for file, table in tables.items()}
    source = hashlib.sha256()
    labels: list[np.ndarray] = []

    def images() -> Iterator[Encoded]:
        for file, table in tables.items():
            row = 0
            for encoded, classes in _batches(file, table, *names[file]):
                labels.append(classes)
                for content, label in zip(encoded, classes.tolist(), strict=True):
                    # Row by row, so that the digest does not depend on how the file groups rows.
                    source.update(f"{label} {len(content)};".encode() + content)
                    yield f"row {row} of {file.name}", partial(bytes, content)
                    row += 1

    total = sum(counts.values())
    pixels = torch.from_numpy(decode(images(), total, size=size, channels=channels, address=address))
    # After `decode`, which draws from `images` and so fills `labels` and `source`.
    classes = torch.from_numpy(np.concatenate(labels))
    trained = sum(counts[file] for file in train)
    return LabelledImages.renumbered(pixels, classes, train=trained, what=address, source=source.hexdigest())


def _table(file: Path) -> pq.ParquetFile:
    refuse_pointer(file)
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(_damaged(file, error)) from error


def _damaged(file: Path, error: Exception) -> str:
    size = file.stat().st_size
    return f"{file} must be a whole Parquet file, got {size} bytes that are not ({reason(error)}); fetch it again"


def _columns(file: Path, schema: pa.Schema) -> tuple[str, str]:
    """Returns the names of the image column and of the class column."""
    image = next((name for name in IMAGES if name in schema.names), None)
    label = next((name for name in LABELS if name in schema.names), None)
    if image is None or label is None:
        raise ValueError(
            f"{file} must have a column {' or '.join(IMAGES)} and a column {', '.join(LABELS[:-1])} or {LABELS[-1]}, "
            f"got {', '.join(schema.names)}"
        )
    kind = schema.field(image).type
    if pa.types.is_struct(kind):
        inside = kind.get_field_index("bytes")
        kind = pa.null() if inside < 0 else kind.field(inside).type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise ValueError(
            f"column {image} of {file} must hold encoded images, as bytes or as a struct with a field 'bytes', "
            f"got {schema.field(image).type}"
        )
    if not pa.types.is_integer(schema.field(label).type):
        got = schema.field(label).type
        raise ValueError(f"column {label} of {file} must hold whole numbers, got {got}; number the classes from 0")
    return image, label


def _batches(file: Path, table: pq.ParquetFile, image: str, label: str) -> Iterator[tuple[list[bytes], np.ndarray]]:
    """Yields encoded images and their classes, some rows at a time."""
    row = 0
    try:
        for batch in table.iter_batches(batch_size=ROWS, columns=[image, label]):
            encoded, classes = batch.column(image), batch.column(label)
            if pa.types.is_struct(encoded.type):
                encoded = encoded.field("bytes")
            for name, column in ((image, encoded), (label, classes)):
                if column.null_count:
                    empty = row + column.is_null().index(True).as_py()
                    raise ValueError(f"column {name} of {file} must have no empty value, got one in row {empty}")
            yield encoded.to_pylist(), classes.cast(pa.int64()).to_numpy()
            row += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(_damaged(file, error)) from error
