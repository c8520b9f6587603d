"""A pretend accelerator: a device that computes on the CPU and raises where one of its tensors meets one of the CPU.

What breaks on a GPU and not on a CPU is mostly one thing: a tensor that was left behind, or made, on the CPU. This
finds it on any machine. Tensors of the device `pretend` are wrappers around CPU tensors. An operation that is handed a
wrapper and a tensor of the CPU raises, as PyTorch does for CUDA, and so does one that is handed a generator of the CPU.
It says nothing of kernels, precision, streams, memory or speed, nor of code that runs where `device.type` is "cuda".

    with device() as pretend:
        x = torch.randn(3).to(pretend)
        x + torch.randn(3)  # RuntimeError: aten.add.Tensor: a tensor of the CPU meets one on 'pretend'

Allowed as on CUDA: copies from one to the other; a tensor without dimensions, of the CPU, among the arguments of a
pointwise operation, as a number; indices of the CPU. A generator of the device cannot be had. It stands on an interface
of PyTorch that is marked experimental: where that is missing, `device` skips the test, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch

NAME = "pretend"

_KEY = "PrivateUse1"  # PyTorch's for devices of others
# What PyTorch would otherwise compose of other operations, among them some that no wrapper can follow: copies by a
# kernel of its own devices, and tensors that are made empty and grow.
_NOT_COMPOSED = (
    *("copy_", "arange", "arange.start", "arange.start_step", "randperm", "randperm.generator"),
    *("linspace", "logspace", "eye", "eye.m"),
)

_COPIES = {"_to_copy", "copy_"}
_NUMBERS = {"_local_scalar_dense", "equal"}  # what an operation answers to Python with
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Beside pointwise operations, those of which one argument may be a number that lies on the CPU.
_TAKE_A_NUMBER = {"where", "fill", "fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_"}
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device}  # most of what arguments are, beside tensors


@contextmanager
def device() -> Iterator[torch.device]:
    """The device, for as long as the context lasts; skips the test where this PyTorch has no place for it."""
    where = _registered()
    # `module.to` would write into `.data`, which a wrapper does not follow.
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            library._scoped_library("_", "IMPL") as others,
            library._scoped_library("aten", "IMPL") as ours,
            # Autograd starts a thread for each device in the first backward pass of a process, and that has been.
            torch.autograd.set_multithreading_enabled(False),
        ):
            others.fallback(_kernel, _KEY)
            for name in _NOT_COMPOSED:
                packet, _, overload = name.partition(".")
                operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
                ours.impl(name, partial(_kernel, operation), _KEY)
            yield where
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


@cache
def _registered() -> torch.device:
    """Gives the device its name, once a process."""
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        pytest.skip(f"torch {torch.__version__} has no devices that are written in Python")
    setup(NAME)
    return torch.device(NAME, 0)


class OnDevice(Tensor):
    """A tensor that says it lies on the device."""

    # No attribute in `__dict__`: to the product it looks like a tensor with nothing attached to it.
    __slots__ = ("held",)
    held: Tensor
    # What a wrapper does it does below autograd; without this every look at a shape would be a call in Python.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  as Parameter

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        return Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=_registered(),
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = OnDevice(self.held.clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file holds what is on the device, and is read back to the CPU, as with `map_location="cpu"`."""
        return self.held.__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.held.tolist()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Operations that reach the device without a wrapper to catch them: those that make tensors."""
    return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses what a device would, and computes the rest with what is inside of the wrappers."""
    name = func.overloadpacket.__name__
    met = _Met()
    inside, named = met.unwrapped(args), met.unwrapped(kwargs)
    wanted = kwargs.get("device")
    stays = wanted is None or torch.device(wanted).type == NAME
    if met.of_the_cpu and name not in _COPIES:
        _refuse_mixed(func, name, args, kwargs)
    if met.generators and stays:
        raise RuntimeError(f"{func}: expected a generator of '{NAME}', got one of the CPU")
    if wanted is not None:
        named["device"] = torch.device("cpu")
    found = func(*inside, **named)
    if name in _NUMBERS or not stays:
        return found
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # the wrapper gets the new shape too
    for wrapper in met.wrappers.values():
        if wrapper.shape != wrapper.held.shape:
            raise NotImplementedError(f"{func}: a tensor on '{NAME}' cannot grow in place")
    return met.wrapped(found)


class _Met:
    """The tensors and generators among the arguments of an operation.

    Attributes:
        wrappers: by the identity of what is inside.
        of_the_cpu: tensors of the CPU, by their identity.
        generators: whether there are any.
    """

    def __init__(self) -> None:
        self.wrappers: dict[int, OnDevice] = {}
        self.of_the_cpu: dict[int, Tensor] = {}
        self.generators = False

    def unwrapped(self, value: Any) -> Any:
        """The same with what is inside of the wrappers."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, OnDevice):
            self.wrappers[id(value.held)] = value
            return value.held
        if isinstance(value, (list, tuple)):
            return type(value)([self.unwrapped(part) for part in value])
        if isinstance(value, dict):
            return {key: self.unwrapped(part) for key, part in value.items()}
        if isinstance(value, Tensor):
            self.of_the_cpu[id(value)] = value
        elif isinstance(value, torch.Generator):
            self.generators = True
        return value

    def wrapped(self, value: Any) -> Any:
        """A result on the device: the wrapper that there is, or a new one; a tensor that was given stays what it is."""
        if isinstance(value, (list, tuple)):
            return type(value)([self.wrapped(part) for part in value])
        if not isinstance(value, Tensor) or id(value) in self.of_the_cpu:  # as the goal of a copy from the device
            return value
        return self.wrappers[id(value)] if id(value) in self.wrappers else OnDevice(value)


def _refuse_mixed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises where a tensor of the CPU is more than a number or an index, or would be written to."""
    written, pointwise = _about(func)
    if any(_on_cpu(_argument(key, args, kwargs)) for key in written):
        raise RuntimeError(f"{func}: a result on '{NAME}' would be written into a tensor of the CPU")
    met = (args[0], *args[2:3]) if name in _INDEXED else (args, kwargs)
    number_will_do = pointwise or name in _TAKE_A_NUMBER or name in _INDEXED
    if any(not number_will_do or tensor.dim() > 0 for tensor in _on_cpu(met)):
        raise RuntimeError(f"{func}: a tensor of the CPU meets one on '{NAME}'")


def _on_cpu(value: Any) -> list[Tensor]:
    found = _Met()
    found.unwrapped(value)
    return [*found.of_the_cpu.values()]


@cache
def _about(func: Any) -> tuple[tuple[tuple[int, str], ...], bool]:
    """Which arguments an operation writes to, by position and name, and whether it is pointwise."""
    arguments = enumerate(func._schema.arguments)
    written = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return written, torch.Tag.pointwise in func.tags


def _argument(key: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position, name = key
    return args[position] if position < len(args) else kwargs.get(name)
