"""Header of safetensors: a length, strict JSON, and tensors that lie side by side to the end of the file.

Eight bytes hold the length of a JSON object, little endian; it maps each name to dtype, shape and the first and last
byte of its tensor behind the header. Readers differ on duplicate names, on tensors that share bytes, and on bytes that
belong to no tensor: so all of these are refused.
"""

import json
from collections import Counter
from io import BufferedIOBase
from typing import Any

from .limits import MAX_HEADER_BYTES, MAX_TENSORS, FileRefused, shown
from .stored import ITEM_BYTES, StoredTensor, refuse_names, shape_of, whole

_FIELDS = {"dtype", "shape", "data_offsets"}
_NARROW = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4", "C64", "U16"}
_NARROW |= {"U32", "U64"}


def read_header(file: BufferedIOBase, size: int) -> dict[str, StoredTensor]:
    """Returns tensors by name.

    Args:
        file: at any position.
        size: bytes of the file.

    Raises:
        FileRefused: names the broken rule.
    """
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise FileRefused(f"its header of {length} bytes ends behind the file, which has {size}: it was cut short")
    if length > MAX_HEADER_BYTES:
        raise FileRefused(f"its header may have at most {MAX_HEADER_BYTES} bytes, got {length}")
    header = _json(file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileRefused("__metadata__ of its header must map strings to strings")
    refuse_names(header)
    tensors, spans = {}, []
    for name, entry in header.items():
        tensors[name], span = _tensor(name, entry)
        spans.append((*span, name))
    _refuse_gaps(sorted(spans), size - 8 - length)
    return tensors


def _json(content: bytes) -> dict[str, Any]:
    """Returns the header, in which every name is unique."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise FileRefused(f"its header names {shown(twice)} twice")
        return fields

    def no_number(text: str) -> Any:
        raise FileRefused(f"numbers of its header must be integers, got {shown(text)}")

    if not content.startswith(b"{"):
        raise FileRefused("its header must be a JSON object")
    # Checked before parsing takes memory: an object and two lists per tensor, in addition to any in names and metadata.
    objects, lists = content.count(b"{"), content.count(b"[")
    if objects > MAX_TENSORS + 1000 or lists > 2 * MAX_TENSORS + 1000:
        raise FileRefused(f"its header may have at most {MAX_TENSORS} tensors, got {objects} objects and {lists} lists")
    try:
        header = json.loads(
            content.decode("utf-8"), object_pairs_hook=once, parse_float=no_number, parse_constant=no_number
        )
    except FileRefused:
        raise
    except (ValueError, RecursionError) as error:
        raise FileRefused(f"its header must be JSON in UTF-8: {shown(str(error))}") from None
    return header


def _tensor(name: str, entry: Any) -> tuple[StoredTensor, tuple[int, int]]:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise FileRefused(f"{shown(name)} must have dtype, shape and data_offsets and nothing else")
    dtype, offsets = entry["dtype"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        known = isinstance(dtype, str) and dtype in _NARROW
        way_out = "; convert it to F32 where it was saved" if known else ""
        raise FileRefused(f"the dtype of {shown(name)} must be of {', '.join(ITEM_BYTES)}, got {shown(dtype)}{way_out}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(whole(at) for at in offsets):
        raise FileRefused(f"data_offsets of {shown(name)} must be two integers from 0, got {shown(offsets)}")
    tensor = StoredTensor(dtype, shape_of(entry["shape"], shown(name)))
    start, end = offsets
    if end - start != tensor.bytes:
        raise FileRefused(
            f"{shown(name)} of {dtype} and shape {shown(list(tensor.shape))} takes {shown(tensor.bytes)} bytes, got "
            f"{end - start}"
        )
    return tensor, (start, end)


def _refuse_gaps(spans: list[tuple[int, int, str]], size: int) -> None:
    """Refuses tensors that do not lie side by side from the first byte behind the header to the last."""
    reached = 0
    for start, end, name in spans:
        if end > size:
            raise FileRefused(f"{shown(name)} ends behind the file, at {end} of {size} bytes of data: it was cut short")
        if start != reached:
            how = "shares bytes with the tensor before it" if start < reached else "leaves a gap before it"
            raise FileRefused(f"{shown(name)} {how}, at {start} instead of {reached}")
        reached = end
    if reached != size:
        raise FileRefused(f"{size - reached} bytes behind its last tensor belong to none")
