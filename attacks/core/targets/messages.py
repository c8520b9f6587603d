"""Messages of a federated client, as the server sees them over all rounds.

A message is the displacement of the model by tau local steps. If optimizer and client rule are linear, it is a known
combination of the steps' noisy sums: minus the displacement, times the expected batch over the mean rate, less the
public part of the rule's correction, is w = sum_t a_t S_t with public weights a_t (1 for plain SGD at a constant rate).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..threat_model.requires import Access, AccessError, Knows, Requirements
from .observation import ModelAccess, Participation, SeenModels, refuse_iterators
from .target import Examples, Target, check_examples, known_of


@dataclass(frozen=True, kw_only=True)
class SeenMessage(Target):
    """A message of a client, and the model that the server had sent.

    Vectors of the parameters are flat, in the order of `slices`; what a mask drops is 0, what a projection keeps lies
    in its subspace.

    Attributes:
        round: index of the round, from 0.
        global_model: the model that the server had sent.
        slices: name of a trained parameter -> (start, stop) in a flat vector.
        sent: the numbers of the message, by name, as sent.
        displacement: local model minus global model [dim], as the server decodes it.
        sums: w [dim], the weighted sum of the local steps' undivided noisy sums; None if it does not follow.
        why_no_sums: reason for that, a sentence; empty otherwise.
        weights: a_t of each local step; empty without `sums`.
        contributions: (inputs, labels) -> [n, dim], the addition of each example to the undivided sum of a local step,
            taken at the global model, where the first step takes it; no gradient. Raises `NotApplicable` without
            `sums`.
        gradients: (inputs, labels) -> [n, dim], unbounded gradients at the global model.
        sample_rate: probability that a record takes part in a local step.
        participation: as for an `Observation`.
        noise_std: standard deviation of the noise of a single local step on the undivided sums, along any direction
            that they can take; 0 without noise (`Knows.DEFENSE`).
        others_removed: (part, a slice of the candidates; all by default) -> [part, dim] in float64, per candidate w
            less the contributions of all other records (`Knows.OTHERS`), rounded to float32. Each row is the knowledge
            of a separate adversary, and rows share the noise: a candidate's score may use its own row only.
        population: public examples (`Knows.POPULATION`).
        candidates: candidates of a membership test.
    """

    accesses: ClassVar[tuple[Access, ...]] = ()

    round: int
    global_model: ModelAccess
    slices: Mapping[str, tuple[int, int]]
    sent: Mapping[str, Tensor]
    displacement: Tensor
    sums: Tensor | None = None
    why_no_sums: str = ""
    weights: tuple[float, ...] = ()
    contributions: Callable[..., Tensor]
    gradients: Callable[..., Tensor]
    sample_rate: float = 1.0
    participation: Participation = "known"
    noise_std: float | None = field(default=None, metadata={"needs": Knows.DEFENSE})
    others_removed: Callable[..., Tensor] | None = field(default=None, metadata={"needs": Knows.OTHERS})
    population: Examples | None = field(default=None, metadata={"needs": Knows.POPULATION})
    candidates: Examples | None = None

    def __post_init__(self) -> None:
        if (self.sums is None) != bool(self.why_no_sums) or (self.sums is None) != (not self.weights):
            raise ValueError("sums must come with weights, and their absence with why_no_sums")
        for name, values in (("displacement", self.displacement), ("sums", self.sums)):
            if values is not None and values.shape != self.displacement.shape:
                raise ValueError(
                    f"{name} must have one entry a parameter, got {list(values.shape)} for "
                    f"{list(self.displacement.shape)}"
                )
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")
        if self.noise_std is not None and not 0 <= self.noise_std < math.inf:
            raise ValueError(f"noise_std must be at least 0 and finite, got {self.noise_std}")
        model = self.global_model
        check_examples("population", self.population, model.input_shape, model.classes)


@dataclass(frozen=True, kw_only=True)
class SeenMessages(SeenModels, Target):
    """`Access.FEDERATED`: all messages of a client, and the model before every round of the run.

    Attributes:
        messages: a message per round in which the client replied, in order; may be lazy, but every `iter` starts at the
            first message again.
        models: the model before every round, with those in which the client did not take part.
        candidates: candidates of a membership test; None without such a test.
        final: the trained model.
        controls: the adversary's influence on the training data.
    """

    accesses: ClassVar[tuple[Access, ...]] = (Access.FEDERATED,)

    messages: Iterable[SeenMessage] = field(default=(), metadata={"needs": Access.FEDERATED})

    def __post_init__(self) -> None:
        refuse_iterators(models=self.models, messages=self.messages)

    def offered(self) -> Requirements:
        """Returns the threat model of the first message.

        Raises:
            AccessError: the client sent nothing.
        """
        first = next(iter(self.messages), None)
        if first is None:
            raise AccessError("the client sent no message, so there is nothing to attack")
        return Requirements(access=Access.FEDERATED, knows=known_of(first), controls=self.controls)
