"""Squared norms of per-example gradients by parameter, which an attacker with the model's parameters could compute."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from leakbench.defenses.core import Domain, Domains, Engine, Loss

_NUMBERS = 2**25  # gradient entries computed at a time, 256 MiB in float64


class GradientNorms:
    """Per-example gradient norms, in float64: float32 gradients of confident predictions are a few ulps above 0."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        """Stores the model; a copy in evaluation mode is made at the first query.

        Args:
            model: not changed.
            loss: per-example loss.
        """
        self._model, self._loss = model, loss
        self._engine: Engine | None = None

    def of(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns squared norms per trained parameter [n], float64.

        Args:
            inputs: the examples.
            labels: their labels.
        """
        engine = self._engine
        if engine is None:
            engine = self._engine = Engine(
                copy.deepcopy(self._model).double().eval(), loss=self._loss, domains=Domains(_range_of(inputs))
            )
        layout = engine.layout
        spans = dict(zip(layout.names, layout.slices, strict=True))
        at_once = max(1, _NUMBERS // layout.dim)
        squared_norms: dict[str, list[Tensor]] = {name: [inputs.new_zeros(0, dtype=torch.float64)] for name in spans}
        for batch_inputs, batch_labels in zip(inputs.double().split(at_once), labels.split(at_once), strict=True):
            batch = engine.batch(batch_inputs, batch_labels)
            for name, span in spans.items():
                factors = batch.outer(*span)
                # |s xᵀ|² = |s|² |x|², so no row is formed.
                squared_norms[name].append(
                    batch.columns(*span).square().sum(1)
                    if factors is None
                    else factors[0].square().sum(1) * factors[1].square().sum(1)
                )
        return {name: torch.cat(parts) for name, parts in squared_norms.items()}


def _range_of(inputs: Tensor) -> Domain | None:
    """Returns the range of the inputs, computed from the inputs themselves, because no guarantee rests on it here."""
    if not len(inputs):
        return None
    rows = inputs.detach().double().cpu()
    return Domain(low=rows.amin(0), high=rows.amax(0), whole=(rows == rows.round()).all(0))
