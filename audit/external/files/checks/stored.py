"""Tensors as a file describes them: names, types, shapes, and limits on their number."""

from collections.abc import Mapping
from dataclasses import dataclass

from .limits import MAX_DIMENSIONS, MAX_NAME, MAX_TENSORS, FileRefused, shown

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
}
"""Bytes of an entry by type, as named by safetensors. No plain model has floats of 8 bits or fewer, which are left out.
"""


@dataclass(frozen=True)
class StoredTensor:
    """Description of a tensor in a file.

    Attributes:
        dtype: a key of `ITEM_BYTES`.
        shape: entries along each dimension.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its entries, side by side."""
        size = ITEM_BYTES[self.dtype]
        for entries in self.shape:
            size *= entries
        return size


def refuse_names(tensors: Mapping[str, object]) -> None:
    """Refuses no tensors, too many, and names that are too long or not printable.

    Raises:
        FileRefused: quotes the first such name.
    """
    if not tensors:
        raise FileRefused("it holds no tensor")
    if len(tensors) > MAX_TENSORS:
        raise FileRefused(f"it may hold at most {MAX_TENSORS} tensors, got {len(tensors)}")
    for name in tensors:
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise FileRefused(f"names of tensors must be 1 to {MAX_NAME} printable characters, got {shown(name)}")


def whole(number: object) -> bool:
    """Returns whether a number is an integer from 0 to below 2**63; booleans are not."""
    return type(number) is int and 0 <= number < 1 << 63


def shape_of(value: object, name: str) -> tuple[int, ...]:
    """Returns a shape, which must be a list or a tuple of few non-negative integers.

    Args:
        value: from the file.
        name: of the tensor, as the error quotes it.

    Raises:
        FileRefused: names the tensor.
    """
    if not isinstance(value, list | tuple) or not all(whole(entries) for entries in value):
        raise FileRefused(f"the shape of {name} must be integers from 0 to below 2**63, got {shown(value)}")
    if len(value) > MAX_DIMENSIONS:
        raise FileRefused(f"{name} may have at most {MAX_DIMENSIONS} dimensions, got {len(value)}")
    return tuple(value)
