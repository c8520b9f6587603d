"""Tensors as a file describes them: names, types, shapes, and whether there are too many of them."""

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
"""Bytes of one entry by type, in the words of safetensors. Types of 8 bits and less are no weights of a plain model."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        dtype: a key of `ITEM_BYTES`.
        shape: entries along each dimension.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What its entries take, side by side."""
        size = ITEM_BYTES[self.dtype]
        for entries in self.shape:
            size *= entries
        return size


def refuse_names(tensors: Mapping[str, object]) -> None:
    """Refuses no tensors, too many, and names that are too long or not printable.

    Raises:
        FileRefused: naming the first such name.
    """
    if not tensors:
        raise FileRefused("it holds no tensor")
    if len(tensors) > MAX_TENSORS:
        raise FileRefused(f"it may hold at most {MAX_TENSORS} tensors, got {len(tensors)}")
    for name in tensors:
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise FileRefused(f"names of tensors must be 1 to {MAX_NAME} printable characters, got {shown(name)}")


def whole(number: object) -> bool:
    """Whether it is an integer from 0 to below 2**63; true and false are none."""
    return type(number) is int and 0 <= number < 1 << 63


def shape_of(value: object, name: str) -> tuple[int, ...]:
    """A shape, which must be a list or a tuple of few non-negative integers.

    Args:
        value: what the file says.
        name: of the tensor, as the error quotes it.

    Raises:
        FileRefused: naming the tensor.
    """
    if not isinstance(value, list | tuple) or not all(whole(entries) for entries in value):
        raise FileRefused(f"the shape of {name} must be integers from 0 to below 2**63, got {shown(value)}")
    if len(value) > MAX_DIMENSIONS:
        raise FileRefused(f"{name} may have at most {MAX_DIMENSIONS} dimensions, got {len(value)}")
    return tuple(value)
