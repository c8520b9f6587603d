"""The trainer interface of the battery: a function of a model and data that returns its releases and its claim.

The trainer may be leakbench's, with or without a planted bug, or a function in a user's file:

    def train(model, examples, *, noise_multiplier, clip_norm, sample_rate, steps, lr, expected_batch, seed, published)

It receives the keywords that its signature has. It returns the trained model, or a mapping with `model` and any of
`releases` (the noisy updates, a vector for each), `claim` (a mapping with the fields of `TrainerClaim`) and `published`
(any other public outputs, by name).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from leakbench.defenses.core import Layout
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.core.privacy.tradeoff import of_events, of_pair

AT_DELTA = 1e-5
"""Delta whose epsilon sets the resolution of a claim's curve. A coarse curve makes no false accusation."""

ClaimedRelation = Literal["add_remove", "zero_out", "replace_one"]
Arithmetic = Literal["released", "real"]


@dataclass(frozen=True, kw_only=True)
class TrainerTask:
    """The public task of a trainer.

    Attributes:
        noise_multiplier: noise standard deviation on the sum / clip norm.
        clip_norm: largest norm of a record's contribution, L2, in gradient units.
        sample_rate: probability with which every record joins every step by its own coin.
        steps: of plain SGD, without momentum.
        lr: learning rate of the mean update.
        expected_batch: divisor of sums, a constant that no record changes.
        seed: of public randomness (masks, views), known to every observer of the releases.
        published: outputs that an earlier run published besides its releases, from which a trainer may repeat it.
    """

    noise_multiplier: float
    clip_norm: float = 1.0
    sample_rate: float = 1.0
    steps: int = 1
    lr: float = 1.0
    expected_batch: float = 4.0
    seed: int = 0
    published: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainerClaim:
    """The privacy guarantee claimed for a run, as the trade-off curve of its best membership test.

    Attributes:
        events: Gaussian mechanisms that the run composes; None if epsilon and delta are given.
        epsilon: in nats; infinite if nothing is claimed.
        delta: in [0, 1).
        relation: `add_remove`, or `zero_out` if a record is replaced by an empty contribution, or `replace_one` if it
            is replaced by any other.
        arithmetic: `released`: for the released floating-point numbers; `real`: for idealised real numbers.
    """

    events: tuple[Gaussian, ...] | None = None
    epsilon: float = math.inf
    delta: float = 0.0
    relation: ClaimedRelation = "add_remove"
    arithmetic: Arithmetic = "released"

    def __post_init__(self) -> None:
        for name, known in (("relation", ClaimedRelation), ("arithmetic", Arithmetic)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"{name} of a claim must be one of {', '.join(get_args(known))}, got {getattr(self, name)!r}"
                )
        if not (self.epsilon >= 0 and 0 <= self.delta < 1):
            raise ValueError(
                f"a claim must have epsilon of at least 0 and delta in [0, 1), got {self.epsilon} and {self.delta}"
            )

    @property
    def claims_something(self) -> bool:
        """True if the claim excludes any membership test."""
        return self.events is not None or math.isfinite(self.epsilon)

    def most(self, fpr: float) -> float:
        """Returns the largest true positive rate that the claim allows at a false positive rate."""
        curve = of_pair(self.epsilon, self.delta) if self.events is None else of_events(self.events, AT_DELTA)
        return curve.tpr_at(fpr)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerAnswer:
    """The public outputs of a run.

    Attributes:
        releases: noisy updates [dim], in units of gradients: sums over the expected batch.
        buffers: of the finished model, by name.
        claim: the claimed guarantee.
        published: any other public outputs, by name.
    """

    releases: tuple[Tensor, ...]
    buffers: Mapping[str, Tensor]
    claim: TrainerClaim
    published: Mapping[str, Any] = field(default_factory=dict)


Trainer = Callable[[nn.Module, tuple[Tensor, Tensor], TrainerTask], TrainerAnswer]
"""Trains a model: (model, (inputs, labels), task) -> its public outputs."""


def of_function(function: Any, name: str) -> Trainer:
    """Returns a trainer from a user's function, which the module docstring specifies.

    Args:
        function: trains a model.
        name: for messages.

    Raises:
        ValueError: if it is no function, or lacks keywords of the task.
    """
    if not callable(function):
        raise ValueError(f"trainer {name} must be a function, got {type(function).__name__}")
    parameters = inspect.signature(function).parameters
    everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    offered = [attribute.name for attribute in fields(TrainerTask)]
    lacking = [key for key in ("noise_multiplier", "clip_norm", "sample_rate", "steps") if key not in parameters]
    if lacking and not everything:
        raise ValueError(f"trainer {name} must take the keywords {', '.join(lacking)}, which are not in its signature")

    def train(model: nn.Module, examples: tuple[Tensor, Tensor], task: TrainerTask) -> TrainerAnswer:
        layout = Layout.of(model)
        before = layout.read(model)
        arguments = {key: getattr(task, key) for key in offered if everything or key in parameters}
        return _understood(function(model, examples, **arguments), task, layout, before, name)

    return train


