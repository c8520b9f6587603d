"""Gradients of many candidate examples from one backward pass, differentiable, for gradient inversion with restarts.

A parameter's gradient is a product of two factors, the input of its layer and the gradient at its output, so one pass
over all candidates yields the factors of each. `rows` multiplies them. Cosine similarity needs inner products and
norms only, which `inner` and `squared_norms` compute without multiplying: all restarts are compared with one update G,
and <gradient_i, G> = <output gradient_i, layer with weights G applied to input_i>, so no weight-sized tensor is held
per candidate. Norms are the ghost norms of Goodfellow, "Efficient Per-Example Gradient Computations", arXiv:1510.01799,
and Bu, Mao & Xu, "Scalable and Efficient Training of Large Convolutional Neural Networks with Differential Privacy",
NeurIPS 2022, or the products themselves, whichever is less work.

Supported layers are Linear on vectors, Conv2d without groups, and GroupNorm, each called once; `candidate_gradients_of`
decides whether a model consists of these, by comparing with the reference on synthetic data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ..plan.layout import Layout
from .reference import Loss, outputs, per_example_gradients

_AGREE = 1e-4
"""Tolerance of the comparison, relative to the reference's norms: float32 rounds to 1e-6, a wrong layer errs by 1."""


@dataclass(frozen=True, kw_only=True)
class LayerFactors:
    """The two factors of a layer's gradients.

    Attributes:
        layer: the layer.
        name: its prefix in parameter names.
        entering: its input [n, ...].
        leaving: gradient of the loss at its output [n, ...].
    """

    layer: nn.Module
    name: str
    entering: Tensor
    leaving: Tensor

    def products(self) -> dict[str, Float[Tensor, "n *shape"]]:
        """Returns the gradients of the layer's parameters, by full name."""
        layer, g = self.layer, self.leaving
        if isinstance(layer, nn.Conv2d):
            weight = (g.flatten(2) @ self._patches().transpose(1, 2)).view(len(g), *layer.weight.shape)
            bias = g.sum((2, 3))
        elif isinstance(layer, nn.Linear):
            weight, bias = g.unsqueeze(2) * self.entering.unsqueeze(1), g
        else:
            weight, bias = (self._normalised() * g).flatten(2).sum(2), g.flatten(2).sum(2)
        return {f"{self.name}weight": weight, f"{self.name}bias": bias}

    def inner(self, along: Mapping[str, Tensor]) -> Float[Tensor, " n"]:
        """Inner product of every gradient with a direction, given by name; 0 for a parameter without a direction."""
        layer, g = self.layer, self.leaving
        weight, bias = along.get(f"{self.name}weight"), along.get(f"{self.name}bias")
        weight = torch.zeros_like(layer.weight) if weight is None else weight  # pyright: ignore[reportArgumentType]
        if isinstance(layer, nn.Conv2d):
            conv: Any = layer  # its padding is never a string here
            through = F.conv2d(self.entering, weight, bias, conv.stride, conv.padding, conv.dilation)
        elif isinstance(layer, nn.Linear):
            through = F.linear(self.entering, weight, bias)
        else:
            each = (1, -1, *[1] * (g.ndim - 2))
            through = self._normalised() * weight.view(each)
            through = through if bias is None else through + bias.view(each)
        return (g * through).flatten(1).sum(1)

    def squared_norms(self, trained: frozenset[str], together: int) -> Float[Tensor, " groups"]:
        """Squared norm of the summed gradients of each `together` consecutive examples, over trained parameters."""
        g, groups = self.leaving, len(self.leaving) // together
        total = g.new_zeros(groups)
        if isinstance(self.layer, nn.Conv2d | nn.Linear):
            if isinstance(self.layer, nn.Conv2d):
                # The positions of all patches of a group form an axis, over which the gradients are summed.
                a, d = self._patches().transpose(1, 2), g.flatten(2).transpose(1, 2)
            else:
                a, d = self.entering.unsqueeze(1), g.unsqueeze(1)
            a, d = a.reshape(groups, -1, a.shape[2]), d.reshape(groups, -1, d.shape[2])
            if f"{self.name}weight" in trained:
                places, wide = a.shape[1], a.shape[2] + d.shape[2]
                if places * wide < a.shape[2] * d.shape[2]:
                    squares = (a @ a.transpose(1, 2)) * (d @ d.transpose(1, 2))
                else:
                    squares = (d.transpose(1, 2) @ a).square()
                total = total + squares.flatten(1).sum(1)
            if f"{self.name}bias" in trained:
                total = total + d.sum(1).square().sum(1)
            return total
        for name, rows in self.products().items():
            if name in trained:
                total = total + rows.view(groups, together, -1).sum(1).square().sum(1)
        return total

    def _patches(self) -> Float[Tensor, "n patch places"]:
        layer: Any = self.layer
        return F.unfold(self.entering, layer.kernel_size, layer.dilation, layer.padding, layer.stride)

    def _normalised(self) -> Tensor:
        layer: Any = self.layer
        return F.group_norm(self.entering, layer.num_groups, eps=layer.eps)


