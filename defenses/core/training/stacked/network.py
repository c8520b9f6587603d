"""Layers of models of the same architecture, with a leading model axis, and the clipped sums of their batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ...gradients.reference import Loss
from ...plan.bound import Bound
from ...plan.layout import Layout
from .chain import chain, gains, has_parameters, settings_of
from .layers import KINDS, Activations, StackedLayer
from .stack_error import StackError
from .terms import Place, Term, norms_of

CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
"""Memory limit for stored and formed per-example tensors, by device; patches of images take most of it."""


_TRIED = 5  # synthetic examples on which a loss is tried


class StackedNetwork:
    """Models as a single network.

    Attributes:
        layout: layout of each model's parameters.
        parameters: [models, dim].
    """

    def __init__(
        self, models: Sequence[nn.Module], loss: Loss, device: torch.device, *, requested: bool = False
    ) -> None:
        """Takes the models' architecture and copies of their parameters.

        Args:
            models: models of the same architecture.
            loss: per-example loss.
            device: device of models and data.
            requested: whether a stack was requested even if it is slower.

        Raises:
            StackError: for an unsupported model.
        """
        chains = [chain(model) for model in models]
        layers, self.loss = chains[0], loss
        self.layout = Layout.of(models[0])
        first = settings_of(layers)
        if any(Layout.of(m) != self.layout for m in models) or any(
            settings_of(own_chain) != first for own_chain in chains
        ):
            raise StackError("models of a stack must have one architecture")
        if not (requested or gains(layers, device)):
            raise StackError(f"convolutions are not stacked where that is slower, as on the device {device.type}")
        self.parameters = torch.stack([self.layout.read(model) for model in models])
        spans = dict(zip(self.layout.names, zip(self.layout.slices, self.layout.shapes, strict=True), strict=True))
        names = {part: name for name, part in models[0].named_modules()}
        self._layers: list[nn.Module | StackedLayer] = []
        known: set[str] = set()
        for layer in layers:
            if not has_parameters(layer):
                self._layers.append(layer)
                continue
            own = [f"{names[layer]}.{slot}" for slot in ("weight", "bias")]
            weight, bias = (Place(*spans[name]) if name in spans else None for name in own)
            self._layers.append(KINDS[type(layer)](layer, weight, bias))
            known.update(own)
        if unknown := set(self.layout.names) - known:
            raise StackError(f"a stack must be of parameters of known layers, got '{min(unknown)}'")
        self._numbers: int | None = None
        self._separate = False

    def clipped_sums(
        self,
        at: Float[Tensor, "models dim"],
        pool: tuple[Tensor, Tensor],
        rows: Int[Tensor, "models rows"],
        in_batch: Bool[Tensor, "models rows"],
        bound: Bound,
        kept: Float[Tensor, "models dim"] | None,
    ) -> Float[Tensor, "models dim"]:
        """Returns the sum of bounded gradients of each model's batch, in the coordinates of its mask.

        Args:
            at: parameters of each model.
            pool: inputs and labels that batches are drawn from.
            rows: pool rows of each batch, padded to the same size.
            in_batch: mask of the rows that are in the batch.
            bound: bound on an example's gradient.
            kept: masks; None: all coordinates.
        """
        sums = torch.zeros_like(at)
        for models, places in self._chunks(at, pool, rows):
            chosen, mask = rows[models, places], None if kept is None else kept[models]
            terms = self._terms(at[models], pool[0][chosen], pool[1][chosen])
            terms, norms = norms_of(terms, mask, at.dtype, bound)
            # A row that is not finite counts as zero, by itself, and so does a padding row.
            finite = norms.isfinite()
            scale = bound.scale(norms.masked_fill(~finite, 0.0).flatten(), at.dtype).view_as(norms)
            factors = scale * (in_batch[models, places] & finite)
            for term in terms:
                term.add(factors, sums[models])
        return sums if kept is None else sums.mul_(kept)

    def _terms(self, at: Tensor, inputs: Activations, labels: Int[Tensor, "models rows"]) -> list[Term]:
        """Returns per-example gradients of all parameters, from a single forward and backward pass."""
        passing, layers, factors, outputs = inputs, [], [], []
        with torch.enable_grad():
            for layer in self._layers:
                if isinstance(layer, nn.Module):
                    passing = layer(passing.flatten(0, 1)).unflatten(0, inputs.shape[:2])
                    continue
                out, needed = layer.forward(passing, at)
                # The first output is a leaf, so that nothing is differentiated by the inputs.
                passing = out if outputs else out.requires_grad_()
                layers.append(layer)
                factors.append(needed)
                outputs.append(passing)
            logits, targets = passing.flatten(0, 1), labels.flatten()
            self._refuse_mixing(logits, targets)
            value = self.loss(logits, targets).sum()
        signals = torch.autograd.grad(value, outputs)
        by_layer = (layer.terms(*each) for layer, *each in zip(layers, factors, signals, strict=True))
        return [term for terms in by_layer for term in terms]

    def _refuse_mixing(self, like: Tensor, labels: Tensor) -> None:
        """Refuses a loss that mixes the examples of a batch in their gradients; tried once, on synthetic outputs.

        Args:
            like: gives shape, dtype and device of the synthetic outputs.
            labels: labels of a batch, some of which are used.

        Raises:
            StackError: if the gradient of an example depends on others in the batch.
        """
        if self._separate:
            return
        generator = torch.Generator().manual_seed(0)
        outputs = torch.randn(_TRIED, *like.shape[1:], generator=generator).to(like).requires_grad_()
        tried_labels = labels[torch.arange(_TRIED, device=labels.device) % len(labels)]
        together = self.loss(outputs, tried_labels).sum()
        alone = torch.stack([self.loss(outputs[i : i + 1], tried_labels[i : i + 1]).sum() for i in range(_TRIED)]).sum()
        gradients = [torch.autograd.grad(value, outputs)[0] for value in (together, alone)]
        if not torch.allclose(*gradients, rtol=1e-4, atol=1e-6):
            raise StackError("a stack must have a loss of each example by itself, got one that mixes them")
        self._separate = True

    def _chunks(
        self, at: Tensor, pool: tuple[Tensor, Tensor], rows: Int[Tensor, "models rows"]
    ) -> list[tuple[slice, slice]]:
        """Returns chunks that fit the memory: all rows of several models, or else some rows of a single model."""
        if self._numbers is None:
            # For an arbitrary example: only sizes matter.
            first = rows[:1, :1]
            try:
                terms = self._terms(at[:1], pool[0][first], pool[1][first])
            except ValueError as error:  # PyTorch refuses a group norm of single numbers for a single example
                raise StackError(f"a stack must take an example by itself: {error}") from error
            self._numbers = sum(term.numbers for term in terms)
        models, count = rows.shape
        limit = CHUNK_BYTES.get(at.device.type, CHUNK_BYTES["cuda"])
        together = max(1, limit // (self._numbers * at.element_size()))
        by_model, by_row = max(1, together // count), min(count, together)
        return [
            (slice(first, first + by_model), slice(start, start + by_row))
            for first in range(0, models, by_model)
            for start in range(0, count, by_row)
        ]
