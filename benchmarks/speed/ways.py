"""Implementations of a DP-SGD step: leakbench's engines, Opacus with hooks and with ghost clipping, and plain SGD.

All private implementations clip per-example gradients at norm 1, sum, add noise at multiplier 1, divide by the batch
and take an SGD step, each on its own model. Data stay on the device; sampling and loading are left out, because they
cost the same for all.
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
    """A step of an optimizer on the batch's loss; plain SGD, without norms or noise, on the mean loss by default."""

    def __init__(
        self, model: nn.Module, inputs: Tensor, labels: Tensor, *, optimizer: Any = None, loss: Any = cross_entropy
    ) -> None:
        """Takes model, data, optimizer and loss."""
        self.model, self.inputs, self.labels, self.loss = model, inputs, labels, loss
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def __call__(self) -> None:
        """Takes a step."""
        self.optimizer.zero_grad()
        self.loss(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()


def plain_channels_last(model: nn.Module, inputs: Tensor, labels: Tensor, noise_multiplier: float) -> TimedCall:
    """Builds an SGD step as `Plain`, on images and weights with their channels last in memory.

    Raises:
        ValueError: the network has no convolutions or the inputs are no images.
    """
    if inputs.dim() != 4 or not has_convolutions(model):
        raise ValueError("channels-last is for convolutions, and this network has none")
    layout = torch.channels_last
    arranged = model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]  missing in torch's overloads
    return Plain(arranged, inputs.contiguous(memory_format=layout), labels)


def has_convolutions(model: nn.Module) -> bool:
    """Returns whether a network has layers that channels-last is for."""
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


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
        **settings: Any,
    ) -> None:
        """Takes model and data, the engine that computes the clipped sums, its settings, and the source of noise."""
        self.inputs, self.labels, self.noise_multiplier = inputs, labels, noise_multiplier
        self.engine = Engine(model, noise=noise(), engine=engine, **settings)
        # The same plan for all steps, as of a stateless method: planning is not timed.
        self.plan = StepPlan(Block(codec=Everything(self.engine.layout.dim), bound=clip(CLIP_NORM))).at(
            noise_multiplier
        )
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=LEARNING_RATE)
        self.steps = 0  # the public seed of dropout

    @property
    def note(self) -> str:
        """Name of the engine that `auto` has chosen."""
        return self.engine.name

    def __call__(self) -> None:
        """Takes a step."""
        self.steps += 1
        out = self.engine.run(self.plan, self.inputs, self.labels, seed=self.steps)
        # The batch is always the same, so its size is the expected size, as for Opacus below.
        update = self.engine.layout.unflatten(out.total / len(self.inputs))
        for parameter, gradient in zip(self.trained, update.values(), strict=True):
            parameter.grad = gradient
        self.optimizer.step()


def ours(engine: str, noise: Callable[[], Noise] = seeded_noise) -> StepBuilder:
    """Builds our step with the sums by an engine, and a kind of noise."""
    return lambda model, inputs, labels, sigma: Ours(model, inputs, labels, sigma, engine=engine, noise=noise)


def opacus_hooks(model: nn.Module, inputs: Tensor, labels: Tensor, noise_multiplier: float) -> TimedCall:
    """Builds a step of Opacus as commonly used: per-example gradients by hooks, kept, then clipped."""
    hooked = opacus_module("grad_sample").GradSampleModule(model)
    # Mean loss in both ways: Opacus multiplies per-example gradients by the batch again (`loss_reduction`).
    optimizer = _opacus_optimizer("optimizers", "DPOptimizer", hooked, len(inputs), noise_multiplier)
    return Plain(hooked, inputs, labels, optimizer=optimizer)


def opacus_ghost(model: nn.Module, inputs: Tensor, labels: Tensor, noise_multiplier: float) -> TimedCall:
    """Builds a step of Opacus' ghost clipping: norms in a first backward pass, the weighted loss in a second."""
    fast = "fast_gradient_clipping"
    wrap = opacus_module(f"grad_sample.grad_sample_module_{fast}").GradSampleModuleFastGradientClipping
    wrapped = wrap(model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
    optimizer = _opacus_optimizer(
        f"optimizers.optimizer_{fast}", "DPOptimizerFastGradientClipping", wrapped, len(inputs), noise_multiplier
    )
    loss = opacus_module(f"utils.{fast}_utils").DPLossFastGradientClipping
    return Plain(
        wrapped, inputs, labels, optimizer=optimizer, loss=loss(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")
    )


def _opacus_optimizer(module: str, name: str, model: nn.Module, batch: int, noise_multiplier: float) -> Any:
    return getattr(opacus_module(module), name)(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=batch,
    )


WAYS: dict[str, StepBuilder] = {
    "sgd": lambda model, inputs, labels, _: Plain(model, inputs, labels),
    "sgd-channels-last": plain_channels_last,
    "auto": ours("auto"),
    "layerwise": ours("layerwise"),
    "torch.func": ours("torch.func"),
    "opacus": ours("opacus"),
    "backpack": ours("backpack"),
    "secure": ours("auto", secure),
    "opacus-hooks": opacus_hooks,
    "opacus-ghost": opacus_ghost,
}
# `auto` chooses `layerwise` for every network here, so `layerwise` is not timed again. `secure` is left out by default:
# exact sums are computed example by example, which takes longer than all other ways together.
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
