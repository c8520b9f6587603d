"""Training settings in three groups: what changes the resulting model, how it is computed, and what is recorded.

A `Recipe` changes the result, an `Execution` its rounding at most, a `Recording` nothing. None of them reads the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..gradients.augmentation import Augmentation
from ..gradients.checks.synthetic_examples import Domain
from ..gradients.reference import Loss, cross_entropy, example_by_example
from ..plan.layout import Layout
from ..privacy.sampling import Sampling
from .statistics import FeatureStatistics
from .transcript import Observer, Transcript

Schedule = Callable[[int, int], float]
"""(step, steps) -> factor of the learning rate."""

# step < steps, so the last step still moves the model.
_SCHEDULES: dict[str, Schedule] = {
    "constant": lambda step, steps: 1.0,
    "cosine": lambda step, steps: 0.5 * (1 + math.cos(math.pi * step / steps)),
    "linear": lambda step, steps: 1 - step / steps,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained, whatever defends it. Optimizers see releases only, so they are free.

    Attributes:
        optimizer: a name, or a function of the parameters.
        momentum: PyTorch's: v <- momentum v + update. Of "sgd" only.
        schedule: factor of the learning rate by step.
        loss: per-example loss. Class weights of a `CrossEntropyLoss` or `NLLLoss` multiply an example's loss, also
            where its reduction is "mean", which over a batch would divide by them.
        augmentation: views of each example, whose gradients are averaged and then bounded once.
        average: decay of a moving average of the parameters (`average.py`), which the trained model then has in place
            of the last ones: the largest weight of the past in a step, as 0.999. None for no average.
        statistics: of fixed features, released before the first step, by which they are standardised; None for none.
        expected_batch: the public constant that sums are divided by; sample rate times number of examples where None,
            which takes that number for public.
        nominal_size: a public number in place of the number of examples, which then nothing follows from: sums are
            divided by sample rate times it. Sample rate and steps are to be chosen by it, too, as
            `poisson(50 / nominal_size)`. Of "poisson" and "full" sampling only. None where the number is public.
        input_domain: what inputs may be, as everybody knows: the model is checked on such values, made up, before any
            data. Several kinds of values are tried where None.
        target_domain: the same of targets. None for class numbers below the width of the outputs, or probabilities.
    """

    optimizer: Literal["sgd", "adam"] | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "sgd"
    momentum: float = 0.0
    schedule: Literal["constant", "cosine", "linear"] | Schedule = "constant"
    loss: Loss = cross_entropy
    augmentation: Augmentation | None = None
    average: float | None = None
    statistics: FeatureStatistics | None = None
    expected_batch: float | None = None
    nominal_size: int | None = None
    input_domain: Domain | None = None
    target_domain: Domain | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", example_by_example(self.loss))
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if not callable(self.optimizer) and self.optimizer not in ("sgd", "adam"):
            raise ValueError(f"optimizer must be 'sgd', 'adam' or a function of the parameters, got '{self.optimizer}'")
        if self.optimizer == "adam" and self.momentum:
            raise ValueError(f"momentum must be 0 for 'adam', which has its own, got {self.momentum}")
        if not callable(self.schedule) and self.schedule not in _SCHEDULES:
            known = "', '".join(_SCHEDULES)
            raise ValueError(f"schedule must be '{known}' or a function of (step, steps), got '{self.schedule}'")
        if self.average is not None and not 0 <= self.average < 1:
            raise ValueError(f"average must be in [0, 1), or None for no average, got {self.average}")
        batch = self.expected_batch
        if batch is not None and not (math.isfinite(batch) and batch > 0):
            raise ValueError(f"expected_batch must be a positive finite number, got {batch}")
        nominal = self.nominal_size
        if nominal is not None and (isinstance(nominal, bool) or not isinstance(nominal, int) or nominal < 1):
            raise ValueError(f"nominal_size must be a whole number of at least 1, or None, got {nominal!r}")
        if nominal is not None and batch is not None:
            raise ValueError(
                "one of nominal_size and expected_batch must be given, got both: the expected batch is then "
                f"sample rate x nominal_size, got {batch} and {nominal}"
            )

    def optimizer_of(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """A fresh optimizer.

        Args:
            parameters: to be trained.
            lr: learning rate; unused where `optimizer` is a function, which sets its own.
        """
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"lr must be a positive finite number, got {lr}")
        if callable(self.optimizer):
            return self.optimizer(parameters)
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=lr, momentum=self.momentum)
        return torch.optim.Adam(parameters, lr=lr)

    def divisor(self, sampling: Sampling, examples: int) -> float:
        """The expected batch that sums are divided by.

        Args:
            sampling: of the run.
            examples: how many there are, which nothing follows from where there is a nominal size.

        Raises:
            ValueError: for a nominal size under a sampler whose batches follow from the number of examples.
        """
        if self.nominal_size is not None and sampling.relation != "add_remove":
            raise ValueError(
                "nominal_size must go with poisson or full sampling: under others more than the divisor follows from "
                f"the number of examples, got {sampling.kind} sampling"
            )
        if self.expected_batch is not None:
            return self.expected_batch
        return sampling.expected_batch(self.nominal_size or examples)

    def rate(self, step: int, steps: int) -> float:
        """The schedule's factor at a step."""
        schedule = self.schedule if callable(self.schedule) else _SCHEDULES[self.schedule]
        return schedule(step, steps)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Where and how clipped sums are computed.

    Attributes:
        engine: "auto", "layerwise", "torch.func", "one_by_one", "opacus" or "backpack".
        microbatch: most examples that are worked on at a time; None for what fits the memory budget.
        memory_budget: bytes that activations, their derivatives and rows may take, roughly; 2 GiB where None.
        device: where to compute; None for where the examples are.
        unchecked: whether a model that could not be checked on made-up examples is trained anyway, one example at a
            time; its claim is marked as unverified.
    """

    engine: str = "auto"
    microbatch: int | None = None
    memory_budget: int | None = None
    device: torch.device | str | None = None
    unchecked: bool = False


@runtime_checkable
class Meter(Protocol):
    """A measurement of a run's updates that is taken as the run goes, so that no transcript need keep them.

    It sees what every observer of updates sees, and so may be published wherever they are.
    """

    def add(self, step: int, update: Float[Tensor, " dim"]) -> None:
        """Takes in the update of a step, which it may keep and must not write into.

        Args:
            step: its number; none is left out or comes twice.
            update: the releases of the step, decoded, divided and post-processed: what the optimizer gets. A step that
                a trial takes back has released its update all the same.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: tensors, numbers, None."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint, whose tensors are on the CPU."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is kept of a run besides its model: a transcript, checkpoints, a measurement, and word of its progress.

    Attributes:
        observer: how much the transcript keeps of a step.
        always: numbers of the steps that it keeps whatever their size.
        only: numbers of the other steps that it keeps; None for all of them.
        memory: bytes that these may take; no further ones are kept where they would outgrow it. None for any number.
        checkpoint: file to resume from if it exists, and to write to. What the run computes must then be of a kind that
            can be looked into: functions of plain values, no open files.
        checkpoint_every: steps between writes; an epoch where None.
        progress: called with (steps done, steps) after each step.
        meter: is given the update of each step; None for no measurement.
    """

    observer: Observer = "final"
    always: Collection[int] = ()
    only: Collection[int] | None = None
    memory: int | None = None
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    progress: Callable[[int, int], None] | None = None
    meter: Meter | None = None

    def transcript(self, layout: Layout) -> Transcript:
        """An empty transcript.

        Args:
            layout: of the model.
        """
        only = None if self.only is None else frozenset(self.only)
        return Transcript(self.observer, layout, frozenset(self.always), only, self.memory)
