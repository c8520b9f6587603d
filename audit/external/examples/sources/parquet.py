"""Parquet: a column of labels, optionally of ids, and inputs as a column of lists or images, or as numeric columns."""

from __future__ import annotations

from dataclasses import replace
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from leakbench.benchmarks.core.data.images import reason

from .encoded import decoded
from .raw import ID_NAMES, INPUT_NAMES, LABEL_NAMES, RawExamples, Reading, checked, named

_ROWS = 1024
"""Rows read at a time."""


def read_parquet(source: str, file: IO[bytes], reading: Reading) -> RawExamples:
    """Reads all rows.

    Raises:
        ValueError: a damaged file, a null, columns of an unsupported layout, or more than fits into memory.
    """
    try:
        table = pq.ParquetFile(file)
        return _read(source, table, reading)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{source} must be a whole Parquet file, got one that cannot be read ({reason(error)})"
        ) from error


def _read(source: str, table: pq.ParquetFile, reading: Reading) -> RawExamples:
    schema, rows = table.schema_arrow, table.metadata.num_rows
    if rows == 0:
        raise ValueError(f"{source} must hold examples, got no row")
    if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
        raise ValueError(f"{source} must have each column once, got {twice!r} {schema.names.count(twice)} times")
    label = named(LABEL_NAMES, schema.names, "labels", source)
    ids = next((name for name in schema.names if name.lower() in ID_NAMES), None)
    own = [name for name in schema.names if name.lower() in INPUT_NAMES and not _is_number(schema.field(name).type)]
    if len(own) > 1:
        raise ValueError(f"{source} must have one column of inputs, got {', '.join(own)}")
    columns = own or [name for name in schema.names if name not in (label, ids)]
    others = [name for name in columns if not own and not _is_number(schema.field(name).type)]
    if not columns or others:
        got = f"{others[0]} of {schema.field(others[0]).type}" if others else ", ".join(schema.names)
        raise ValueError(
            f"{source} must have inputs as one column ({', '.join(INPUT_NAMES)}) of lists or images, or as columns of "
            f"numbers, got {got}"
        )
    # Checked before any row is read: a column of a constant takes almost no space in the file, whatever its length.
    reading.refuse_large(rows * len(columns), 8, source)
    # The metadata give the lengths of lists before unpacking: a stored value may stand for millions.
    groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    long = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns)
    reading.refuse_large(long, 4, source)
    packed = sum(group.total_byte_size for group in groups)
    reading.refuse_large(packed // 8, 8, source)
    labels, names, inputs, taken, start = [], [], [], 0, 0
    for batch in table.iter_batches(
        batch_size=max(1, min(_ROWS, _ROWS**2 * rows // max(1, long))),
        columns=[*columns, label, *([ids] if ids else [])],
    ):
        for name in batch.schema.names:
            column = batch.column(name)
            if column.null_count:
                row = start + column.is_null().index(True).as_py()
                raise ValueError(f"column {name} of {source} must have no empty value, got one in row {row}")
        start += len(batch)
        labels.append(_plain(batch.column(label)))
        if ids:
            names.append(_plain(batch.column(ids)))
        inputs.append(_bytes_of(source, batch.column(columns[0])) if _is_encoded(schema.field(columns[0]).type)
                      else _numbers(source, batch, columns))  # fmt: skip
        # Declared list lengths may be wrong: values are counted as they arrive, so that the limit holds.
        taken += sum(map(len, inputs[-1])) // 4 if isinstance(inputs[-1], list) else inputs[-1].size
        reading.refuse_large(taken, 4, source)
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
    examples = checked(
        source,
        reading,
        inputs=stored,
        labels=np.concatenate(labels),
        ids=np.concatenate(names) if ids else None,
        notes=notes,
    )
    return replace(examples, columns=tuple(columns)) if _is_number(schema.field(columns[0]).type) else examples


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_encoded(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _is_encoded(kind.field(place).type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _bytes_of(source: str, column: Any) -> list[bytes]:
    if pa.types.is_struct(column.type):
        column = column.field("bytes")
    if column.null_count:
        raise ValueError(f"images of {source} must have bytes, got none in {column.null_count} rows")
    return column.to_pylist()


def _plain(column: Any) -> ndarray:
    array = column.to_numpy(zero_copy_only=False)
    return array.astype(str) if array.dtype.kind == "O" else array


def _numbers(source: str, batch: pa.RecordBatch, columns: list[str]) -> ndarray:
    parts = [_nested(source, name, batch.column(name)) for name in columns]
    return parts[0] if len(parts) == 1 and parts[0].ndim > 1 else np.stack(parts, axis=1)


def _nested(source: str, name: str, column: Any) -> ndarray:
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
