"""Synthetic examples to try a model on before any data: of the data's shape, and with values that the model accepts.

The values depend on public knowledge only. A declared domain is sampled. Otherwise several kinds are tried: integers
below the size of the smallest embedding table, standard normal values, values in [0, 1], zeros and ones. A tensor that
the model's signature calls a mask gets ones, followed by zeros in half of the examples. The data are never read,
because anything derived from them would be a release without noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from ...inputs import Inputs, changed
from ..reference import fits_tokens

Values = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""(shape, generator) -> synthetic values of that shape, float64 on the CPU."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Domain:
    """Range of the values of inputs or targets, known publicly without the data.

    Attributes:
        low: the minimum; a number, or a tensor of an example's shape if entries differ, such as columns of a table.
        high: the maximum, likewise.
        whole: True for integers, likewise.
    """

    low: float | Tensor
    high: float | Tensor
    whole: bool | Tensor = False

    def __post_init__(self) -> None:
        low, high, whole = (torch.as_tensor(x, dtype=torch.float64) for x in (self.low, self.high, self.whole))
        if not (low.isfinite().all() and high.isfinite().all() and (low <= high).all()):
            raise ValueError(f"low and high of a domain must be finite, and low at most high, got {low} and {high}")
        if (whole.bool() & ((low != low.round()) | (high != high.round()))).any():
            raise ValueError(f"low and high of a domain of whole numbers must be whole, got {low} and {high}")

    def as_lists(self) -> list[Any]:
        """Returns the content, for a digest."""
        return [torch.as_tensor(value).tolist() for value in (self.low, self.high, self.whole)]

    def values(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Returns uniform values, float64.

        Args:
            shape: shape of a batch.
            generator: source of the values.

        Raises:
            ValueError: if tensors of the domain do not have the shape of an example.
        """
        low, high, whole = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (self.low, self.high, self.whole))
        for bound in (low, high, whole):
            if bound.dim() and bound.shape != shape[1:]:
                raise ValueError(
                    "tensors of a domain must have the shape of one example, "
                    f"{list(shape[1:])}, got {list(bound.shape)}"
                )
        share = torch.rand(shape, generator=generator, dtype=torch.float64)
        numbers = (low + share * (high - low + 1)).floor().clamp(max=high)
        return torch.where(whole.bool(), numbers, low + share * (high - low))


InputDomain = Domain | Mapping[str, Domain]
"""Domain of an input tensor, or of several by the names of the model's arguments."""


class Domains(NamedTuple):
    """Declared domains of the data; None if undeclared.

    Attributes:
        inputs: domain of an example's input, or of several inputs by name.
        targets: domain of an example's target.
    """

    inputs: InputDomain | None = None
    targets: Domain | None = None

    def as_lists(self) -> list[Any]:
        """Returns the content, for a digest."""
        inputs = self.inputs
        if isinstance(inputs, Mapping):
            return [
                {name: inputs[name].as_lists() for name in sorted(inputs)},
                self.targets and self.targets.as_lists(),
            ]
        return [domain and domain.as_lists() for domain in (inputs, self.targets)]


NOT_DECLARED = Domains()


@dataclass(frozen=True)
class SyntheticBatch:
    """A batch of synthetic examples.

    Attributes:
        inputs: synthetic inputs of the data's shape and dtype.
        targets: their targets.
        keys: record keys of the entries, which seed dropout.
        other: a further, different input [1, *shape], so that results on it differ; its target is the last of
            `targets`.
    """

    inputs: Inputs
    targets: Tensor
    keys: Int64[Tensor, " entries"]
    neighbour: Inputs

    def others(self, count: int) -> SyntheticBatch:
        """Returns a batch of copies of the further example."""

        def copies(values: Tensor) -> Tensor:
            return values.expand(count, *values.shape[1:])

        x, y = changed(self.neighbour, copies), copies(self.targets[-1:])
        return SyntheticBatch(x, y, self.keys[:count], self.neighbour)

    def chosen(self, rows: Tensor) -> SyntheticBatch:
        """Returns the selected examples."""
        return SyntheticBatch(self.inputs[rows], self.targets[rows], self.keys[rows], self.neighbour)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns standard normal values, float64; the last quarter of a batch is scaled, from a tenth to ten times."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if scaled := shape[0] // 4:
        scales = torch.logspace(-1, 1, scaled, dtype=torch.float64)
        x[-scaled:] *= scales.reshape(-1, *[1] * (x.dim() - 1))
    return x


