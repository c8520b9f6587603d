"""Base class of the targets of attacks, and checks that the targets share.

No target holds the secret itself, private inputs or membership. A field that the access alone does not grant, such as
the labels, names the required knowledge in its metadata, and `narrow` withholds it from attacks that did not declare
this knowledge.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..threat_model.requires import Access, Knows, Requirements


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Labelled examples with an identity.

    Attributes:
        ids: int64 [n], distinct.
        inputs: [n, *shape], in model-input units.
        labels: int64 [n], class indices.
    """

    ids: Tensor
    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        counts = [len(self.ids), len(self.inputs), len(self.labels)]
        if len(set(counts)) != 1 or self.ids.ndim != 1 or self.labels.ndim != 1:
            raise ValueError(f"ids, inputs and labels must have one entry an example, got {counts} entries")
        for name, values in (("ids", self.ids), ("labels", self.labels)):
            if values.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, got {values.dtype}")
        if self.ids.unique().numel() != self.ids.numel():
            raise ValueError("ids must be distinct, got an id twice: scores are matched to members by id")
        if not self.inputs.isfinite().all():
            raise ValueError("inputs must be finite, got NaN or infinity")

    def __len__(self) -> int:
        return len(self.ids)


class Target:
    """Base of an attack's targets: a dataclass for each kind of view of a training.

    A field that the access alone does not grant has `metadata={"needs": ...}`, and `narrow` withholds it from attacks
    that did not declare this need. A new access is a new subclass, or a constant added to the `accesses` of a subclass.

    Attributes:
        accesses: accesses for which an attack's target is annotated as this class.
        candidates: candidates of a membership test; None without such a test.
    """

    accesses: ClassVar[tuple[Access, ...]] = ()
    candidates: Examples | None

    def offered(self) -> Requirements:
        """Returns the threat model that the filled fields grant, without calling the target's functions."""
        return Requirements(access=self.accesses[0], knows=known_of(self))

    @property
    def batch_size_shown(self) -> int | None:
        """Size of the batch, also for attacks that may not read it; None if there is no batch."""
        return None

    def refuse_two_devices(self) -> None:
        """Raises ValueError if its tensors are on several devices; calls no function, and reads no lazy step."""
        first, device = "", None
        for name, values in _tensors_of(vars(self)):
            if device is None:
                first, device = name, values.device
            elif values.device != device:
                raise ValueError(
                    f"tensors of an attack's target must be on one device, got {first} on {device} and {name} on "
                    f"{values.device}; move {name} with .to({str(device)!r})"
                )


def _tensors_of(named: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors with their names, also those of nested dataclasses and mappings."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", part) for key, part in _tensors_of(value))
        elif is_dataclass(value) and not callable(value):
            yield from ((f"{name}.{key}", part) for key, part in _tensors_of(vars(value)))


def check_labels(name: str, labels: Tensor | None, classes: int) -> None:
    """Raises ValueError unless labels are None, or int64 of shape [n] and below the number of classes."""
    if labels is None:
        return
    if labels.ndim != 1 or labels.dtype != torch.int64:
        raise ValueError(f"{name} must be int64 of shape [n], got {labels.dtype} {list(labels.shape)}")
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ValueError(f"{name} must be in [0, {classes}), got {int(labels.min())} to {int(labels.max())}")


def check_examples(name: str, examples: Examples | None, input_shape: tuple[int, ...], classes: int) -> None:
    """Raises ValueError unless examples are None, or have inputs of this shape and valid labels."""
    if examples is None:
        return
    if tuple(examples.inputs.shape[1:]) != tuple(input_shape):
        raise ValueError(f"{name} must have inputs of shape {input_shape}, got {tuple(examples.inputs.shape[1:])}")
    check_labels(f"labels of {name}", examples.labels, classes)


def known_of(target: Target) -> Knows:
    """Returns the side knowledge whose fields are filled."""
    known = Knows.NOTHING
    for slot in fields(cast(Any, target)):
        need = slot.metadata.get("needs")
        if isinstance(need, Knows) and getattr(target, slot.name) is not None:
            known |= need
    return known
