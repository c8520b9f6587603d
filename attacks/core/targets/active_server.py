"""Target of an active server: a federated client that trains from models of the attacker's choice.

An honest server sends the model that the last rounds have produced; an active one sends any model of the same
architecture, or puts a block of linear layers in front of it. Nothing else of the client is in its hands: sample rate,
clip norm, noise and message are the client's own, and every answer is charged to the client's ledger.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from ..threat_model.requires import Access, Controls, Knows, Requirements
from .network import Network
from .target import Examples, Target, check_examples, check_labels, known_of


@dataclass(frozen=True, kw_only=True)
class ImprintBlock:
    """Block that a server puts in front of a network: linear, ReLU, linear, in the shape of an input.

    Attributes:
        weight: of the first layer, a row for each bin.
        bias: of the first layer.
        back: weight of the second layer.
        shift: bias of the second layer.
    """

    weight: Float[Tensor, "bins inputs"]
    bias: Float[Tensor, " bins"]
    back: Float[Tensor, "inputs bins"]
    shift: Float[Tensor, " inputs"]

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not len(self.weight):
            raise ValueError(f"weight of a block must be [bins, inputs], got {list(self.weight.shape)}")
        bins, inputs = self.weight.shape
        for name, shape in (("bias", (bins,)), ("back", (inputs, bins)), ("shift", (inputs,))):
            if (values := getattr(self, name)).shape != shape:
                raise ValueError(f"{name} of a block must have shape {list(shape)}, got {list(values.shape)}")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, in which form a block is sent."""
        return {slot.name: getattr(self, slot.name) for slot in fields(self)}


@dataclass(frozen=True, kw_only=True)
class ActiveServer(Target):
    """`Access.ACTIVE_SERVER`: a client that answers to models of the server's choice.

    Attributes:
        release: (parameters: name -> tensor, block: `ImprintBlock.tensors` or None) -> the client's message at that
            model: an `Observation` where its examples are sought, a `SeenMessage` where their membership is
            (`Controls.MODEL`). Each call is a release of the client, charged to its ledger; a model that is not finite,
            or of other shapes, is refused.
        calls: largest number of releases.
        parameters: of the model that an honest server would send, by name.
        network: () -> operations of that model.
        logits: (parameters, inputs) -> [n, classes], outputs at any parameters; no gradient.
        gradient_norms: (parameters, inputs, labels) -> [n], L2 norm of each example's unbounded gradient at any
            parameters.
        input_shape: shape of an example.
        input_low: smallest valid input, in model-input units.
        input_high: largest valid input.
        classes: number of classes.
        labels: of the client's examples, int64 [b] (`Knows.LABELS`).
        batch_size: b (`Knows.BATCH_SIZE`).
        noise_multiplier: noise standard deviation over sensitivity (`Knows.DEFENSE`).
        population: public examples (`Knows.POPULATION`).
        informed: whether messages are given less the contributions of all other records (`Knows.OTHERS`); None if not.
        candidates: candidates of a membership test.
    """

    accesses: ClassVar[tuple[Access, ...]] = (Access.ACTIVE_SERVER,)

    release: Callable[..., Target] | None = field(default=None, metadata={"needs": Controls.MODEL, "answers": "target"})
    calls: int = 1
    parameters: Mapping[str, Tensor]
    network: Callable[[], Network]
    logits: Callable[..., Tensor]
    gradient_norms: Callable[..., Tensor]
    input_shape: tuple[int, ...]
    input_low: float
    input_high: float
    classes: int
    labels: Tensor | None = field(default=None, metadata={"needs": Knows.LABELS})
    batch_size: int | None = field(default=None, metadata={"needs": Knows.BATCH_SIZE})
    noise_multiplier: float | None = field(default=None, metadata={"needs": Knows.DEFENSE})
    population: Examples | None = field(default=None, metadata={"needs": Knows.POPULATION})
    informed: bool | None = field(default=None, metadata={"needs": Knows.OTHERS})
    candidates: Examples | None = None

    def __post_init__(self) -> None:
        if self.calls < 1:
            raise ValueError(f"calls must be at least 1, got {self.calls}")
        check_labels("labels", self.labels, self.classes)
        for name, examples in (("population", self.population), ("candidates", self.candidates)):
            check_examples(name, examples, self.input_shape, self.classes)

    @property
    def batch_size_shown(self) -> int | None:
        """Number of the client's examples, given by itself or by their labels."""
        return self.batch_size if self.labels is None else len(self.labels)

    def offered(self) -> Requirements:
        """Returns the threat model that the filled fields grant, without a call of the client."""
        controls = Controls.NOTHING if self.release is None else Controls.MODEL
        return Requirements(access=self.accesses[0], knows=known_of(self), controls=controls)
