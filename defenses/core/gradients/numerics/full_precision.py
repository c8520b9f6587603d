"""Switches TF32 and reduced-precision products off during gradient computations, and refuses autocast and half floats.

A norm and the sum that it bounds are computed by different products. In TF32 or bfloat16 each has a relative error of
about 1e-3, so a row scaled to its bound may exceed it by as much. PyTorch uses TF32 for convolutions on a GPU by
default.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any

import torch
from torch import nn

from ...kernels.machine_code import COMPILING

_EXACT = "ieee"  # PyTorch's word for float32 products without TF32 or bfloat16
# A switch that was never set, nor any above it, returns "none", which is full precision too.
_FULL = (_EXACT, "none")
_C: Any = torch._C  # its switches are unknown to the type checker, and slower to read by `torch.backends`
ONE_PASS = RLock()
"""Lock held by the thread that computes gradients."""


def _wait() -> None:
    # In the order in which a pass acquires the two locks; the other order could deadlock.
    ONE_PASS.acquire()
    COMPILING.acquire()


def _go_on() -> None:
    COMPILING.release()
    ONE_PASS.release()


if hasattr(os, "register_at_fork"):
    # A fork waits for both locks: in the child process nothing would release a lock held by another thread.
    os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_go_on)

# PyTorch's names of its switches, (backend, operation).
_SWITCHES = (
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)


def full_precision() -> AbstractContextManager[None]:
    """Computes products of float32 matrices and convolutions in float32 within the context, whatever was set before.

    Limited to one Python thread at a time: the switches are process-wide, and a pass temporarily puts other parameters
    and hooks into its model, which a second thread's pass would use.
    """
    return _FullPrecision()


class _FullPrecision(AbstractContextManager[None]):
    """A class, because a generator takes twice as long, which is noticeable in a small network's step."""

    __slots__ = ("_told",)

    def __enter__(self) -> None:
        ONE_PASS.acquire()
        try:
            precisions = [(switch, _C._get_fp32_precision_getter(*switch)) for switch in _SWITCHES]
            self._told = [(switch, precision) for switch, precision in precisions if precision not in _FULL]
            for switch, _ in self._told:
                _C._set_fp32_precision_setter(*switch, _EXACT)
        except BaseException:
            ONE_PASS.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            for switch, precision in self._told:
                _C._set_fp32_precision_setter(*switch, precision)
        finally:
            ONE_PASS.release()


def refuse_autocast(inputs: torch.Tensor) -> None:
    """Raises `ValueError` inside of `torch.autocast`, which rounds a layer's inputs and a row's products."""
    device = device_type(inputs)
    if torch.is_autocast_enabled(device):
        raise ValueError(
            f"gradients must be computed in full precision, got torch.autocast('{device}'): "
            "in half precision a bounded gradient is longer than its bound; call this outside of it"
        )


def device_type(values: torch.Tensor) -> str:
    """Returns `values.device.type`, whose first call in a step takes PyTorch 10 us."""
    return "cpu" if values.is_cpu else values.device.type


def refuse_half_precision(model: nn.Module) -> None:
    """Raises `ValueError` for a trained parameter that is neither float32 nor float64."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"trained parameters must be float32 or float64, got {parameter.dtype} for '{name}': in half precision "
                "a bounded gradient is longer than its bound; convert the model with model.float()"
            )
