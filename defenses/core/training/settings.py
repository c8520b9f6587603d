"""Training settings in three groups: the recipe of the model, its execution, and the recording.

A `Recipe` changes the result, an `Execution` at most its rounding, a `Recording` nothing. None of them reads the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..gradients.augmentation import Augmentation
from ..gradients.checks.synthetic_examples import Domain
from ..gradients.numerics.full_precision import Precision
from ..gradients.reference import Loss, cross_entropy, example_by_example
from ..plan.defense import Defense
from ..plan.layout import Layout
from ..privacy.sampling import Sampling
from ..randomness.noise import Noise
from .statistics import FeatureStatistics
from .transcript import Observer, Transcript

Schedule = Callable[[int, int], float]
"""Returns the factor of the learning rate at (step, steps)."""

# step < steps, so the last step still moves the model.
_SCHEDULES: dict[str, Schedule] = {
    "constant": lambda step, steps: 1.0,
    "cosine": lambda step, steps: 0.5 * (1 + math.cos(math.pi * step / steps)),
    "linear": lambda step, steps: 1 - step / steps,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Training recipe, independent of the defense. Optimizers see releases only, so they cost no privacy.

    Attributes:
        optimizer: a name, or a function of the parameters.
        momentum: PyTorch's: v <- momentum v + update. For "sgd" only.
        schedule: factor of the learning rate by step.
        loss: per-example loss. Class weights of a `CrossEntropyLoss` or `NLLLoss` multiply an example's loss, even if
            its reduction is "mean", which divides by them over a batch.
        augmentation: views of each example, whose gradients are averaged and then bounded once.
        average: decay of a moving average of the parameters (`average.py`), which replaces the last parameters in the
            trained model: the largest weight of the past in a step, such as 0.999. None for no average.
        statistics: statistics of fixed features, released before the first step to standardise them; None for none.
        expected_batch: the public constant that sums are divided by; if None, sample rate times number of examples,
            which makes that number public.
        nominal_size: public number that is used instead of the number of examples, so that the latter stays private:
            sums are divided by sample rate times the nominal size. Choose sample rate and steps from it, too, as in
            `poisson(50 / nominal_size)`. For "poisson" and "full" sampling only. None if the number is public.
        input_domain: public domain of inputs: the model is checked on synthetic values from it, before any data.
            Several kinds of values are tried if None.
        target_domain: public domain of targets. None for class numbers below the width of the outputs, or
            probabilities.
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
        """Returns a new optimizer.

        Args:
            parameters: to be trained.
            lr: learning rate; unused if `optimizer` is a function, which sets its own.
        """
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"lr must be a positive finite number, got {lr}")
        if callable(self.optimizer):
            return self.optimizer(parameters)
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=lr, momentum=self.momentum)
        return torch.optim.Adam(parameters, lr=lr)

    def divisor(self, sampling: Sampling, examples: int) -> float:
        """Returns the expected batch that sums are divided by.

        Args:
            sampling: the run's sampler.
            examples: number of examples, ignored if there is a nominal size.

        Raises:
            ValueError: for a nominal size under a sampler whose batches depend on the number of examples.
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
        """Returns the schedule's factor at a step."""
        schedule = self.schedule if callable(self.schedule) else _SCHEDULES[self.schedule]
        return schedule(step, steps)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Device, engine and memory of the computation of clipped sums.

    Attributes:
        engine: "auto", "layerwise", "torch.func", "one_by_one", "opacus" or "backpack".
        microbatch: largest number of examples processed at a time; None for as many as fit the memory budget.
        memory_budget: approximate bytes for activations, their derivatives and per-example gradients; if None, 2 GiB on
            a CPU, and on a CUDA device half of its memory or what is free.
        precision: "float32", "tf32" or "bfloat16" for forward and backward passes of the layerwise engine; bounds are
            computed in float32 in any case. None for TF32 on a CUDA device, as PyTorch's own convolutions, and float32
            on others.
        device: device of the computation; None for that of the examples.
        unchecked: whether to train a model that could not be checked on synthetic examples anyway, example by example;
            its claim is marked as unverified.
    """

    engine: str = "auto"
    microbatch: int | None = None
    memory_budget: int | None = None
    precision: Precision | None = None
    device: torch.device | str | None = None
    unchecked: bool = False


@runtime_checkable
class Meter(Protocol):
    """A measurement of a run's updates, taken during the run, so that no transcript has to keep them.

    It sees the same as an observer of updates, and so may be published wherever they are.
    """

    def add(self, step: int, update: Float[Tensor, " dim"]) -> None:
        """Adds the update of a step; the tensor may be kept, but not written into.

        Args:
            step: its number; consecutive, without repetition.
            update: the releases of the step, decoded, divided and post-processed, as the optimizer gets them. A step
                undone by its trial has still released its update.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: tensors, numbers, None."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint, whose tensors are on the CPU."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Outputs of a run besides its model: transcript, checkpoints, a measurement, and progress.

    Attributes:
        observer: decides how much of a step the transcript keeps.
        always: numbers of steps kept regardless of their size.
        only: numbers of the other steps to keep; None for all of them.
        memory: limit in bytes for the kept steps that are not in `always`; the first step that exceeds it, and all
            later ones, are dropped. None for no limit.
        checkpoint: file to resume from if it exists, and to write to. With seeded noise, all components of the run must
            then be inspectable: functions of plain values, no open files.
        checkpoint_every: steps between writes; an epoch if None. A killed run is charged for as many steps once more,
            because it may have taken them.
        progress: called with (steps done, steps) after each step.
        meter: receives the update of each step; None for no measurement.
    """

    observer: Observer = "final"
    always: Collection[int] = ()
    only: Collection[int] | None = None
    memory: int | None = None
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    progress: Callable[[int, int], None] | None = None
    meter: Meter | None = None

    def __post_init__(self) -> None:
        every = self.checkpoint_every
        # With another number the file would not be written when it says, up to which steps a killed run is charged.
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(
                f"checkpoint_every must be a whole number of at least 1, or None for an epoch, got {every!r}"
            )

    def transcript(self, layout: Layout) -> Transcript:
        """Returns an empty transcript.

        Args:
            layout: layout of the model's parameters.
        """
        only = None if self.only is None else frozenset(self.only)
        return Transcript(self.observer, layout, frozenset(self.always), only, self.memory)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The arguments of `train` with defaults filled in; seeds that are not given stay None, for the fingerprint."""

    defense: Defense
    sampling: Sampling
    steps: int
    lr: float
    noise: Noise
    seed: int | None
    sampler_key: int | None = field(repr=False)
    recipe: Recipe
    execution: Execution
    recording: Recording
