"""Labelled examples as input and label tensors, from a pair of them or from a map-style dataset."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

LabelledData = tuple[Tensor, Tensor] | Dataset[Any]
"""(inputs [n, ...], labels [n]), or a map-style dataset of such pairs."""


def as_tensors(data: LabelledData, argument: str, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Inputs [n, ...] and labels [n]; a dataset is read into memory once.

    Args:
        data: private or public examples.
        argument: what an error calls them.
        device: where they are wanted; None for where they are.

    Raises:
        ValueError: for no examples, lengths that differ, or a dataset of unknown length.
    """
    if isinstance(data, TensorDataset):
        pair = data.tensors
    elif isinstance(data, Dataset):
        if not hasattr(data, "__len__"):
            raise ValueError(f"{argument} must have a length, got {type(data).__name__}; sampling needs to know it")
        rows = [data[i] for i in range(len(data))]  # pyright: ignore[reportArgumentType]  checked above
        pair = (torch.stack([row[0] for row in rows]), torch.as_tensor([row[1] for row in rows])) if rows else ()
    else:
        pair = data
    if len(pair) != 2 or len(pair[0]) != len(pair[1]) or len(pair[0]) == 0:
        sizes = ", ".join(str(len(part)) for part in pair) or "nothing"
        raise ValueError(f"{argument} must be (inputs, labels) of one length above 0, got {sizes}")
    device = pair[0].device if device is None else device
    return pair[0].to(device), pair[1].to(device)
