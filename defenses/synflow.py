"""SynFlow: DP-SGD on the weights that carry most of a network's paths, found without data.

Tanaka, Kunin, Yamins & Ganguli, "Pruning Neural Networks without Any Data by Iteratively Conserving Synaptic Flow",
NeurIPS 2020, Algorithm 1; used before private training in DP-SSGD. Weights are replaced by their absolute values and
biases by zero, an image of ones goes through the network, and a weight's score is its share in the output. The network
is pruned in rounds, because the scores of a single round would cut off whole layers.
Deviation: norms, weight standardisation and activations are bypassed in the scoring pass, because with normalisation
the output would not depend on the scale of a weight, and scores would be meaningless. Computed in float64, because
products over layers overflow float32.
Guarantee: each step is a Gaussian mechanism, as in DP-SGD: the mask is a function of the initial weights, which are
random or public.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from .core import BoundKind, Context, Defense, Layout, Sparse, bounded, drop_overall, refuse_count, refuse_fraction

_BYPASSED = {
    "batch_norm", "celu", "dropout", "elu", "gelu", "group_norm", "hardswish", "hardtanh", "instance_norm",
    "layer_norm", "leaky_relu", "logsigmoid", "mish", "prelu", "relu", "relu6", "relu_", "selu", "sigmoid", "silu",
    "softplus", "softsign", "tanh", "tanh_",
}  # fmt: skip
"""Functions replaced by the identity on their first argument: on positive inputs they only rescale."""


class _Linearised(TorchFunctionMode):
    """Forward passes without activations, norms and dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _BYPASSED:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class SynFlow:
    """Keeps the weights of the largest synaptic flow, over all layers together."""

    prune_rate: float
    rounds: int

    def __post_init__(self) -> None:
        refuse_fraction("prune_rate", self.prune_rate)
        refuse_count("rounds", self.rounds)

    def keeps(self, context: Context) -> Tensor:
        """Drops a fraction of all weights; in a dry run, without a network, at random."""
        if context.architecture is None:
            return drop_overall(
                context.layout, self.prune_rate, torch.rand(context.dim, generator=context.coins("synflow"))
            )
        if context.input_shape is None:
            raise ValueError("the model must have one input tensor for synflow, got several; take random_pruning")
        model = _positive(context.architecture())
        layout = context.layout
        weights = layout.read(model)
        kept = torch.ones_like(weights, dtype=torch.bool)
        image = torch.ones(1, *context.input_shape, dtype=torch.float64, device=context.device)
        for round_ in range(1, self.rounds + 1):
            layout.write(model, weights * kept)
            scores = _flow(model, layout, image)
            # Exponential schedule: most weights are pruned in the first rounds, when pruning cannot yet disconnect the
            # network.
            fraction = 1 - (1 - self.prune_rate) ** (round_ / self.rounds)
            kept = drop_overall(layout, fraction, scores)
        return kept


def _identity(values: Tensor) -> Tensor:
    return values


def _positive(model: nn.Module) -> nn.Module:
    """Network in float64 with positive weights, without weight standardisation; biases are zero."""
    model = model.double().eval()
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            for parametrization in module:
                parametrization.forward = _identity
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.abs() if parameter.dim() > 1 else torch.zeros_like(parameter))
    return model


def _flow(model: nn.Module, layout: Layout, image: Tensor) -> Tensor:
    """Computes the score |weight dR/dweight| of every coordinate; R is the sum of the outputs for an image of ones."""
    named = dict(model.named_parameters())
    parameters = [named[name] for name in layout.names]
    try:
        with _Linearised():
            total = model(image).sum()
    # Errors that a user's forward pass may raise on unsuitable inputs, such as ones in place of tokens.
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the model must take an image of ones for synflow, got {type(error).__name__}: "
            f"{str(error).splitlines()[0][:200]}; take random_pruning, which needs none"
        ) from error
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    # The gain of a standardised convolution is bypassed, and has no gradient.
    scores = [torch.zeros_like(p) if g is None else p * g for p, g in zip(parameters, gradients, strict=True)]
    return torch.cat([score.detach().abs().flatten() for score in scores])


def synflow(
    *,
    clip_norm: float = 1.0,
    prune_rate: float = 0.5,
    rounds: int = 100,
    pruned: Literal["zero", "initial"] = "zero",
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD on the weights of the largest synaptic flow.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        prune_rate: fraction of all weights that is pruned.
        rounds: rounds of scoring and pruning.
        pruned: "zero" sets pruned weights to zero, "initial" leaves them at their initialisation.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = Sparse(
        bound=bounded(clip_norm, bound, regulariser),
        pruning=SynFlow(prune_rate=prune_rate, rounds=rounds),
        pruned=pruned,
    )
    return Defense(method, noise_multiplier, "synflow")
