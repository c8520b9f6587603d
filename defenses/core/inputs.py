"""Inputs of a batch: a tensor, or several tensors that are the arguments of the model's call.

A model of texts gets token numbers and a mask. `InputTensors` has the operations on a batch that the engines use, under
their names in `Tensor`, so engines treat both alike. The functions here are the exceptions: a call of the model,
concatenation, a look at each tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_args, is_typeddict

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # private, as it is the form in which `torch.func.vmap` takes several tensors


@dataclass(frozen=True, eq=False)
class InputTensors:
    """Several input tensors of a batch, whose first dimension is the batch.

    Attributes:
        tensors: the tensors [n, ...].
        names: keywords of the model's arguments, in alphabetical order; None for arguments by position.
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Tensor] | Sequence[Tensor]) -> InputTensors:
        """Returns the inputs of a call `model(**arguments)` or `model(*arguments)`.

        In alphabetical order, so that the order of a dictionary changes no key of a record.

        Args:
            arguments: tensors [n, ...] by keyword or by position.
        """
        if isinstance(arguments, Mapping):
            names = tuple(sorted(arguments))
            return cls(tuple(arguments[name] for name in names), names)
        return cls(tuple(arguments))

    def map(self, change: Callable[[Tensor], Tensor]) -> InputTensors:
        """Returns the inputs with `change` applied to each tensor."""
        return InputTensors(tuple([change(values) for values in self.tensors]), self.names)

    def passed_to(self, model: Callable[..., Any]) -> Any:
        """Returns the model's outputs."""
        if self.names is None:
            return model(*self.tensors)
        return model(**dict(zip(self.names, self.tensors, strict=True)))

    def parameters_of(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the names that the model's signature gives these arguments.

        Args:
            model: its `forward` is inspected, not called.

        Raises:
            ValueError: if the model has no such arguments.
        """
        signature = inspect.signature(model.forward)
        try:
            if self.names is not None:
                signature.bind(**dict.fromkeys(self.names))
                _refuse_undeclared(signature, self.names)
                return self.names
            bound = signature.bind(*self.tensors).arguments
        except TypeError as error:
            arguments = ", ".join(self.names or (f"{len(self.tensors)} by position",))
            raise ValueError(
                f"inputs must be the arguments of {type(model).__name__}.forward, got {arguments}: {error}"
            ) from None
        names = [name for name, value in bound.items() if isinstance(value, Tensor)]
        further = range(len(names), len(self.tensors))  # of a signature `*inputs`
        return (*names, *map(str, further))

    @property
    def places(self) -> tuple[str, ...]:
        """Names of the tensors in messages: keywords, or numbers of the arguments."""
        return self.names or tuple(f"input {number}" for number in range(len(self.tensors)))

    @property
    def form(self) -> tuple[object, ...]:
        """Names, shapes and dtypes of an example's tensors."""
        return (self.names, *[(values.shape[1:], values.dtype) for values in self.tensors])

    @property
    def device(self) -> torch.device:
        """The tensors' device; that of the first tensor on another device than the first."""
        first = self.tensors[0].device
        return next((values.device for values in self.tensors if values.device != first), first)

    @property
    def is_cpu(self) -> bool:
        """True if all tensors are on the CPU."""
        return all(values.is_cpu for values in self.tensors)

    @property
    def is_cuda(self) -> bool:
        """True if all tensors are on a CUDA device."""
        return all(values.is_cuda for values in self.tensors)

    @property
    def requires_grad(self) -> bool:
        """True if a tensor requires a gradient."""
        return any(values.requires_grad for values in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> InputTensors:
        return self.map(lambda values: values[index])

    def numel(self) -> int:
        """Returns the number of entries of all tensors."""
        return sum(values.numel() for values in self.tensors)

    def detach(self) -> InputTensors:
        """Returns the tensors without their graph."""
        return self.map(Tensor.detach)

    def to(self, *target: Any) -> InputTensors:
        """Returns the tensors on a device."""
        return self.map(lambda values: values.to(*target))

    def contiguous(self) -> InputTensors:
        """Returns the tensors in contiguous order."""
        return self.map(Tensor.contiguous)

    def clone(self, **order: Any) -> InputTensors:
        """Returns copies."""
        return self.map(partial(torch.clone, **order))

    def unsqueeze(self, dim: int) -> InputTensors:
        """Returns an example as a batch of one, for `dim` 0."""
        return self.map(lambda values: values.unsqueeze(dim))

    def repeat_interleave(self, repeats: int, dim: int) -> InputTensors:
        """Returns adjacent copies of each example."""
        return self.map(lambda values: values.repeat_interleave(repeats, dim=dim))

    def split(self, size: int) -> list[InputTensors]:
        """Returns the batch in parts of at most `size` examples."""
        return [InputTensors(part, self.names) for part in zip(*[v.split(size) for v in self.tensors], strict=True)]


Inputs = Tensor | InputTensors
"""Inputs of a batch: a tensor [n, ...], or several."""

SameInputs = TypeVar("SameInputs", bound=Inputs)


# PyTorch also puts numbers of dimensions in the places of tensors, so their types are not checked here.
def _flattened(inputs: InputTensors) -> tuple[list[Any], tuple[str, ...] | None]:
    return list(inputs.tensors), inputs.names


def _unflattened(entries: Iterable[Any], names: tuple[str, ...] | None) -> InputTensors:
    inputs = object.__new__(InputTensors)
    vars(inputs).update(tensors=tuple(entries), names=names)
    return inputs


pytree.register_pytree_node(InputTensors, _flattened, _unflattened)


def called(model: Callable[..., Any], inputs: Inputs) -> Any:
    """Returns the model's outputs: `model(inputs)`, or a call with several arguments."""
    return model(inputs) if isinstance(inputs, Tensor) else inputs.passed_to(model)


def tensors_in(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns the tensors of a batch's inputs."""
    return (inputs,) if isinstance(inputs, Tensor) else inputs.tensors


def rebuilt(like: Inputs, tensors: Sequence[Tensor]) -> Inputs:
    """Returns other tensors as inputs of the same kind."""
    return tensors[0] if isinstance(like, Tensor) else InputTensors(tuple(tensors), like.names)


def changed(inputs: SameInputs, change: Callable[[Tensor], Tensor]) -> SameInputs:
    """Returns the inputs with `change` applied to each tensor."""
    values: Any = change(inputs) if isinstance(inputs, Tensor) else inputs.map(change)
    return values


def joined(batches: Sequence[Inputs]) -> Inputs:
    """Concatenates batches of the same form."""
    return rebuilt(batches[0], [torch.cat(parts) for parts in zip(*map(tensors_in, batches), strict=True)])


def form_of(inputs: Inputs) -> tuple[object, ...]:
    """Returns what the checks of a model depend on: shapes and dtypes of an example."""
    return (inputs.shape[1:], inputs.dtype) if isinstance(inputs, Tensor) else inputs.form


def _refuse_undeclared(signature: inspect.Signature, names: Sequence[str]) -> None:
    """Raises `TypeError` for a keyword that is neither a parameter nor declared by `**kwargs: Unpack[TypedDict]`."""
    known = {*signature.parameters}
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords = get_args(parameter.annotation)
            if not (keywords and is_typeddict(keywords[0])):
                return
            known |= {*keywords[0].__annotations__}
    if unknown := [name for name in names if name not in known]:
        raise TypeError(f"got an unexpected keyword argument '{unknown[0]}'")
