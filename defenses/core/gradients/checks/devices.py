"""Refusal of tensors on several devices, before an operation of PyTorch fails on them."""

from __future__ import annotations

import torch

from ...inputs import Inputs


def refuse_other_device(device: torch.device, of: str, **tensors: Inputs) -> None:
    """Raises `ValueError` for a tensor on another device.

    Args:
        device: where all must be.
        of: what is on it, such as "the model".
        **tensors: by the names of their arguments.
    """
    for name, values in tensors.items():
        if values.device != device:
            raise ValueError(
                f"{name} must be on the device of {of}, {device}, got {values.device}; "
                f"move the tensors with .to({str(device)!r}), or {of} with .to({str(values.device)!r})"
            )
