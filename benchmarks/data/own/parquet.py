"""Parquet files as on the Hugging Face Hub: a column of encoded images and a column of classes.

The image column is a struct of `bytes` and `path`, or plain bytes, called `image` or `img`; the class is an integer
called `label`, `labels` or `fine_label`. A folder stands for all files below it, in the order of their names: files
whose names start with `train` and `test` (or `val`, `validation`) are the parts, otherwise all are one set. Labels with
gaps, or from 1, are renumbered; null and negative labels, which mark a test part without labels, are refused. Audits
read a single file, whose inputs may also be a column of lists or a column per feature, and which may have ids.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from ...core.data.data_paths import TEST, TRAIN, existing, refuse_pointer, stamp
from ...core.data.dealing import LabelledImages
from ...core.data.encoded import decoded
from ...core.data.images import Encoded, decode, reason
from ...core.data.sizes import DEFAULT_SIZES, Sizes
from ...core.data.splits import Splits
from ...core.data.stored import ID_NAMES, INPUT_NAMES, LABEL_NAMES, Reading, StoredExamples, named

IMAGES = ("image", "img")
LABELS = ("label", "labels", "fine_label")
ROWS = 1024
"""Rows read at a time."""
STARTS = (b"PAR1",)
"""First bytes of a file."""


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
    root = existing(path, noun="parquet")
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
            image, label_name = names[file]
            for batch in _batches(str(file), table, [image, label_name]):
                with _damage_named(str(file)):
                    labels.append(batch[label_name].cast(pa.int64()).to_numpy())
                for content, label in zip(batch[image].to_pylist(), labels[-1].tolist(), strict=True):
                    # Row by row, so that the digest does not depend on how the file groups rows.
                    source.update(f"{label} {len(content)};".encode() + content)
                    yield f"row {row} of {file.name}", partial(bytes, content)
                    row += 1

    total = sum(counts.values())
    pixels = torch.from_numpy(decode(images(), total, size=size, channels=channels, address=address))
    # After `decode`, which draws from `images` and so fills `labels` and `source`.
    classes = torch.from_numpy(np.concatenate(labels))
    trained = sum(counts[file] for file in train)
    return LabelledImages.renumbered(pixels, classes, train=trained, noun=address, source=source.hexdigest())


def _table(file: Path) -> pq.ParquetFile:
    refuse_pointer(file)
    with _damage_named(str(file)):
        return pq.ParquetFile(file)


@contextmanager
def _damage_named(source: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{source} must be a whole Parquet file, got one that cannot be read ({reason(error)})"
        ) from error


def _columns(file: Path, schema: pa.Schema) -> tuple[str, str]:
    """Returns the names of the image column and of the class column."""
    _refuse_repeated(str(file), schema)
    image = next((name for name in IMAGES if name in schema.names), None)
    label = next((name for name in LABELS if name in schema.names), None)
    if image is None or label is None:
        raise ValueError(
            f"{file} must have a column {' or '.join(IMAGES)} and a column {', '.join(LABELS[:-1])} or {LABELS[-1]}, "
            f"got {', '.join(schema.names)}"
        )
    if not _is_encoded(schema.field(image).type):
        raise ValueError(
            f"column {image} of {file} must hold encoded images, as bytes or as a struct with a field 'bytes', "
            f"got {schema.field(image).type}"
        )
    if not pa.types.is_integer(schema.field(label).type):
        dtype = schema.field(label).type
        raise ValueError(f"column {label} of {file} must hold whole numbers, got {dtype}; number the classes from 0")
    return image, label


def _batches(source: str, table: pq.ParquetFile, columns: list[str], rows: int = ROWS) -> Iterator[dict[str, Any]]:
    """Yields some rows of these columns at a time, none of them empty; encoded images as bytes."""
    start = 0
    with _damage_named(source):
        for batch in table.iter_batches(batch_size=rows, columns=columns):
            read = {name: _unpacked(batch.column(name)) for name in columns}
            for name, column in read.items():
                if column.null_count:
                    empty = start + column.is_null().index(True).as_py()
                    raise ValueError(f"column {name} of {source} must have no empty value, got one in row {empty}")
            yield read
            start += len(batch)


def read_examples(source: str, file: IO[bytes], reading: Reading) -> StoredExamples:
    """Reads all rows: labels, optionally ids, and inputs as a column of lists or images, or as columns of numbers.

    Raises:
        ValueError: a damaged file, a null, columns of an unsupported layout, or more than fits into memory.
    """
    with _damage_named(source):
        return _read(source, pq.ParquetFile(file), reading)


def _read(source: str, table: pq.ParquetFile, reading: Reading) -> StoredExamples:
    schema, rows = table.schema_arrow, table.metadata.num_rows
    if rows == 0:
        raise ValueError(f"{source} must hold examples, got no row")
    _refuse_repeated(source, schema)
    label = named(LABEL_NAMES, schema.names, "labels", source)
    ids = next((name for name in schema.names if name.lower() in ID_NAMES), None)
    own = [name for name in schema.names if name.lower() in INPUT_NAMES and not _is_number(schema.field(name).type)]
    if len(own) > 1:
        raise ValueError(f"{source} must have one column of inputs, got {', '.join(own)}")
    columns = own or [name for name in schema.names if name not in (label, ids)]
    others = [name for name in columns if not own and not _is_number(schema.field(name).type)]
    if not columns or others:
        columns_of_other_types = f"{others[0]} of {schema.field(others[0]).type}" if others else ", ".join(schema.names)
        raise ValueError(
            f"{source} must have inputs as one column ({', '.join(INPUT_NAMES)}) of lists or images, or as columns of "
            f"numbers, got {columns_of_other_types}"
        )
    # Checked before any row is read: a constant column of any length takes almost no space in the file.
    reading.refuse_large(rows * len(columns), 8, source)
    # Metadata state the number of list entries before decompression, in which one stored value may become millions.
    groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    long = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns)
    reading.refuse_large(long, 4, source)
    packed = sum(group.total_byte_size for group in groups)
    reading.refuse_large(packed // 8, 8, source)
    labels, names, inputs, count = [], [], [], 0
    column_names = [*columns, label, *([ids] if ids else [])]
    for batch in _batches(source, table, column_names, max(1, min(ROWS, ROWS**2 * rows // max(1, long)))):
        labels.append(_plain(batch[label]))
        if ids:
            names.append(_plain(batch[ids]))
        encoded = _is_encoded(schema.field(columns[0]).type)
        inputs.append(batch[columns[0]].to_pylist() if encoded else _numbers(source, batch, columns))
        # Declared list lengths may be wrong: values are counted as they arrive, so that the limit holds.
        count += sum(map(len, inputs[-1])) // 4 if isinstance(inputs[-1], list) else inputs[-1].size
        reading.refuse_large(count, 4, source)
    if isinstance(inputs[0], list):
        images = [(f"row {i}", image) for i, image in enumerate(image for part in inputs for image in part)]
        stored, notes = decoded(source, images, reading)
    else:
        if len({part.shape[1:] for part in inputs}) > 1:
            raise ValueError(f"inputs of {source} must be of one shape, got rows of several lengths")
        stored, notes = np.concatenate(inputs), ()
        inputs.clear()
    if len(columns) > 1:
        notes = (*notes, f"inputs of {source} are its columns {columns[0]} to {columns[-1]}, {len(columns)} of them")
    return StoredExamples(
        inputs=stored,
        labels=np.concatenate(labels),
        ids=np.concatenate(names) if ids else None,
        notes=notes,
        columns=tuple(columns) if _is_number(schema.field(columns[0]).type) else None,
    )


def _refuse_repeated(source: str, schema: pa.Schema) -> None:
    if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
        raise ValueError(f"{source} must have each column once, got {twice!r} {schema.names.count(twice)} times")


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_encoded(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _is_encoded(kind.field(place).type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _unpacked(column: Any) -> Any:
    while pa.types.is_struct(column.type) and _is_encoded(column.type):
        # Unlike `StructArray.field`, empty where the struct is.
        column = pc.struct_field(column, "bytes")  # pyright: ignore[reportAttributeAccessIssue]  made at import
    return column


def _plain(column: Any) -> np.ndarray:
    array = column.to_numpy(zero_copy_only=False)
    return array.astype(str) if array.dtype.kind == "O" else array


def _numbers(source: str, batch: dict[str, Any], columns: list[str]) -> np.ndarray:
    parts = [_nested(source, name, batch[name]) for name in columns]
    return parts[0] if len(parts) == 1 and parts[0].ndim > 1 else np.stack(parts, axis=1)


def _nested(source: str, name: str, column: Any) -> np.ndarray:
    """Converts lists of lists of numbers to an array, of equal length at each depth."""
    shape = [len(column)]
    if isinstance(column.type, pa.FixedShapeTensorType):
        return column.to_numpy_ndarray()
    while not _is_number(column.type):
        if not any(is_list(column.type) for is_list in _LISTS):
            raise ValueError(f"column {name} of {source} must hold numbers or lists of them, got {column.type}")
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(lengths) and (lengths != lengths[0]).any():
            raise ValueError(
                f"column {name} of {source} must have lists of one length, got {int(lengths.min())} to "
                f"{int(lengths.max())}"
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        column = column.flatten()
        if column.null_count:
            raise ValueError(f"column {name} of {source} must have no empty value, got one inside a list")
    return column.to_numpy(zero_copy_only=False).reshape(shape)


_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