class CandidateGradients:
    """Per-example gradients of a model at a fixed parameter point, computed from factors."""

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, parameters: Float[Tensor, " dim"]) -> None:
        """Collects the layers with trained parameters.

        Args:
            model: the architecture, whose trained parameters are not read.
            loss: per-example loss.
            layout: order of the flat vectors.
            parameters: the point.

        Raises:
            ValueError: if a trained parameter belongs to no supported layer.
        """
        self._model, self._loss, self._layout, self._point = model, loss, layout, parameters
        self._layers = {f"{n}." if n else "": m for n, m in model.named_modules() if _is_known(m)}
        self._trained = frozenset(layout.names)
        known = {f"{prefix}{name}" for prefix, m in self._layers.items() for name, _ in m.named_parameters()}
        if not self._trained <= known:
            raise ValueError(
                f"every trained parameter must be of a known layer, got {sorted(self._trained - known)[0]}"
            )
        self._layers = {
            prefix: m for prefix, m in self._layers.items() if self._trained & {f"{prefix}weight", f"{prefix}bias"}
        }

    def factors(self, inputs: Tensor, labels: Tensor) -> list[LayerFactors]:
        """Returns the factors of all examples, with an autograd graph if an argument has a graph."""
        calls: list[tuple[str, Tensor, Tensor]] = []

        def note(prefix: str, _: nn.Module, entering: tuple[Tensor, ...], leaving: Tensor) -> None:
            calls.append((prefix, entering[0], leaving))

        hooks = [m.register_forward_hook(partial(note, prefix)) for prefix, m in self._layers.items()]
        search = inputs.requires_grad or labels.requires_grad
        try:
            with torch.enable_grad():
                # The input requires a gradient, so that the output of the first layer requires it too, even without a
                # search.
                inputs = inputs if inputs.requires_grad else inputs.detach().requires_grad_()
                logits = outputs(self._model, self._layout, inputs, parameters=self._point.detach())
        finally:
            for hook in hooks:
                hook.remove()
        if sorted(prefix for prefix, _, _ in calls) != sorted(self._layers):
            raise ValueError("every layer must be called once in a forward pass")
        with torch.enable_grad():
            value = self._loss(logits, labels).sum()
            leaving = torch.autograd.grad(
                value, [output for _, _, output in calls], create_graph=search, materialize_grads=True
            )
        return [
            LayerFactors(layer=self._layers[prefix], name=prefix, entering=entering, leaving=gradient)
            for (prefix, entering, _), gradient in zip(calls, leaving, strict=True)
        ]

    def rows(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, "n dim"]:
        """Per-example gradients, equal to the reference's."""
        gradients: dict[str, Tensor] = {}
        for layer in self.factors(inputs, labels):
            gradients |= layer.products()
        return torch.cat([gradients[name].reshape(len(inputs), -1) for name in self._layout.names], dim=1)

    def compared(
        self,
        inputs: Float[Tensor, "guesses b ..."],
        labels: Tensor,
        along: Mapping[str, Tensor],
        scale: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Float[Tensor, " guesses"], Float[Tensor, " guesses"]]:
        """Inner product with a direction and squared norm of each candidate's sum of bounded gradients.

        Args:
            inputs: a batch for each candidate.
            labels: labels of all candidates, concatenated [guesses * b, ...].
            along: the direction, by name of the parameter.
            scale: norms of gradients -> factors that bound them; None for no bound.
        """
        guesses, b = inputs.shape[:2]
        layers = self.factors(inputs.flatten(0, 1), labels)
        inner = torch.stack([layer.inner(along) for layer in layers]).sum(0)
        if scale is None:
            squares = torch.stack([layer.squared_norms(self._trained, b) for layer in layers]).sum(0)
            return inner.view(guesses, b).sum(1), squares
        own = torch.stack([layer.squared_norms(self._trained, 1) for layer in layers]).sum(0)
        # clamp: the square root has no derivative at 0.
        factor = scale(own.clamp(min=torch.finfo(own.dtype).tiny).sqrt())
        inner = (inner * factor).view(guesses, b).sum(1)
        if b == 1:
            return inner, own * factor.square()
        bounded = [
            LayerFactors(
                layer=layer.layer,
                name=layer.name,
                entering=layer.entering,
                leaving=layer.leaving * factor.view(-1, *[1] * (layer.leaving.ndim - 1)),
            )
            for layer in layers
        ]
        return inner, torch.stack([layer.squared_norms(self._trained, b) for layer in bounded]).sum(0)


