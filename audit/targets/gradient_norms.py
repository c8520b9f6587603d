"""Squared norms of per-example gradients by parameter, which an attacker with the model's parameters could compute."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from leakbench.defenses.core import Domain, Domains, Engine, Loss

_NUMBERS = 2**25  # of gradients at a time, 256 MiB in float64


class GradientNorms:
    """Gradients of one model's loss, in float64: where a model is sure, those in float32 are a few steps above 0."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        """Keeps a copy, in evaluation mode, of which nothing is computed before it is asked.

        Args:
            model: not changed.
            loss: per-example.
        """
        self._model, self._loss = model, loss
        self._engine: Engine | None = None

    def of(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Squared norms by trained parameter [n], float64.

        Args:
            inputs: the examples.
            labels: of the examples.
        """
        engine = self._engine
        if engine is None:
            engine = self._engine = Engine(
                copy.deepcopy(self._model).double().eval(), loss=self._loss, domains=Domains(_range_of(inputs))
            )
        layout = engine.layout
        spans = dict(zip(layout.names, layout.slices, strict=True))
        at_once = max(1, _NUMBERS // layout.dim)
        found: dict[str, list[Tensor]] = {name: [inputs.new_zeros(0, dtype=torch.float64)] for name in spans}
        for some, own in zip(inputs.double().split(at_once), labels.split(at_once), strict=True):
            batch = engine.batch(some, own)
            for name, span in spans.items():
                factors = batch.outer(*span)
                # Of s xᵀ the squared norm is that of s times that of x, and no row is formed.
                found[name].append(
                    batch.columns(*span).square().sum(1)
                    if factors is None
                    else factors[0].square().sum(1) * factors[1].square().sum(1)
                )
        return {name: torch.cat(parts) for name, parts in found.items()}


def _range_of(inputs: Tensor) -> Domain | None:
    """What inputs are, by the inputs: who computes this has them, and nothing is claimed of it."""
    if not len(inputs):
        return None
    rows = inputs.detach().double().cpu()
    return Domain(low=rows.amin(0), high=rows.amax(0), whole=(rows == rows.round()).all(0))
