"""Per-example gradients as a matrix [rows, dim], and the fixed parameter order behind its columns.

The reference way: `torch.func.vmap(grad)` over a functional call of the model. It knows every layer that
torch.func knows and materialises everything, so it is what faster engines are checked against. A row depends
on its own example only: layers that mix examples (BatchNorm) are refused in `layers.py`, before any row is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from .record_draws import current_keys, entries, one_pass

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [n, classes], targets) -> one loss per example [n]; a mean over a batch of one is the same."""


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the trained parameters, in the one order that every flat vector uses.

    Attributes:
        names: parameter names as in `model.named_parameters()`, trained ones only.
        shapes: their shapes, in the same order.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Reads the layout off a model; frozen parameters (`requires_grad=False`) are left out."""
        trained = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
        if not trained:
            raise ValueError("model must have at least one parameter that requires a gradient, got none")
        names, shapes = zip(*trained, strict=True)
        return cls(names, shapes)

    @classmethod
    def flat(cls, dim: int) -> Layout:
        """A layout of one nameless vector, for work on rows without a model."""
        return cls(("",), ((dim,),))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each parameter."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @cached_property
    def dim(self) -> int:
        """Length of a flat vector."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each parameter in a flat vector."""
        stops = tuple(accumulate(self.sizes))
        return tuple(zip((0, *stops[:-1]), stops, strict=True))

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each layer: the neighbouring parameters of one module, weight and bias."""
        spans: list[tuple[int, int]] = []
        owner: str | None = None
        for name, (start, stop) in zip(self.names, self.slices, strict=True):
            module = name.rpartition(".")[0]
            if spans and module == owner:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
            owner = module
        return tuple(spans)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, " dim"]:
        """One vector from named tensors."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unflatten(self, vector: Float[Tensor, " dim"]) -> dict[str, Tensor]:
        """Named views into a flat vector."""
        parts = torch.split(vector, list(self.sizes))
        return {n: p.view(s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}

    def read(self, model: nn.Module) -> Float[Tensor, " dim"]:
        """A copy of the model's trained parameters as one vector."""
        parameters = dict(model.named_parameters())
        return self.flatten({name: parameters[name].detach() for name in self.names})


def cross_entropy(outputs: Float[Tensor, "n classes"], targets: Tensor) -> Float[Tensor, " n"]:
    """Cross-entropy of each example, in nats; targets are class numbers [n] or probabilities [n, classes]."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def per_example_gradients(
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    inputs: Float[Tensor, "rows ..."] | Int[Tensor, "rows ..."],
    targets: Float[Tensor, "rows ..."] | Int[Tensor, " rows"],
    *,
    parameters: Float[Tensor, " dim"] | None = None,
) -> Float[Tensor, "rows dim"]:
    """Gradient of each example's loss in the trained parameters, flattened in layout order.

    Differentiable in `inputs` and in floating `targets`, so that attacks can search over them.

    Args:
        model: the network; its frozen parameters and buffers are used as they are.
        loss: per-example loss.
        layout: which parameters, in which order.
        inputs: examples, first dimension the batch.
        targets: class numbers, or class probabilities.
        parameters: the point at which to differentiate; the model's own parameters where None.

    Returns:
        One row per example, in the parameters' dtype.
    """
    outputs_at = function_of(model)
    # PyTorch's InstanceNorm has wrong derivatives for a channels-last batch of one (2.15, CPU), and here every
    # batch is one example.
    inputs = inputs.contiguous()
    point = layout.unflatten(layout.read(model) if parameters is None else parameters)
    keys = current_keys()

    if len(inputs) == 1:
        # Plain autograd is 1.5 times as fast as vmap over one example; attacks call this thousands of times.
        with torch.enable_grad(), one_pass():
            leaves = {name: p.detach().requires_grad_() for name, p in point.items()}
            value = loss(outputs_at(leaves, inputs), targets).sum()
            search = inputs.requires_grad or targets.requires_grad
            only = torch.autograd.grad(value, list(leaves.values()), create_graph=search, materialize_grads=True)
        return torch.cat([gradient.reshape(1, -1) for gradient in only], dim=1)

    def example_loss(at: dict[str, Tensor], one_input: Tensor, one_target: Tensor, key: Tensor | None) -> Tensor:
        with entries(None if key is None else key.unsqueeze(0)), one_pass():
            return loss(outputs_at(at, one_input.unsqueeze(0)), one_target.unsqueeze(0)).sum()

    over = (None, 0, 0, None if keys is None else 0)
    gradients = vmap(grad(example_loss), in_dims=over, randomness="different")(point, inputs, targets, keys)
    sizes = zip(layout.names, layout.sizes, strict=True)
    return torch.cat([gradients[name].reshape(len(inputs), size) for name, size in sizes], dim=1)


def outputs(
    model: nn.Module,
    layout: Layout,
    inputs: Float[Tensor, "rows ..."] | Int[Tensor, "rows ..."],
    *,
    parameters: Float[Tensor, " dim"],
) -> Tensor:
    """The model's outputs at another parameter point; differentiable in inputs and parameters.

    Args:
        model: its frozen parameters and buffers are used as they are.
        layout: which parameters, in which order.
        inputs: examples, first dimension the batch.
        parameters: the point.
    """
    return function_of(model)(layout.unflatten(parameters), inputs)


def function_of(model: nn.Module) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
    """The model as a function of (named parameters, inputs); parameters that are not named keep their values.

    Weights are tied here, because functional_call's own tying, for a module that is used under two names, leaves copies
    in the model where its parameters were: an optimizer would go on moving what the model no longer uses. Parameters
    are handed over in contiguous order, whatever the model's: see `per_example_gradients`.
    """
    own = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    names, buffers = {id(p): name for name, p in model.named_parameters()}, dict(model.named_buffers())
    places = {
        f"{prefix}.{key}" if prefix else key: names[id(p)]
        for prefix, module in model.named_modules()
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False)
    }

    def outputs_at(at: Mapping[str, Tensor], batch: Tensor) -> Tensor:
        values = own | dict(at)
        everything = buffers | {place: values[name] for place, name in places.items()}
        return functional_call(model, everything, (batch,), tie_weights=False)

    return outputs_at


def microbatches(size: int, limit: int | None) -> Iterator[slice]:
    """Cuts `size` examples into slices of at most `limit` (None: one slice); none for an empty batch."""
    step = max(size, 1) if limit is None else limit
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
