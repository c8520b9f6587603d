"""Per-example gradients by plain autograd on batches of one: slow, and right for every model that runs on one example.

It serves models with data-dependent control flow, which `vmap` refuses and which would branch for a whole batch, and
exact sums, in which a row must not depend on other examples even in its last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ...inputs import Inputs
from ...plan.defense import StepPlan
from ...randomness.record_draws import current_keys, entries
from ..reference import per_example_gradients, per_example_losses
from ..reference_sums import added_up, totals
from .interface import PerExample


class OneByOne(PerExample):
    """Calls the model with batches of one."""

    name: ClassVar[str] = "one_by_one"

    def each(self, inputs: Inputs, targets: Tensor, point: Float[Tensor, " dim"] | None) -> Float[Tensor, "rows dim"]:
        """Rows from a backward pass per example."""
        keys, rows = current_keys(), []
        for i in range(len(inputs)):
            with entries(None if keys is None else keys[i : i + 1]):
                x, y = _alone(inputs, i), _alone(targets, i)
                rows.append(per_example_gradients(self.model, self.loss, self.layout, x, y, parameters=point).detach())
        return torch.cat(rows)

    def losses(
        self, inputs: Inputs, targets: Tensor, *, point: Float[Tensor, " dim"] | None = None, views: int = 1
    ) -> Float[Tensor, "rows 1"]:
        """Losses from a forward pass per example."""
        keys, entry_losses = current_keys(), []
        for i in range(len(inputs)):
            with entries(None if keys is None else keys[i : i + 1]):
                x, y = _alone(inputs, i), _alone(targets, i)
                entry_losses.append(per_example_losses(self.model, self.loss, self.layout, x, y, parameters=point))
        return torch.cat(entry_losses).view(-1, views).mean(dim=1, keepdim=True)

    def sums(
        self, plan: StepPlan, inputs: Inputs, targets: Tensor, *, views: int = 1, counted: int | None = None
    ) -> tuple[Tensor, ...]:
        """Sums of the bounded contributions, with one example in memory at a time."""
        parts: list[tuple[Tensor, ...]] = []
        ways: tuple[Callable[..., Tensor], ...] = (self.rows, self.losses)
        for start in range(0, views * counted if counted else len(targets), views):
            span = slice(start, start + views)
            with torch.no_grad():
                computations = [partial(self._of, each, inputs[span], targets[span], views, span) for each in ways]
                parts.append(added_up(plan, *computations))
            if len(parts) == 2:  # folded at once: two sums in memory, however many examples
                parts = [totals(plan, parts, inputs.device)]
        return parts[0]

    def _of(
        self,
        answers: Callable[..., Tensor],
        inputs: Inputs,
        targets: Tensor,
        views: int,
        span: slice,
        point: Tensor | None,
    ) -> Float[Tensor, "1 _"]:
        """Returns the gradient, or the loss, of an example, whose views are at `span` in the batch."""
        keys = current_keys()
        with entries(None if keys is None else keys[span]):
            return answers(inputs, targets, point=point, views=views)

    def bytes_per_entry(self, activations: int, itemsize: int) -> int:
        """Returns 1, so that batches are never split: one example is in memory at a time anyway."""
        return 1


def _alone(values: Inputs, number: int) -> Any:
    """Copies an entry: vendors' sums depend on the position within a cache line at which a vector begins.

    In a view, that position is the entry's place in the batch, which would show in the last bits of a row, or in the
    whole row where rounding decides a ReLU.
    """
    return values[number : number + 1].clone()
