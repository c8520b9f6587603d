"""Tensors in a tensor, tuple, list or dictionary, in the same order on both sides of a channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def leaves(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a structure, from first to last; other objects yield none."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list):
        for part in value:
            yield from leaves(part)
    elif type(value) is dict:
        yield from leaves(list(value.values()))


def changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns the same structure with every tensor changed, in the order of `leaves`."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(changed(part, change) for part in value)
    if type(value) is dict:
        return {key: changed(part, change) for key, part in value.items()}
    return value