def candidate_gradients_of(
    model: nn.Module, loss: Loss, layout: Layout, parameters: Float[Tensor, " dim"], input_shape: tuple[int, ...]
) -> CandidateGradients | None:
    """Returns the factored model if it agrees with the reference, else None.

    Args:
        model: the architecture.
        loss: per-example loss.
        layout: order of the flat vectors.
        parameters: the point.
        input_shape: shape of an example.
    """
    try:
        factored_model = CandidateGradients(model, loss, layout, parameters)
        return factored_model if _agrees(factored_model, model, loss, layout, parameters, input_shape) else None
    except torch.OutOfMemoryError:  # a RuntimeError too; the reference takes more memory still
        raise
    except (RuntimeError, ValueError):
        # A layer that is called twice, or on other shapes: the caller falls back to the reference.
        return None


def _agrees(
    factored_model: CandidateGradients,
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    parameters: Tensor,
    input_shape: tuple[int, ...],
) -> bool:
    """Returns whether rows, inner products and norms on two synthetic examples agree with the reference."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(2, *input_shape, generator=generator, dtype=torch.float64).to(parameters)
    labels = torch.zeros(2, dtype=torch.int64, device=parameters.device)
    reference = per_example_gradients(model, loss, layout, inputs, labels, parameters=parameters)
    # float64: the product of float32 rows of 11 million numbers loses digits to its order of summation.
    wide = reference.double()
    gram, first = wide @ wide.T, layout.unflatten(reference[0])
    size = gram.diagonal().max()
    inner, squares = (part.detach() for part in factored_model.compared(inputs.unsqueeze(1), labels, first, None))
    # The sum over a batch of two also contains the products between examples.
    both = factored_model.compared(inputs.unsqueeze(0), labels, first, torch.ones_like)[1].detach()
    apart = torch.stack([*(inner - gram[0]), *(squares - gram.diagonal()), (both - gram.sum())[0]])
    off = (factored_model.rows(inputs, labels).detach() - reference).norm(dim=1).max()
    return bool((apart.abs() <= _AGREE * size).all() and off <= _AGREE * size.sqrt())


def _is_known(module: nn.Module) -> bool:
    # Exact classes only: a subclass may compute another function.
    if type(module) is nn.Conv2d:
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) in (nn.Linear, nn.GroupNorm)
