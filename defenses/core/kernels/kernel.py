"""The protocol of kernels: compiled code, and beside it the PyTorch way that it replaces and is compared with.

A class is a kernel, an instance of it the code for a format or for a layer's sizes. Whoever needs the result writes

    kernel = row_products(...)  # a cached function: code is compiled once
    products = kernel(rows, others)[0] if RowProducts.usable(rows, others) else rows @ others.T
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class computed_once:
    """A `cached_property` without the lock of Python 3.11, for which a fork during a compilation would wait forever."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        """Takes the method that computes the value."""
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, kernel: Any, owner: type | None = None) -> Any:
        """Computes the value, and stores it in the object's dictionary, where Python finds it from then on."""
        if kernel is None:
            return self
        value = vars(kernel)[self._name] = self._compute(kernel)
        return value


class ReferenceResult(NamedTuple):
    """A result that PyTorch computes.

    Attributes:
        value: the result in float64; NaN for an example that is not finite, for which the kernel may return anything.
        error: largest difference that rounding explains, of each number or of all.
    """

    value: Tensor
    error: Tensor | float


@runtime_checkable
class Kernel(Protocol):
    """Protocol of all kernels; subclasses are frozen dataclasses of the settings that the code is compiled for."""

    @staticmethod
    def usable(*tensors: Any, **settings: Any) -> bool:
        """Returns whether the code can read these tensors, and saves more time than its call costs.

        Callers take PyTorch's way if not, so a class whose `usable` is replaced by this one is switched off.
        """
        return False

    @computed_once
    def code(self) -> Callable[..., None]:
        """The compiled function of addresses and sizes, which checks nothing; its docstring lists the arguments."""
        ...

    def __call__(self, *arguments: Any, **settings: Any) -> Sequence[Tensor]:
        """Computes results by the code, and refuses tensors of which it would read past the end."""
        ...

    def reference(self, *arguments: Any, **settings: Any) -> Sequence[ReferenceResult]:
        """Computes the same results by PyTorch, in float64 and on any device, however long it takes."""
        ...

    def examples(self) -> Iterable[tuple[Any, ...]]:
        """Yields arguments of calls that might go wrong: sizes beside a vector's length, a neighbour that is NaN."""
        ...

    @computed_once
    def agrees(self) -> bool:
        """True if the results of all examples are the reference's.

        Asked before the first use of kernels for a layer's sizes, whose examples have these sizes, and for a GPU.
        """
        return all(matches_reference(self, *arguments) for arguments in self.examples())


def matches_reference(kernel: Kernel, *arguments: Any, **settings: Any) -> bool:
    """Returns whether a kernel's results differ from the reference's by no more than rounding explains."""
    expected = kernel.reference(*arguments, **settings)  # before the call, which may write into its arguments
    results = kernel(*arguments, **settings)
    return all(
        bool((((result.double() - value).abs() <= error) | (result == value) | value.isnan()).all())
        for result, (value, error) in zip(results, expected, strict=True)
    )


def synthetic_rows(*, wide: bool) -> Callable[[int, int], Tensor]:
    """Returns a function of a number of rows and their size; its normal numbers lie between others, which are NaN."""
    generator, dtype = torch.Generator().manual_seed(0), torch.float64 if wide else torch.float32

    def rows(count: int, size: int) -> Tensor:
        values = torch.full((count, 2 * size + 3), torch.nan, dtype=dtype)[:, 2 : 2 + size]
        return values.copy_(torch.randn(count, size, generator=generator, dtype=dtype))

    return rows


def readable(values: Tensor) -> bool:
    """Returns whether compiled code can read rows in place: on the CPU, each row in one piece."""
    plain = type(values) is Tensor and values.is_cpu and values.dtype in (torch.float32, torch.float64)
    return plain and values.stride(-1) == 1
