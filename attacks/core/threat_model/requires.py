"""Requirements of an attack: its access, its side knowledge, and its control of the training data.

A threat model is data, not a comment: the decorator `attack` attaches `Requirements` to every attack and narrows the
target to them, and a record states them next to the numbers.
"""

from dataclasses import dataclass, field
from enum import Flag, auto
from typing import ClassVar, TypeVar

T = TypeVar("T")


class AccessError(ValueError):
    """An attack read a field that it did not declare, or its target lacks a field that it declared."""


@dataclass(frozen=True)
class Access:
    """Access of the adversary: the object that it holds. Each access is a constant below.

    Attributes:
        name: name in a record.
        value: description, to complete "access to ...".
        includes: names of the accesses that this access includes.
    """

    name: str
    # Accesses compare by name; their wording may change.
    value: str = field(compare=False)
    includes: tuple[str, ...] = ()

    UPDATE: ClassVar["Access"]
    BLACK_BOX: ClassVar["Access"]
    WHITE_BOX: ClassVar["Access"]
    ALL_STEPS: ClassVar["Access"]
    BROADCAST: ClassVar["Access"]
    FEDERATED: ClassVar["Access"]
    LABEL_ONLY: ClassVar["Access"]
    ONE_OFF: ClassVar["Access"]
    ACTIVE_SERVER: ClassVar["Access"]

    def __str__(self) -> str:
        return f"Access.{self.name}"


# Defined after the class, because its body cannot create instances of it.
Access.UPDATE = Access("UPDATE", "one shared update and the model it was taken at")
Access.BLACK_BOX = Access("BLACK_BOX", "the answers of the final model")
# The parameters allow queries of the model, too.
Access.WHITE_BOX = Access("WHITE_BOX", "the parameters of the final model", includes=("BLACK_BOX",))
Access.BROADCAST = Access("BROADCAST", "the model before every step, or before every round", includes=("WHITE_BOX",))
Access.ALL_STEPS = Access(
    "ALL_STEPS", "the update and the model of every step", includes=("WHITE_BOX", "ONE_OFF", "BROADCAST")
)
Access.FEDERATED = Access("FEDERATED", "all messages of a federated client", includes=("WHITE_BOX", "BROADCAST"))
Access.LABEL_ONLY = Access("LABEL_ONLY", "the labels that the final model answers with")
Access.ACTIVE_SERVER = Access("ACTIVE_SERVER", "what a federated client answers to the server's choice of a model")
Access.ONE_OFF = Access("ONE_OFF", "releases on all the data beside the steps, and the model they were taken at")


class Knows(Flag):
    """Side knowledge of the adversary, besides its access.

    Every access includes the map of a release (mask, basis, bound), as far as it is public. `DEFENSE` grants the scale
    of its noise alone, and keeps its name because records store it.
    """

    NOTHING = 0
    LABELS = auto()
    BATCH_SIZE = auto()
    POPULATION = auto()
    DEFENSE = auto()
    OTHERS = auto()
    PRIOR = auto()
    SHADOWS = auto()


class Controls(Flag):
    """Influence of the adversary on the training: on its data, or on the model that a client trains from."""

    NOTHING = 0
    CANARIES = auto()
    MODEL = auto()


MEANING = {
    Knows.LABELS: "the labels of the batch",
    Knows.BATCH_SIZE: "the number of examples in the batch",
    Knows.POPULATION: "public examples of the population",
    Knows.DEFENSE: "the scale of the noise",
    Knows.OTHERS: "the contribution of everybody else in the batch",
    Knows.PRIOR: "candidates of which one is the record that is sought",
    Knows.SHADOWS: "shadow models that were trained as the target was",
    Controls.CANARIES: "canaries among the training data",
    Controls.MODEL: "the model that a client trains from",
    Access.WHITE_BOX: "the parameters of the model",
    Access.ALL_STEPS: "the update of every step",
    Access.ONE_OFF: "the releases beside the steps",
    Access.FEDERATED: "the messages of a client",
}
"""Meaning of each need, in the words of an error message."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """A threat model, required by an attack or offered by a target.

    Attributes:
        access: the adversary's access.
        knows: side knowledge.
        controls: influence on training; `MODEL` is that of an active server, all others are passive.
    """

    access: Access
    knows: Knows = Knows.NOTHING
    controls: Controls = Controls.NOTHING

    def grants(self, need: Access | Knows | Controls) -> bool:
        """Returns whether this threat model includes `need`."""
        if isinstance(need, Knows):
            return need in self.knows
        if isinstance(need, Controls):
            return need in self.controls
        return need == self.access or need.name in self.access.includes

    def missing_from(self, offered: "Requirements") -> list[Access | Knows | Controls]:
        """Returns the needs of this threat model that `offered` does not grant; empty when `offered` is enough."""
        # Iterating a Flag gives its single members, from Python 3.11 on.
        needs = [self.access, *self.knows, *self.controls]
        return [need for need in needs if not offered.grants(need)]

    def to_dict(self) -> dict[str, str | list[str]]:
        """Returns the names alone, for records: `{"access": "UPDATE", "knows": ["LABELS"], "controls": []}`."""
        return {
            "access": self.access.name,
            "knows": [str(need.name) for need in self.knows],
            "controls": [str(need.name) for need in self.controls],
        }


def granted(value: T | None) -> T:
    """Returns the value of a field that the attack declared; the type checker then knows that it is not None.

    Raises:
        AccessError: the field is empty, as in a transcript whose later steps lack a field that the first step has.
    """
    if value is None:
        raise AccessError("the target grants less than it promised: a field that the attack declared is empty")
    return value
