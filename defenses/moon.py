"""MOON: local features are drawn to those of the global model, and away from those of the client's last model.

Li, He & Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1. A record's loss is its cross-entropy plus
mu softplus((cos(z, z_prev) - cos(z, z_glob)) / t), the published -log ratio, with t = 0.5; z are its features in the
local model, z_glob and z_prev those in the global model and in the client's last local model, both releases. No term
couples records, but the gradient of every record changes: the term is therefore inside the bound, never added after the
noise. The network returns logits and features, and a record's targets are its label with both feature vectors. In a
client's first round z_prev is z_glob, whose gradient is 0.
Deviation: features are the inputs of the last linear layer; the paper has a projection head.
Guarantee: unit record: each local step is a Gaussian mechanism at the noise multiplier, on gradients of that loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, one_hot, softplus

from .core import (
    Federated,
    FixedBoundKind,
    Follow,
    Loss,
    Recipe,
    Round,
    cross_entropy,
    outputs,
)
from .dp_sgd import dp_sgd


class WithFeatures(nn.Module):
    """A model whose output is its logits, followed by the inputs of its last linear layer.

    Attributes:
        model: the model, with the parameters in their order.
        classes: number of logits.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes a model that ends in a linear layer.

        Raises:
            ValueError: for a model without a linear layer.
        """
        super().__init__()
        self.model = model
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not layers:
            raise ValueError(f"moon must have a model with a linear layer at its end, got {type(model).__name__}")
        self._last = [layers[-1]]  # in a list, so that it is not registered a second time
        self.classes = layers[-1].out_features

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns [logits, features] of each example."""
        features: list[Tensor] = []
        handle = self._last[0].register_forward_pre_hook(lambda module, entering: features.append(entering[0]))
        try:
            logits = self.model(inputs)
        finally:
            handle.remove()
        return torch.cat([logits, features[-1]], dim=1)


@dataclass(frozen=True, kw_only=True)
class ContrastiveLoss:
    """Cross-entropy plus the model-contrastive term, of outputs and targets [n, classes + 2 width].

    Attributes:
        mu: weight of the term.
        temperature: t, divisor of the cosines.
        classes: number of logits.
    """

    mu: float
    temperature: float
    classes: int

    def __call__(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each example."""
        logits, features = predicted[:, : self.classes], predicted[:, self.classes :]
        labels, of_global, of_previous = targets.split([self.classes, features.shape[1], features.shape[1]], dim=1)
        gap = cosine_similarity(features, of_previous) - cosine_similarity(features, of_global)
        return cross_entropy(logits, labels) + self.mu * softplus(gap / self.temperature)


@dataclass(frozen=True, kw_only=True)
class Contrastive(Follow):
    """Client rule of MOON; state: the client's last local model [dim], None before its first round.

    Attributes:
        mu: weight of the term, at least 0.
        temperature: t, positive.
    """

    mu: float
    temperature: float = 0.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise ValueError(f"mu must be at least 0 and finite, got {self.mu}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be a positive finite number, got {self.temperature}")

    def check(self, recipe: Recipe) -> None:
        """Refuses views, whose features would be those of the example, and other losses."""
        if recipe.augmentation is not None or recipe.loss is not cross_entropy:
            raise ValueError("moon must have the cross-entropy and no augmentation, got another recipe")

    def network(self, model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss]:
        """Returns the model with its features, and the contrastive loss."""
        wrapped = WithFeatures(model)
        return wrapped, ContrastiveLoss(mu=self.mu, temperature=self.temperature, classes=wrapped.classes)

    def targets(self, state: Tensor | None, round: Round, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns [label, z_glob, z_prev] of each record: labels as probabilities."""
        network: Any = round.network
        classes = network.classes
        classes_of_records = labels.to(inputs.dtype) if labels.dim() == 2 else one_hot(labels, classes).to(inputs.dtype)
        of_global = self._features(round, inputs, round.parameters)[:, classes:]
        of_previous = of_global if state is None else self._features(round, inputs, state)[:, classes:]
        return torch.cat([classes_of_records, of_global, of_previous], dim=1)

    def _features(self, round: Round, inputs: Tensor, point: Tensor) -> Tensor:
        with torch.no_grad(), _evaluating(round.network):
            return outputs(round.network, round.context.layout, inputs, parameters=point)

    def finish(self, state: Tensor | None, round: Round, delta: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the local model."""
        return round.parameters + delta, {}


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Puts a network in evaluation mode, so that features are computed without dropout."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def moon(
    *,
    clip_norm: float = 1.0,
    mu: float = 1.0,
    temperature: float = 0.5,
    bound: FixedBoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Federated:
    """Federated averaging with a model-contrastive loss, of clients that train under DP-SGD.

    Args:
        clip_norm: C, largest norm of an example's gradient, the contrastive term included, L2, in gradient units.
        mu: weight of the contrastive term; the paper's grid is 0.1, 1, 5 and 10.
        temperature: divisor of the cosines.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C in every local step; None until calibrated.
    """
    client = dp_sgd(clip_norm=clip_norm, bound=bound, regulariser=regulariser, noise_multiplier=noise_multiplier)
    return Federated(client=client, rule=Contrastive(mu=mu, temperature=temperature), name="moon")
