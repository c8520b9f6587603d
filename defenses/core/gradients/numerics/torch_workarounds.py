"""Works around faults of PyTorch versions that leakbench supports; versions without the fault are left unchanged.

GroupNorm, on the CPU, PyTorch 2.10 to 2.13: the backward pass ends the process by a segmentation fault if images have
their channels last and the gradient of weight or bias is requested, but not that of the images. Any training of a model
that begins with GroupNorm may hit this, and the layerwise engine itself puts channels last. The kernel is therefore
always asked for the gradient of the images too, which works in every version.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

_OPERATOR = "native_group_norm_backward"
_MENDED = (2, 14)  # first version whose own kernel works


def _release() -> tuple[int, int]:
    """Returns major and minor version of PyTorch, also for builds from source, as 2.15.0a0+git."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _ask_for_every_derivative() -> Library:
    """Wraps PyTorch's kernel, for as long as the returned registration lives."""
    own = get_kernel(f"aten::{_OPERATOR}", "CPU")

    def backward(keys: Any, signals: Tensor, inputs: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        *sizes, needed = others
        by_inputs, *by_parameters = own.call_boxed(keys, signals, inputs, *sizes, [True, *needed[1:]])
        return (by_inputs if needed[0] else None, *by_parameters)

    registration = Library("aten", "IMPL")
    with warnings.catch_warnings():  # up to 2.12 PyTorch warns of a second kernel, although it is allowed
        warnings.filterwarnings("ignore", message="(?s).*previously registered kernel", category=UserWarning)
        registration.impl(_OPERATOR, backward, "CPU", with_keyset=True, allow_override=True)
    return registration


# Once: a reloaded module would wrap its own kernel, whose registration then ends.
if "_REGISTRATION" not in globals():
    _REGISTRATION = _ask_for_every_derivative() if _release() < _MENDED else None
