"""Switches TF32 and reduced-precision products off during gradient computations, and refuses autocast and half floats.

A norm and the sum that it bounds are computed by different products. In TF32 or bfloat16 each of them is off by a
thousandth, so a row that was scaled to its bound is longer than it by as much. PyTorch takes TF32 for convolutions on a
GPU unless told otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import nn

from ..compiled.machine_code import COMPILING

_EXACT = "ieee"  # PyTorch's word for float32 products without TF32 or bfloat16
backends: Any = torch.backends  # whose switches the type checker does not know
ONE_PASS = RLock()
"""Held by the thread that computes gradients."""


def _wait() -> None:
    # In this order, in which a pass takes them.
    ONE_PASS.acquire()
    COMPILING.acquire()


def _go_on() -> None:
    COMPILING.release()
    ONE_PASS.release()


if hasattr(os, "register_at_fork"):
    # A fork waits for both: in the new process nobody would let go of what another thread held.
    os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_go_on)

_SWITCHES = (
    backends.cuda.matmul,
    backends.cudnn.conv,
    backends.cudnn.rnn,
    backends.mkldnn.matmul,
    backends.mkldnn.conv,
    backends.mkldnn.rnn,
)


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 matrices and convolutions are computed in float32 meanwhile, whatever was set before.

    By one thread of Python at a time: the switches are the process's, and a pass puts other parameters and hooks into
    its model, where a second thread's pass would meet them.
    """
    with ONE_PASS:
        before = [switch.fp32_precision for switch in _SWITCHES]
        for switch in _SWITCHES:
            switch.fp32_precision = _EXACT
        try:
            yield
        finally:
            for switch, value in zip(_SWITCHES, before, strict=True):
                switch.fp32_precision = value


def refuse_autocast(device: torch.device) -> None:
    """Raises `ValueError` inside of `torch.autocast`, which rounds a layer's inputs and a row's products."""
    if torch.is_autocast_enabled(device.type):
        raise ValueError(
            f"gradients must be computed in full precision, got torch.autocast('{device.type}'): "
            "in half precision a bounded gradient is longer than its bound; call this outside of it"
        )


def refuse_half_precision(model: nn.Module) -> None:
    """Raises `ValueError` for a trained parameter that is neither float32 nor float64."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"trained parameters must be float32 or float64, got {parameter.dtype} for '{name}': in half precision "
                "a bounded gradient is longer than its bound; convert the model with model.float()"
            )
