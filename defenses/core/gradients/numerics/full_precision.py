"""Precision of gradient computations: TF32 and bfloat16 where no bound depends on them, float32 everywhere else.

A norm and the sum that it bounds are usually computed by different products. In TF32 or bfloat16 each has a relative
error of about 1e-3 of its terms, so where terms cancel a row scaled to its bound can exceed it several times (31 times,
measured on a convolution in Opacus's ghost clipping with PyTorch's default precision on a GPU). `full_precision`
therefore switches both off, whatever was set before. `forward_precision` and `product_precision` allow the precision of
a run again where rounding changes the gradient itself, and not what is said of its norm:

- forward and backward passes, whose results are the factors that norm and sum are both computed from in float32;
- products that form rows which are kept: norm and sum are both computed in float32 from the rows as they were rounded.

bfloat16 applies to passes, by autocast; kept rows are then formed in TF32, which represents their factors exactly.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any, Literal, get_args

import torch
from torch import nn

from ...inputs import Inputs
from ...kernels.machine_code import COMPILING

Precision = Literal["float32", "tf32", "bfloat16"]
"""Precisions of forward and backward passes."""

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


_ON_CUDA = tuple(switch for switch in _SWITCHES if switch[0] == "cuda")
_UNCHANGED: AbstractContextManager[None] = nullcontext()
_passes: Precision = "float32"  # of the pass that holds `ONE_PASS`


def full_precision(passes: Precision = "float32") -> AbstractContextManager[None]:
    """Computes products of float32 matrices and convolutions in float32 within the context, whatever was set before.

    Limited to one Python thread at a time: the switches are process-wide, and a pass temporarily puts other parameters
    and hooks into its model, which a second thread's pass would use.

    Args:
        passes: precision of forward and backward passes within the context.
    """
    return _FullPrecision(passes)


def forward_precision(device: str) -> AbstractContextManager[Any]:
    """Allows the precision of passes within the context, for a forward pass inside of `full_precision`.

    Args:
        device: type of the device.
    """
    if _passes != "bfloat16":
        return product_precision()
    # Without a cache of converted weights: each is used once, and a CUDA graph must not read one from before it.
    return torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False)


def product_precision() -> AbstractContextManager[None]:
    """Allows TF32 within the context if passes are reduced: for a backward pass, or a product that forms kept rows."""
    return _OnCuda("tf32") if reduced() else _UNCHANGED


def passes_in() -> Precision:
    """Returns the precision of passes."""
    return _passes


def reduced() -> bool:
    """Returns whether passes run in less than float32."""
    return _passes != "float32"


def outside_of_passes() -> AbstractContextManager[None]:
    """Computes in float32 again within the context: in a hook of a backward pass."""
    return _OnCuda(_EXACT) if reduced() else _UNCHANGED


def precision_for(values: torch.Tensor, asked: Precision | None) -> Precision:
    """Returns the precision of passes for parameters like these; TF32 if none is asked for and they are on CUDA.

    Raises:
        ValueError: for an unknown name, TF32 on another device than CUDA, or less than float64 for float64 parameters.
    """
    if asked is None:
        return "tf32" if values.is_cuda and values.dtype == torch.float32 else "float32"
    if asked not in get_args(Precision):
        raise ValueError(f"precision must be one of {', '.join(get_args(Precision))} or None, got {asked!r}")
    if asked == "tf32" and not values.is_cuda:
        raise ValueError(f"precision 'tf32' must be used on a CUDA device, got {values.device}; leave precision out")
    if asked != "float32" and values.dtype != torch.float32:
        raise ValueError(f"precision '{asked}' must be used with float32 parameters, got {values.dtype}")
    return asked


def widened(values: Any) -> Any:
    """Returns a bfloat16 tensor of a pass in float32; anything else unchanged."""
    low = _passes == "bfloat16" and isinstance(values, torch.Tensor) and values.dtype == torch.bfloat16
    return values.float() if low else values


class _FullPrecision(AbstractContextManager[None]):
    """A class, because a generator takes twice as long, which is noticeable in a small network's step."""

    __slots__ = ("_outer", "_passes", "_told")
    _outer: Precision

    def __init__(self, passes: Precision) -> None:
        self._passes: Precision = passes

    def __enter__(self) -> None:
        global _passes
        ONE_PASS.acquire()
        try:
            self._told = _switched(_SWITCHES, _EXACT)
            self._outer, _passes = _passes, self._passes
        except BaseException:
            ONE_PASS.release()
            raise

    def __exit__(self, *_: object) -> None:
        global _passes
        try:
            _passes = self._outer
            for switch, precision in self._told:
                _C._set_fp32_precision_setter(*switch, precision)
        finally:
            ONE_PASS.release()


class _OnCuda(AbstractContextManager[None]):
    """Sets the precision of CUDA's products; within `full_precision`, on any thread of the same pass."""

    __slots__ = ("_precision", "_told")

    def __init__(self, precision: str) -> None:
        self._precision = precision

    def __enter__(self) -> None:
        self._told = _switched(_ON_CUDA, self._precision)

    def __exit__(self, *_: object) -> None:
        for switch, precision in self._told:
            _C._set_fp32_precision_setter(*switch, precision)


def _switched(switches: tuple[tuple[str, str], ...], precision: str) -> list[tuple[tuple[str, str], str]]:
    """Sets switches to a precision; returns those that changed, with their values before."""
    before = [(switch, _C._get_fp32_precision_getter(*switch)) for switch in switches]
    kept = _FULL if precision == _EXACT else (precision,)
    changed = [(switch, value) for switch, value in before if value not in kept]
    for switch, _ in changed:
        _C._set_fp32_precision_setter(*switch, precision)
    return changed


def refuse_autocast(inputs: Inputs) -> None:
    """Raises `ValueError` inside of `torch.autocast`, which rounds a layer's inputs and a row's products."""
    device = device_type(inputs)
    if torch.is_autocast_enabled(device):
        raise ValueError(
            f"gradients must be computed in full precision, got torch.autocast('{device}'): "
            "in half precision a bounded gradient is longer than its bound; call this outside of it"
        )


def device_type(values: Inputs) -> str:
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
