"""Parquet files of third parties, decoded up to a limit: a file of some kilobytes may declare billions of values."""

import re
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from .validation import RecordError

LIMIT = 2**30
"""Bytes to which any file may decode."""

LIMIT_PER_BYTE = 16
"""Decoded bytes for each byte of a file above `LIMIT`: numbers that differ do not compress further."""


def read_table(content: bytes, columns: Sequence[str] | None = None) -> Any:
    """Reads a Parquet file as a table of PyArrow, without index columns and other metadata of pandas, which may lie.

    The declared number of values is checked first, and the bytes of the values while they are decoded.

    Args:
        content: of the file.
        columns: to read; None for all.

    Raises:
        RecordError: it is no Parquet file, lacks a column, or decodes to more than the limit.
    """
    # Imported here because the records themselves do without.
    import pyarrow
    import pyarrow.parquet

    limit = max(LIMIT, LIMIT_PER_BYTE * len(content))
    too_large = f"a Parquet file of {len(content)} bytes must decode to at most {limit} bytes"
    try:
        file = pyarrow.parquet.ParquetFile(BytesIO(content))
        names = [name for name in file.schema_arrow.names if not re.fullmatch(r"__index_level_\d+__", name)]
        if lacking := [name for name in columns or () if name not in names]:
            raise RecordError(f"a table must have the column {lacking[0]}; it has {', '.join(names)}")
        names = names if columns is None else list(columns)
        if len(set(names)) < len(names):
            doubled = next(name for name in names if names.count(name) > 1)
            raise RecordError(f"a table must have columns of different names, and {doubled!r} occurs twice")
        # Decoded numbers take up to 8 bytes, which constant columns declare in next to none.
        if 8 * (values := file.metadata.num_rows * max(len(names), 1)) > limit:
            raise RecordError(f"{too_large}, and it declares {values} values; write it again in smaller files")
        batches, size = [], 0
        for batch in file.iter_batches(batch_size=4096, columns=names, use_threads=False):
            size += batch.nbytes
            if size > limit:
                raise RecordError(f"{too_large}, and holds more; write it again in smaller files")
            batches.append(batch)
        schema = batches[0].schema if batches else file.schema_arrow
        return pyarrow.Table.from_batches(batches, schema=schema).select(names).replace_schema_metadata(None)
    except (pyarrow.ArrowException, OSError, KeyError, TypeError, MemoryError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"it is no Parquet file that can be read: {' '.join(str(error).split())}") from None
