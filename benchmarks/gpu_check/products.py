"""Precision of PyTorch's float32 products on CUDA: float32, TF32, or TF32 for convolutions alone, PyTorch's default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FLOAT32, DEFAULT, TF32 = "float32", "PyTorch's default", "TF32"
_IEEE, _TF32 = "ieee", "tf32"
# Name -> precision of matrix products, precision of convolutions.
_SETTINGS = {FLOAT32: (_IEEE, _IEEE), DEFAULT: (_IEEE, _TF32), TF32: (_TF32, _TF32)}


def names(device: str, *, default: bool = False) -> tuple[str, ...]:
    """Returns the precisions that differ on a device: on a CPU float32 alone.

    Args:
        device: "cpu" or "cuda".
        default: whether PyTorch's default is one of them.
    """
    if not device.startswith("cuda"):
        return (FLOAT32,)
    return (FLOAT32, DEFAULT, TF32) if default else (FLOAT32, TF32)


@contextmanager
def products(name: str) -> Iterator[None]:
    """Sets the precision of products within the context.

    Args:
        name: `FLOAT32`, `DEFAULT` or `TF32`.
    """
    backends: Any = torch.backends  # its switches are unknown to the type checker
    switches = (backends.cuda.matmul, backends.cudnn.conv)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch, precision in zip(switches, _SETTINGS[name], strict=True):
            switch.fp32_precision = precision
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def engine_settings(name: str) -> dict[str, Any]:
    """Returns settings under which leakbench's engine computes in this precision; it ignores PyTorch's switches."""
    return {"precision": "float32" if name == FLOAT32 else "tf32"}
