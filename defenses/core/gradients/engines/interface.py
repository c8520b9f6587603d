"""Interface of per-example gradient engines: rows, and clipped sums under a plan.

An engine that computes rows alone inherits the reference's sums. A faster engine computes the sums without rows, and
must agree with the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...inputs import Inputs
from ...plan.defense import StepPlan
from ...plan.layout import Layout
from ...plan.public_data import GradientBatch, Rows
from ..reference import Loss, per_example_losses
from ..reference_sums import added_up, contributions

_NUMBERS = 2**26
"""Entries per chunk of rows, 256 MiB in float32, in `matched`."""


class Unsupported(ValueError):
    """A model or a loss that an engine does not support; the message names the layer."""


class PerExample:
    """An engine for the per-example gradients of a model.

    Attributes:
        name: identifier in settings and records.
        model: the network; its parameters are read anew at every call, never changed.
        loss: per-example loss.
        layout: the trained parameters and their order.
        captures: True if passes may be captured as CUDA graphs: in training, not in checks.
        reduces: True if forward and backward passes run in the precision that `full_precision` is given.
    """

    name: ClassVar[str]
    reduces: ClassVar[bool] = False

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout) -> None:
        """Takes a model.

        Raises:
            Unsupported: if it has a layer that this engine does not support.
        """
        self.model, self.loss, self.layout = model, loss, layout
        self.captures = False

    def each(self, inputs: Inputs, targets: Tensor, point: Float[Tensor, " dim"] | None) -> Float[Tensor, "rows dim"]:
        """Gradients of each input's loss, a row each, in the parameters' dtype, detached.

        Args:
            inputs: first dimension the batch, not empty.
            targets: class numbers, or class probabilities.
            point: where to differentiate; the model's own parameters if None.
        """
        raise NotImplementedError(f"{type(self).__name__} must define each(inputs, targets, point)")

    def rows(
        self, inputs: Inputs, targets: Tensor, *, point: Float[Tensor, " dim"] | None = None, views: int = 1
    ) -> Float[Tensor, "rows dim"]:
        """Rows of the examples: the gradient, or the mean gradient of the augmented views, of each.

        Args:
            inputs: `views` adjacent entries for each example.
            targets: as many.
            point: where to differentiate; the model's own parameters if None.
            views: augmentations of each example, averaged before anything is bounded (De et al. 2022).
        """
        rows = self.each(inputs, targets, point)
        return rows if views == 1 else rows.view(-1, views, self.layout.dim).mean(dim=1)

    def batch(self, inputs: Inputs, targets: Tensor) -> GradientBatch:
        """Returns the rows of these examples, or their factors if the engine has them."""
        return Rows(self.rows(inputs, targets))

    def losses(
        self, inputs: Inputs, targets: Tensor, *, point: Float[Tensor, " dim"] | None = None, views: int = 1
    ) -> Float[Tensor, "rows 1"]:
        """Losses of the examples: the loss, or the mean loss of the augmented views, of each; arguments as for `rows`.

        Every example passes the model alone, as in the reference, whichever engine computes the gradients.
        """
        entry_losses = per_example_losses(self.model, self.loss, self.layout, inputs, targets, parameters=point)
        return entry_losses.view(-1, views).mean(dim=1, keepdim=True)

    def sums(
        self, plan: StepPlan, inputs: Inputs, targets: Tensor, *, views: int = 1, counted: int | None = None
    ) -> tuple[Tensor, ...]:
        """Sums of the bounded contributions of a micro-batch to each block: private.

        Args:
            plan: the step's plan.
            inputs: `views` adjacent entries for each example, not empty.
            targets: as many.
            views: augmentations of each example.
            counted: number of examples that count; the others are padding behind them. None for all.
        """
        if counted is not None:
            inputs, targets = inputs[: counted * views], targets[: counted * views]
        with torch.no_grad():
            return added_up(
                plan,
                lambda point: self.rows(inputs, targets, point=point, views=views),
                lambda point: self.losses(inputs, targets, point=point, views=views),
            )

    def matched(
        self, plan: StepPlan, directions: Sequence[Tensor], inputs: Inputs, targets: Tensor, *, views: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """Inner products of bounded contributions with a direction, and squared norms, per block: private.

        Both are [rows] in float64. This default forms rows, a few examples at a time.

        Args:
            plan: the step's plan.
            directions: a vector in the released space of each block, in the dtype of the parameters.
            inputs: `views` adjacent entries for each example, not empty.
            targets: as many.
            views: augmentations of each example.
        """
        at_once, by_chunk = views * max(1, _NUMBERS // (views * self.layout.dim)), []
        for x, y in zip(inputs.split(at_once), targets.split(at_once), strict=True):
            with torch.no_grad():
                parts = contributions(
                    plan,
                    partial(self._rows_at, x, y, views),
                    lambda point, x=x, y=y: self.losses(x, y, point=point, views=views),
                )
            wide = [part.double() for part in parts]
            by_chunk.append(
                [(rows @ d.double(), rows.square().sum(dim=1)) for rows, d in zip(wide, directions, strict=True)]
            )
        by_block = zip(*by_chunk, strict=True)
        return [(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])) for parts in by_block]

    def _rows_at(self, inputs: Inputs, targets: Tensor, views: int, point: Tensor | None) -> Tensor:
        return self.rows(inputs, targets, point=point, views=views)

    @property
    def remark(self) -> str:
        """Returns what the record says of the engine besides its name."""
        return ""

    def release_memory(self) -> None:
        """Frees memory that is kept from batch to batch; called when no batch follows for now."""

    def bytes_per_entry(self, activations: int, itemsize: int) -> int:
        """Estimates the memory of a further entry of the inputs.

        Args:
            activations: numbers that a forward pass produces for it.
            itemsize: bytes of a number.

        Returns:
            Bytes: three times its row (formed, bounded, added up) and three times its activations (outputs, tensors
            saved by autograd, derivatives).
        """
        return (3 * self.layout.dim + 3 * activations) * itemsize
