"""Ways of taking a DP-SGD step: ours, Opacus' two, and plain SGD as the floor.

All private ways clip per-example gradients at norm 1, sum, add noise at multiplier 1, divide by the batch and take an
SGD step, on their own model, which they change. Data stay on the device; sampling and loading are left out, because
they cost the same in all.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakbench.defenses.core import Block, Engine, Everything, Noise, StepPlan, clip, secure, seeded

from .harness import TimedCall

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.05

StepBuilder = Callable[[nn.Module, Tensor, Tensor, float], TimedCall]
"""(model, inputs, labels, noise multiplier) -> a step on them."""


class Plain:
    """An SGD step on the batch's mean loss: no norms, no noise."""

    def __init__(self, model: nn.Module, inputs: Tensor, labels: Tensor, noise_multiplier: float) -> None:
        """Takes model and data; the noise multiplier is ignored."""
        self.model, self.inputs, self.labels = model, inputs, labels
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def __call__(self) -> None:
        """Takes a step."""
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()


def plain_channels_last(model: nn.Module, inputs: Tensor, labels: Tensor, noise_multiplier: float) -> TimedCall:
    """Builds an SGD step as `Plain`, on images and weights with their channels last in memory.

    Raises:
        ValueError: the network has no convolutions or the inputs are no images.
    """
    if inputs.dim() != 4 or not any(isinstance(layer, nn.Conv2d) for layer in model.modules()):
        raise ValueError("channels-last is for convolutions, and this network has none")
    layout = torch.channels_last
    arranged = model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]  missing in torch's overloads
    return Plain(arranged, inputs.contiguous(memory_format=layout), labels, noise_multiplier)


def seeded_noise() -> Noise:
    """Returns noise from the generator that `train` uses, under a fixed key, so that every run draws the same."""
    return seeded(0)


class Ours:
    """Step through `Engine.run`, as `train` takes it."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        noise_multiplier: float,
        *,
        engine: str,
        noise: Callable[[], Noise] = seeded_noise,
    ) -> None:
        """Takes model and data, the engine that computes the clipped sums, and the source of noise."""
        self.inputs, self.labels, self.noise_multiplier = inputs, labels, noise_multiplier
        self.engine = Engine(model, noise=noise(), engine=engine)
        # The same plan for all steps, as of a stateless method: planning is not timed.
        self.plan = StepPlan(Block(codec=Everything(self.engine.layout.dim), bound=clip(CLIP_NORM))).at(
            noise_multiplier
        )
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=LEARNING_RATE)

    @property
    def note(self) -> str:
        """Name of the engine that `auto` has chosen."""
        return self.engine.name

    def __call__(self) -> None:
        """Takes a step."""
        out = self.engine.run(self.plan, self.inputs, self.labels)
        # The batch is always the same, so its size is the expected size, as for Opacus below.
        update = self.engine.layout.unflatten(out.total / len(self.inputs))
        for parameter, gradient in zip(self.trained, update.values(), strict=True):
            parameter.grad = gradient
        self.optimizer.step()


def ours(engine: str, noise: Callable[[], Noise] = seeded_noise) -> StepBuilder:
    """Builds our step with the sums by an engine, and a kind of noise."""
    return lambda model, inputs, labels, sigma: Ours(model, inputs, labels, sigma, engine=engine, noise=noise)


class OpacusHooks:
    """Opacus as commonly used: per-example gradients by hooks, kept at the parameters, then clipped."""

    def __init__(self, model: nn.Module, inputs: Tensor, labels: Tensor, noise_multiplier: float) -> None:
        """Wraps the model and an optimizer."""
        self.model = opacus_module("grad_sample").GradSampleModule(model)
        self.inputs, self.labels = inputs, labels
        # Mean loss in both ways: Opacus multiplies per-example gradients by the batch again (`loss_reduction`).
        self.optimizer = opacus_module("optimizers").DPOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE),
            noise_multiplier=noise_multiplier,
            max_grad_norm=CLIP_NORM,
            expected_batch_size=len(inputs),
        )

    def __call__(self) -> None:
        """Takes a step."""
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()


class OpacusGhost:
    """Opacus' ghost clipping: norms in a first backward pass, the weighted loss in a second."""

    def __init__(self, model: nn.Module, inputs: Tensor, labels: Tensor, noise_multiplier: float) -> None:
        """Wraps the model, an optimizer and the loss."""
        wrap = opacus_module(
            "grad_sample.grad_sample_module_fast_gradient_clipping"
        ).GradSampleModuleFastGradientClipping
        self.model = wrap(model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
        self.inputs, self.labels = inputs, labels
        self.optimizer = opacus_module("optimizers.optimizer_fast_gradient_clipping").DPOptimizerFastGradientClipping(
            torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE),
            noise_multiplier=noise_multiplier,
            max_grad_norm=CLIP_NORM,
            expected_batch_size=len(inputs),
        )
        loss = opacus_module("utils.fast_gradient_clipping_utils").DPLossFastGradientClipping
        self.loss = loss(self.model, self.optimizer, nn.CrossEntropyLoss(), "mean")

    def __call__(self) -> None:
        """Takes a step."""
        self.optimizer.zero_grad()
        self.loss(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()


WAYS: dict[str, StepBuilder] = {
    "sgd": Plain,
    "sgd-channels-last": plain_channels_last,
    "auto": ours("auto"),
    "layerwise": ours("layerwise"),
    "torch.func": ours("torch.func"),
    "opacus": ours("opacus"),
    "backpack": ours("backpack"),
    "secure": ours("auto", secure),
    "opacus-hooks": OpacusHooks,
    "opacus-ghost": OpacusGhost,
}
# `auto` is `layerwise` for every network here and is noted as such, so `layerwise` is not timed again. `secure` is not
# usual: exact sums are computed an example at a time, which takes longer than all other ways together.
USUAL = tuple(way for way in WAYS if way not in ("layerwise", "secure"))


@contextmanager
def others_warnings() -> Iterator[None]:
    """Silences PyTorch's warning about Opacus' hooks at every step, which does not concern timings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing when gradients are", UserWarning)
        yield


def opacus_module(module: str) -> Any:
    """Imports a module of Opacus.

    Raises:
        ModuleNotFoundError: Opacus is not installed; names the extra.
    """
    try:
        return importlib.import_module(f"opacus.{module}")
    except ModuleNotFoundError as error:
        # A missing dependency of Opacus is named as itself.
        if (error.name or "").partition(".")[0] != "opacus":
            raise
        text = "opacus is not installed: pip install 'leakbench[engines]'"
        raise ModuleNotFoundError(text, name="opacus") from error