def inputs_of(values: Values, shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns inputs (half distinct, a quarter copies of the first, the rest distinct) and a further input."""
    x, neighbour = values(shape, generator), values((1, *shape[1:]), generator)
    half = shape[0] - shape[0] // 2
    x[half : half + shape[0] // 4] = x[0]
    return x, neighbour


@dataclass(frozen=True)
class InputSpec:
    """Public facts about an input tensor.

    Attributes:
        like: only its shape and dtype are read.
        domain: declared domain; None if undeclared.
        masks: True for a mask: the model's signature calls it so, and no other domain than 0 and 1 is declared.
    """

    like: Tensor
    domain: Domain | None = None
    masks: bool = False

    def kinds(self, model: nn.Module) -> list[Values]:
        """Returns the kinds of its values, in the order in which the model is tried on them."""
        kinds = [] if self.masks and self.domain is not None else [*inputs_for(model, self.like, self.domain)]
        return [mask, *kinds] if self.masks else kinds

    def padded(self, values: Tensor, padding: float, word: float, rows: Sequence[slice]) -> Tensor:
        """Returns values whose second half is padding in some rows, and nowhere else.

        Args:
            values: synthetic values of this tensor.
            padding: value that may stand for padding; a mask has 0 there.
            word: value in its place elsewhere; a mask has 1.
            rows: the padded examples.
        """
        if values.dim() < 2:
            return values
        padding, word = (0.0, 1.0) if self.masks else (padding, word)
        values = values.masked_fill(values == padding, word)
        half = values.shape[-1 if self.masks else 1] // 2
        for chosen in rows:
            (values[chosen, ..., half:] if self.masks else values[chosen, half:]).fill_(padding)
        return values


def input_specs(model: nn.Module, inputs: Inputs, domain: InputDomain | None) -> list[InputSpec]:
    """Returns the public facts about each input tensor.

    Args:
        model: its signature names several inputs.
        inputs: only shapes and dtypes are read.
        domain: declared domains.

    Raises:
        ValueError: for domains that are not those of the inputs.
    """
    if isinstance(inputs, Tensor):
        if isinstance(domain, Mapping):
            raise ValueError(
                f"input_domain must be a Domain for one input tensor, got one by name: {', '.join(domain)}"
            )
        return [InputSpec(inputs, domain)]
    names = inputs.parameters_of(model)
    if isinstance(domain, Domain) or (domain is not None and not set(domain) <= set(names)):
        unknown = "a single Domain" if isinstance(domain, Domain) else f"'{sorted(set(domain) - set(names))[0]}'"
        raise ValueError(f"input_domain must have a Domain by name, of {', '.join(names)}, got {unknown}")
    specs = []
    for name, like in zip(names, inputs.tensors, strict=True):
        declared = None if domain is None else domain.get(name)
        masks = "mask" in name and (declared is None or declared.as_lists()[:2] == [0, 1])
        specs.append(InputSpec(like, declared, masks))
    return specs


def mask(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns ones, which in half of the examples end at a random position and are followed by zeros."""
    size, length = shape[0], shape[-1] if len(shape) > 1 else 1
    ends = torch.randint(1, length + 1, (size,), generator=generator)
    ends[::2] = length
    ones = torch.arange(length) < ends.view(-1, *[1] * (len(shape) - 1))
    return ones.double().expand(shape) if len(shape) > 1 else torch.ones(shape, dtype=torch.float64)


def kinds_of_inputs(model: nn.Module, specs: Sequence[InputSpec]) -> Iterator[tuple[Values, ...]]:
    """Yields a kind of values for each input tensor; several tensors go through their kinds together."""
    kinds = [spec.kinds(model) for spec in specs]
    for number in range(max(map(len, kinds))):
        yield tuple(own[min(number, len(own) - 1)] for own in kinds)


def inputs_for(model: nn.Module, like: Tensor, domain: Domain | None) -> Iterator[Values]:
    """Kinds of values of a synthetic input, in the order in which a model is tried on them.

    Args:
        model: its embedding tables are read.
        like: only its dtype is read, no values.
        domain: declared domain of the inputs, which is then the only kind; None if undeclared.
    """
    if domain is not None:
        yield domain.values
        return
    # The smallest table, because the table that an input indexes is unknown.
    smallest = min((layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding)), default=0)
    if smallest:  # first: on a GPU an index outside the table makes the device unusable for the process
        yield Domain(low=0, high=smallest - 1, whole=True).values
    if like.is_floating_point():
        yield normal
        yield Domain(low=0.0, high=1.0).values
    yield Domain(low=0, high=1, whole=True).values


