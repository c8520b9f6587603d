"""Files of a checked folder, each read alone: a record, a manifest, a list, arrays; faults instead of exceptions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from ..kinds import KINDS
from ..records.files import digest_of_bytes, read_bytes
from ..records.left_out import SCHEMA as LEFT_OUT_SCHEMA
from ..records.left_out import LeftOut
from ..records.manifest import SCHEMA as MANIFEST_SCHEMA
from ..records.manifest import Manifest
from ..records.record import SCHEMA, Record
from ..records.validation import RecordError, build, parse_json
from .fault import Fault
from .limits import Limits
from .text import printable, text_faults

COUNTED = ("utility", "membership")
"""Kinds whose arrays have a row for each of the n examples behind their main metric."""

_FIELD = re.compile(r"([A-Za-z_][\w.\[\]%@-]*) must ")
_KEY = re.compile(r"key '([^']+)' is (?:missing|unknown|there twice)(?: in ([\w.\[\]]+))?")


@dataclass(frozen=True)
class ReadRecord:
    """A record file.

    Attributes:
        record: None if it is refused as a whole.
        data: its JSON document; None in the same case.
        faults: of the file by itself.
    """

    record: Record | None
    data: dict[str, Any] | None
    faults: list[Fault]


def read_record(path: Path, file: str, limits: Limits) -> ReadRecord:
    """Reads a record without trusting it.

    Args:
        path: of the file.
        file: its path below the checked folder.
        limits: of nesting and lengths.
    """
    data, faults = _document(path, file, limits, SCHEMA)
    if data is None:
        return ReadRecord(None, None, faults)
    try:
        record = Record.from_values(data)
    except (RecordError, RecursionError) as error:
        return ReadRecord(None, None, [*faults, fault_of(error, file)])
    if path.stem != record.id:
        problem = f"the name must be {record.id}.json, after the id in it"
        faults.append(Fault(file=file, field="id", problem=problem))
    return ReadRecord(record, data, faults)


def read_manifest(path: Path, file: str, limits: Limits) -> tuple[Manifest | None, list[Fault]]:
    """Reads a manifest without trusting it; None with its faults if it is refused as a whole."""
    return _named_by_content(Manifest, path, file, limits, MANIFEST_SCHEMA, "run its suite again")


def read_left_out(path: Path, file: str, limits: Limits) -> tuple[LeftOut | None, list[Fault]]:
    """Reads a list of left out arrays without trusting it; None with its faults if it is refused as a whole."""
    return _named_by_content(LeftOut, path, file, limits, LEFT_OUT_SCHEMA, "publish its run again")


N = TypeVar("N", Manifest, LeftOut)


def _named_by_content(
    cls: type[N], path: Path, file: str, limits: Limits, schema: int, way_out: str
) -> tuple[N | None, list[Fault]]:
    data, faults = _document(path, file, limits, schema)
    if data is None:
        return None, faults
    try:
        document = build(cls, data)
    except (RecordError, RecursionError) as error:
        return None, [*faults, fault_of(error, file)]
    if document.name != path.name:
        problem = f"its name is not that of its content: it was edited after it was written; {way_out}"
        faults.append(Fault(file=file, field="", problem=problem))
    return document, faults


def arrays_faults(record: Record, folder: Path, prefix: str, limits: Limits) -> list[Fault]:
    """Returns the faults of a record's arrays, without decoding them.

    Args:
        record: that names arrays.
        folder: of both.
        prefix: path of the folder below the checked one.
        limits: of declared sizes.
    """
    file = prefix + printable(record.arrays or "")
    try:
        content = read_bytes(folder / (record.arrays or ""), "arrays")
    except RecordError as error:
        return [Fault(file=file, field="", problem=_without_paths(str(error), folder))]
    if digest_of_bytes(content) != record.arrays_digest:
        problem = f"they are not those that {record.id}.json was written with: cut or altered"
        return [Fault(file=file, field="arrays_digest", problem=problem)]
    return [Fault(file=file, field=field, problem=problem) for field, problem in _declared(content, record, limits)]


def fault_of(error: Exception, file: str) -> Fault:
    """Returns the error of a reader as a fault, with the field that its message begins with."""
    message = printable(str(error), 400)
    if message.startswith("it was edited"):
        return Fault(file=file, field="seal", problem=message)
    if field := _FIELD.match(message):
        return Fault(file=file, field=field.group(1), problem=message)
    key = _KEY.match(message)
    return Fault(file=file, field=".".join(filter(None, (key.group(2), key.group(1)))) if key else "", problem=message)


def _document(path: Path, file: str, limits: Limits, schema: int) -> tuple[dict[str, Any] | None, list[Fault]]:
    """Parses a JSON object and checks its schema and all of its text."""

    def refused(problem: str, field: str = "") -> tuple[None, list[Fault]]:
        return None, [Fault(file=file, field=field, problem=problem)]

    try:
        data = parse_json(read_bytes(path).decode())
    except RecordError as error:
        return None, [fault_of(RecordError(_without_paths(str(error), path.parent)), file)]
    except UnicodeDecodeError:
        return refused("it is not UTF-8 text")
    except (ValueError, RecursionError) as error:
        return refused(f"it is not a whole JSON document: {printable(str(error))}")
    if not isinstance(data, dict):
        return refused("it must be a JSON object")
    written = data.get("schema")
    if isinstance(written, int) and not isinstance(written, bool) and written > schema:
        return refused(f"schema {written} is newer than {schema}, which is read here; {_newer(data)}", "schema")
    return data, text_faults(data, file, limits)


def _newer(data: dict[str, Any]) -> str:
    """Way to read a file of a later version."""
    provenance = data.get("provenance")
    version = provenance.get("version") if isinstance(provenance, dict) else None
    if isinstance(version, str) and re.fullmatch(r"\d+(\.\d+){1,3}[a-z0-9.+]{0,20}", version):
        return f"install leakbench {version} or later, which wrote it"
    return "install the version of leakbench that wrote it"


def _declared(content: bytes, record: Record, limits: Limits) -> Iterator[tuple[str, str]]:
    """Yields what the footer of a Parquet file declares beyond the limits, or against its record."""
    # Imported here because the records themselves do without.
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.ParquetFile(BytesIO(content)).metadata
        rows, columns = metadata.num_rows, max(1, metadata.num_columns)
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        decoded = max(8 * rows * columns, sum(group.total_byte_size for group in groups))
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        yield "", f"it is no Parquet file that can be read: {printable(str(error))}"
        return
    if rows > limits.rows:
        yield "rows", f"it must have at most {limits.rows} rows, and declares {rows}"
    elif decoded > max(limits.decoded, 16 * len(content)):
        yield "", f"it must decode to at most {limits.decoded} bytes, and {len(content)} bytes declare {decoded}"
    main = record.metrics.get(KINDS[record.kind].main)
    if record.kind in COUNTED and main is not None and main.n is not None and main.n != rows:
        yield "rows", f"it has {rows} rows, and {KINDS[record.kind].main} of its record is of {main.n} examples"


def _without_paths(message: str, folder: Path) -> str:
    return printable(message.replace(f"{folder}/", ""), 400)
