"""Description of network and update as plain data, for closed-form attacks; every holder of the model has it.

A search for inputs needs only functions of guessed data (`Observation.simulate`). A closed form needs the equations:
the sequence of operations, their parameters, and the coordinate of a parameter's gradient that each released number is.
Both are public: the server sent the model, and masks and bases are fixed before a batch is drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..threat_model.attack_errors import InconsistentObservation, NotApplicable

LossName = Literal["cross_entropy", "logistic", "other"]
PartKind = Literal["coordinates", "directions", "other"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of the forward pass.

    Attributes:
        name: name of the operation and of its result, unique in the network.
        kind: `input`; `linear`, `conv2d`, `avg_pool2d`, `batch_norm` (in evaluation mode: an affine map per channel),
            `flatten`; `relu`, `leaky_relu`, `tanh`, `sigmoid`, `identity`; `add` (of its inputs); else `other`.
        inputs: names of the operations whose results it takes.
        shape: shape of its result for an example.
        weight: name of its weight among the parameters; None without a weight.
        bias: name of its bias.
        settings: plain numbers: `stride`, `padding`, `dilation`, `kernel_size` (pairs) and `groups` of a convolution or
            pooling, `slope` of a leaky ReLU, `eps` of a batch norm and the names of its `mean` and `variance`.
        words: description by the model's own names, for messages.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    weight: str | None = None
    bias: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network, from its input to its logits.

    Attributes:
        operations: operations in the order of computation; the last gives the logits.
        parameters: name -> values at the attacked step; buffers too.
        loss: the loss per example.
    """

    operations: tuple[Operation, ...]
    parameters: Mapping[str, Tensor] = field(repr=False)
    loss: LossName

    def chain(self) -> tuple[Operation, ...]:
        """Returns the operations if each takes only the result of the operation before it.

        Raises:
            NotApplicable: the network branches.
        """
        for before, operation in zip(self.operations, self.operations[1:], strict=False):
            if operation.inputs != (before.name,):
                raise NotApplicable(
                    f"the network must be a chain of layers, and {operation.words or operation.name} takes "
                    f"{', '.join(operation.inputs)}"
                )
        return self.operations


@dataclass(frozen=True, kw_only=True)
class ReleasedPart:
    """Released values of a block of a step (a plan's unit of encoding, bounding and noise).

    Attributes:
        start: index of its first value in `released`.
        stop: index after the last.
        kind: `coordinates`: sums of single coordinates of gradients; `directions`: inner products with directions;
            `other`: anything else.
        coordinates: int64 [stop - start], indices into the flat gradient.
        factors: [stop - start], factor by which each coordinate was multiplied; None for 1.
        spans: range (first, index after the last) of the flat gradient that each basis covers.
        bases: [last - first, k] each, orthonormal columns.
        of_gradient: whether the values are of the gradient at the step's parameters, and go into the update.
        words: description of the release, for messages.
    """

    start: int
    stop: int
    kind: PartKind
    coordinates: Tensor | None = field(default=None, repr=False)
    factors: Tensor | None = field(default=None, repr=False)
    spans: tuple[tuple[int, int], ...] = ()
    bases: tuple[Tensor, ...] = field(default=(), repr=False)
    of_gradient: bool = True
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class SharedGradient:
    """Gradient of a parameter, as far as an update shows it.

    Attributes:
        values: in the parameter's shape; 0 if not released.
        group: int64, in the same shape: number of the released part; coordinates of a part were bounded together and
            share each example's clip factor. -1 if not released.
    """

    values: Tensor
    group: Tensor

    @property
    def observed(self) -> Tensor:
        """Bool, in the parameter's shape: released coordinates."""
        return self.group >= 0

    @property
    def whole(self) -> bool:
        """True if every coordinate was released."""
        return bool(self.observed.all())


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Network behind an update, and which part of its gradient each released number is.

    Attributes:
        network: the network at the parameters of the step; None if its forward pass could not be split into operations.
        names: names of the trained parameters, in the order of the flat gradient.
        shapes: their shapes.
        parts: parts of the released vector, in its order.
        why_no_network: the reason, a sentence, if there is no network.
    """

    network: Network | None
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[ReleasedPart, ...]
    why_no_network: str = ""

    @property
    def dim(self) -> int:
        """Length of the flat gradient."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def known_network(self) -> Network:
        """Returns the network.

        Raises:
            NotApplicable: there is none, with the reason.
        """
        if self.network is None:
            raise NotApplicable(f"the operations of the model must be known: {self.why_no_network}")
        return self.network

    def check_length(self, released: Tensor) -> None:
        """Refuses a release of another length than the plan's.

        Raises:
            InconsistentObservation: the length differs, so the mask or basis is not the known mask or basis.
        """
        own = max((part.stop for part in self.parts), default=0)
        if len(released) != own:
            raise InconsistentObservation(
                f"released must have {own} numbers, one for each that the plan releases, got {len(released)}: another "
                "mask, basis or model"
            )

    def gradients(self, released: Tensor) -> dict[str, SharedGradient]:
        """Returns the gradient of each trained parameter, as far as it was released.

        Args:
            released: [m], values in the order of the release: the release itself, or its standard deviations.

        Returns:
            Gradients by name of the parameter.

        Raises:
            NotApplicable: a part of the update is not coordinates of the gradient, or a coordinate was released twice.
            InconsistentObservation: the length differs from the plan's.
        """
        self.check_length(released)
        parts = [part for part in self.parts if part.of_gradient]
        if not parts or any(part.kind != "coordinates" for part in parts):
            released_instead = " and ".join(part.words or part.kind for part in self.parts)
            raise NotApplicable(
                "the update must release coordinates of one gradient, and it releases "
                f"{released_instead}; inverting_gradients attacks any update"
            )
        values = released.new_zeros(self.dim)
        group = torch.full((self.dim,), -1, dtype=torch.int64, device=released.device)
        for number, part in enumerate(parts):
            if part.coordinates is None:
                raise ValueError("coordinates must be given of a part of coordinates, got None")
            coordinates, shown = part.coordinates.to(released.device), released[part.start : part.stop]
            if part.factors is not None:
                # A coordinate that was multiplied by 0 is only noise.
                factors = part.factors.to(released)
                shown, coordinates = shown[factors != 0] / factors[factors != 0], coordinates[factors != 0]
            if bool((group[coordinates] >= 0).any()):
                raise NotApplicable("the update must release a coordinate once, and it releases some in two parts")
            values[coordinates], group[coordinates] = shown, number
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        spans = zip(self.names, self.shapes, values.split(sizes), group.split(sizes), strict=True)
        return {n: SharedGradient(values=v.view(shape), group=g.view(shape)) for n, shape, v, g in spans}