def classes_of(outputs: Any, targets: torch.Size) -> Iterator[int]:
    """Yields numbers of classes that the outputs may have, the likeliest first.

    Args:
        outputs: a model's outputs.
        targets: shape of the targets.
    """
    shapes = [tensor.shape for tensor in tensors_of(outputs) if tensor.dim() > 1]
    # By token the last first: on a CUDA device a number that is no class makes the device unusable for the process.
    last = [shape[-1] for shape in shapes if fits_tokens(shape, targets) and shape[-1] != shape[1]]
    guesses = [*last, *[size for shape in shapes for size in (shape[1], shape[-1])]] or [2]
    # A single output that is a logit stands for two classes.
    yield from dict.fromkeys([2 if guess == 1 else guess for guess in guesses if guess] + [2, 1])


def tensors_of(outputs: Any) -> Iterator[Tensor]:
    """Yields the tensors in a model's output: a tensor, or a mapping, sequence or object of tensors."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from tensors_of(value)
    elif isinstance(outputs, tuple | list):
        for value in outputs:
            yield from tensors_of(value)
    elif isinstance(outputs, type):
        return
    elif dataclasses.is_dataclass(outputs):  # also with slots, without a `__dict__`
        for field in dataclasses.fields(outputs):
            yield from tensors_of(getattr(outputs, field.name, None))
    elif hasattr(outputs, "__dict__"):
        for value in vars(outputs).values():
            yield from tensors_of(value)


def mapped(
    outputs: Any, change: Callable[[Tensor], Tensor], *, scalars: bool = False, keep_unknown: bool = False
) -> Any:
    """Returns outputs of the same form with `change` applied to every tensor, such as the selection of an example.

    Args:
        outputs: a model's outputs.
        change: function of a tensor.
        scalars: True to change tensors without dimensions too.
        keep_unknown: True to return unchanged what cannot be rebuilt, as the cache of a language model.

    Raises:
        TypeError: for a form that cannot be rebuilt.
    """
    if isinstance(outputs, Tensor):
        return change(outputs) if scalars or outputs.dim() else outputs
    inner = partial(mapped, change=change, scalars=scalars, keep_unknown=keep_unknown)
    if isinstance(outputs, Mapping):
        form: Any = type(outputs)
        return form({key: inner(value) for key, value in outputs.items()})
    if isinstance(outputs, tuple) and hasattr(outputs, "_make"):
        named: Any = outputs
        return named._make(inner(value) for value in outputs)
    if isinstance(outputs, tuple | list):
        return type(outputs)(inner(value) for value in outputs)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        fields = [field.name for field in dataclasses.fields(outputs) if field.init]
        return dataclasses.replace(outputs, **{name: inner(getattr(outputs, name)) for name in fields})
    if keep_unknown or next(tensors_of(outputs), None) is None:
        return outputs
    raise TypeError(
        f"outputs must be tensors, or mappings, sequences or dataclasses of them, got {type(outputs).__name__}"
    )
