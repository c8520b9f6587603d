"""Features standardised by differentially private statistics: two releases on all the data, before the first step.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021: the mean and the
mean square of each channel of fixed features, averaged over space within an example, bounded, summed over all examples
and released with noise; then the channels are standardised by them, and stay fixed.
Deviation: their code clips at a quantile of the private norms, which it reads without noise. Here both clip norms are
public constants of the recipe.

A feature vector f(x) is a gradient: that of sum_c w_c f_c(x) with respect to w. Therefore the engine that bounds and
sums gradients bounds and sums features, with the noise and the checks of any other release.

Guarantee:
    Two Gaussians on all the data at `noise_multiplier`, charged to the run's ledger without sampling. Assumes that
    features of an example depend on it alone, as the engine checks, and that the number of examples is public, as
    `Recipe.expected_batch` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..gradients.checks.synthetic_examples import Domains, InputDomain
from ..gradients.executor import Engine, Release
from ..inputs import Inputs
from ..plan.bound import clip
from ..plan.codec import Everything
from ..plan.defense import Block, NoisyPlan, StepPlan, checked_multiplier
from ..randomness.noise import Noise


@dataclass(frozen=True, kw_only=True)
class FeatureStatistics:
    """Settings of the released feature statistics.

    Attributes:
        of: name of the submodule that computes the features from the model's inputs, such as "0" of an `nn.Sequential`;
            without trained parameters.
        mean_norm: largest norm of an example's channel means, L2, in feature units.
        square_norm: largest norm of an example's channel mean squares, L2, in squared feature units.
        noise_multiplier: noise standard deviation / norm, of either release.
    """

    of: str = "0"
    mean_norm: float
    square_norm: float
    noise_multiplier: float = 8.0

    def __post_init__(self) -> None:
        for name in ("mean_norm", "square_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive finite number, got {getattr(self, name)}")
        checked_multiplier(self.noise_multiplier)

    def plans(self, channels: int = 1) -> tuple[NoisyPlan, NoisyPlan]:
        """Returns the plans of the means and of the mean squares; their cost is independent of the number of channels.

        Args:
            channels: number of channels of the features.
        """
        mean, square = (
            StepPlan(Block(codec=Everything(channels), bound=clip(norm))).at(self.noise_multiplier)
            for norm in (self.mean_norm, self.square_norm)
        )
        return mean, square


class StandardisedFeatures(nn.Module):
    """Features minus their released means, divided by their released standard deviations, channel by channel.

    Args:
        part: computes the features [n, channels, ...].
        channels: number of channels.
        like: tensor with the features' dtype and device.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, part: nn.Module, channels: int, like: Tensor) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("mean", torch.zeros(channels, dtype=like.dtype, device=like.device))
        self.register_buffer("deviation", torch.ones(channels, dtype=like.dtype, device=like.device))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the standardised features."""
        features = self.part(inputs)
        shape = (-1, *(1 for _ in features.shape[2:]))
        return (features - self.mean.view(shape)) / self.deviation.view(shape)

    def settle(self, mean: Float[Tensor, " channels"], square: Float[Tensor, " channels"], least: float) -> None:
        """Sets the released statistics.

        Args:
            mean: mean of each channel.
            square: mean square of each channel.
            least: least variance, below which noise dominates: a difference of two noisy numbers may be negative.
        """
        self.mean.copy_(mean)
        self.deviation.copy_((square - mean.square()).clamp(min=least).sqrt())


class _Moments(nn.Module):
    """Channel means [n, channels] of features, or of their squares."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power

    def forward(self, features: Tensor) -> Tensor:
        return features.pow(self.power).flatten(2).mean(dim=2) if features.dim() > 2 else features.pow(self.power)


def standardised(model: nn.Module, statistics: FeatureStatistics, inputs: Inputs) -> StandardisedFeatures:
    """Wraps a submodule of the model, in place, in a layer that standardises its features.

    Args:
        model: to be trained. A layer from an earlier run is replaced.
        statistics: names the submodule.
        inputs: only shape and dtype are used, no values.

    Raises:
        ValueError: for a submodule that does not exist, has trained parameters, or is not the first to take the inputs,
            and for several input tensors.
    """
    if not isinstance(inputs, Tensor):
        raise ValueError(f"statistics must be of a model with one input tensor, got {len(inputs.tensors)}")
    name = statistics.of
    parts = dict(model.named_modules())
    if not name or name not in parts:
        known = "', '".join(child for child, _ in model.named_children())
        raise ValueError(f"statistics must be of a part of the model, as '{known}', got '{name}'")
    part = parts[name]
    if isinstance(part, StandardisedFeatures):
        part = part.part
    if any(p.requires_grad for p in part.parameters()):
        raise ValueError(f"statistics must be of fixed features, and '{name}' has parameters that are trained")
    blank, received = torch.zeros_like(inputs[:1]), []
    watch = parts[name].register_forward_pre_hook(lambda _, arguments: received.append(arguments[0]))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            model(blank)
        finally:
            watch.remove()
        if len(received) != 1 or received[0] is not blank:
            raise ValueError(
                f"statistics must be of what the model computes from its inputs first, and '{name}' is not"
            )
        features = part(blank)
    if features.dim() < 2:
        raise ValueError(f"features must have channels, got {list(features.shape)} for one example")
    layer = StandardisedFeatures(part, features.shape[1], features)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
    return layer


def release_statistics(
    layer: StandardisedFeatures,
    statistics: FeatureStatistics,
    execute: Callable[[Engine, NoisyPlan], Release],
    *,
    noise: Noise,
    count: float,
    at_once: int,
    memory_budget: int | None,
    input_domain: InputDomain | None = None,
    unchecked: bool = False,
) -> list[Engine]:
    """Releases both statistics and sets them in the layer.

    Args:
        layer: standardises the features; gets the statistics.
        statistics: settings of the releases.
        execute: executes a plan with an engine on all the data, and charges it.
        noise: secret source.
        count: the public number of examples that sums are divided by.
        at_once: most examples in a pass; the features are checked on batches of that size, which takes time.
        memory_budget: memory budget of the engines, in bytes.
        input_domain: public domain of the inputs.
        unchecked: whether features that cannot be checked are accepted.

    Returns:
        The engines, which name the parts of the features that could not be checked.
    """
    means, engines = [], []
    plans = statistics.plans(len(layer.mean))
    for power, plan in enumerate(plans, start=1):
        linear = nn.Linear(len(layer.mean), 1, bias=False, dtype=layer.mean.dtype, device=layer.mean.device)
        probe = nn.Sequential(layer.part, _Moments(power), linear)
        sizes = {"microbatch": at_once, "expected_batch": at_once, "memory_budget": memory_budget}
        engine = Engine(
            probe,
            loss=_itself,
            noise=noise,
            precision="float32",
            domains=Domains(input_domain),
            unchecked=unchecked,
            **sizes,
        )
        engines.append(engine)
        means.append(execute(engine, plan).total / count)
        engine.release_memory()
    least = plans[1].stds[0] / count
    layer.settle(*means, least=max(least, torch.finfo(layer.mean.dtype).tiny))
    return engines


def _itself(outputs: Float[Tensor, "n 1"], targets: Tensor) -> Float[Tensor, " n"]:
    """Returns the output as the loss, whose gradient in the linear layer's weights is the layer's input."""
    return outputs.squeeze(1)