_ROUNDING = 1e-5
"""Relative tolerance on a parameter, larger than float32's rounding error in a step."""


def _refuse_another_model(
    releases: Sequence[Tensor], before: Tensor, after: Tensor, task: TrainerTask, name: str
) -> None:
    """Refuses releases that do not add up to the model's change: the model is public, too, and no test reads it."""
    if torch.equal(before, after):  # an unmoved model is no evidence
        return
    steps = task.lr * torch.stack([vector.double() for vector in releases])
    largest = [float(vector.double().abs().max()) for vector in (before, after, steps)]
    off = float((before.double() - after.double() - steps.sum(dim=0)).abs().max())
    # The check is meaningless for a run that diverged.
    if math.isfinite(off + sum(largest)) and off > (1 + len(releases)) * _ROUNDING * max(largest):
        raise ValueError(
            f"the model of trainer {name} must have moved by lr times the sum of its releases, it is off by {off:.2g}; "
            "leave releases out, and the model alone is examined"
        )


_KEYS = ("model", "releases", "claim", "published")


def _understood(answer: Any, task: TrainerTask, layout: Layout, before: Tensor, name: str) -> TrainerAnswer:
    returned: Mapping[str, Any] = answer if isinstance(answer, Mapping) else {"model": answer}
    unknown = sorted(set(returned) - set(_KEYS))
    if unknown or not isinstance(returned.get("model"), nn.Module):
        fault = f"the key {unknown[0]!r}" if unknown else f"{type(returned.get('model')).__name__} for the model"
        raise ValueError(
            f"trainer {name} must return a model, or a mapping with model, releases, claim, published; got {fault}"
        )
    after = dict(returned["model"].named_parameters())
    missing = [each for each in layout.names if each not in after]
    if missing:
        raise ValueError(
            f"trainer {name} must return the model that it was given, and its parameter {missing[0]!r} is gone"
        )
    reported = returned.get("releases")
    if reported is None:
        # The final model alone: the sum of all updates.
        reported = [(before - layout.read(returned["model"]).cpu()) / task.lr]
    if not isinstance(reported, Iterable):
        raise ValueError(f"releases of trainer {name} must be a list of vectors, got {type(reported).__name__}")
    # On the CPU, where the battery computes: a trainer may use a GPU.
    releases = tuple(torch.as_tensor(release).detach().cpu().reshape(-1) for release in reported)
    if not releases or any(len(release) != layout.dim for release in releases):
        sizes = sorted({len(release) for release in releases})
        raise ValueError(f"releases of trainer {name} must be vectors of {layout.dim} numbers, got sizes {sizes}")
    # Tests would ignore the imaginary part of a complex number, and any value that is not finite.
    if any(release.is_complex() for release in releases) or not any(
        bool(release.isfinite().any()) for release in releases
    ):
        raise ValueError(
            f"releases of trainer {name} must be real and finite numbers, got complex ones, or none finite"
        )
    published = returned.get("published") or {}
    if not isinstance(published, Mapping):
        raise ValueError(f"published of trainer {name} must be a mapping, got {type(published).__name__}")
    _refuse_another_model(releases, before, layout.read(returned["model"]).cpu(), task, name)
    return TrainerAnswer(
        releases=releases,
        buffers={key: value.detach().cpu().clone() for key, value in returned["model"].named_buffers()},
        claim=_claim(returned.get("claim"), task, name),
        published=dict(published),
    )


def _claim(reported: Any, task: TrainerTask, name: str) -> TrainerClaim:
    """Returns the trainer's claim; the claim of the requested task if it makes none."""
    requested = TrainerClaim(events=(Gaussian(task.sample_rate, task.noise_multiplier, task.steps),))
    if reported is None:
        return requested
    known = {attribute.name for attribute in fields(TrainerClaim)}
    if not isinstance(reported, Mapping) or set(reported) - known:
        raise ValueError(f"claim of trainer {name} must be a mapping with keys of {', '.join(sorted(known))}")
    values = dict(reported)
    numbers = [values.get(key, 0.0) for key in ("epsilon", "delta")]
    if not all(isinstance(number, int | float) for number in numbers) or not isinstance(
        values.get("events", ()), Iterable
    ):
        raise ValueError(f"claim of trainer {name} must have numbers for epsilon and delta, and a list of events")
    if "events" in values:
        values["events"] = tuple(_event(event, name) for event in values["events"])
    elif "epsilon" in values:
        values["events"] = None
    return replace(requested, **values)


def _event(event: Any, name: str) -> Gaussian:
    if isinstance(event, Gaussian):
        return event
    if not isinstance(event, Sequence) or len(event) != 3:
        raise ValueError(
            f"events in the claim of trainer {name} must be (sample rate, noise multiplier, steps), got {event!r}"
        )
    rate, sigma, steps = event
    return Gaussian(float(rate), float(sigma), int(steps))
