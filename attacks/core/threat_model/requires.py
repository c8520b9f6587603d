"""What an attack needs: the access it has, what it knows beside, and what it controls.

A threat model is data, not a comment: the decorator `attack` attaches `Requirements` to every attack and narrows the
target to them, and a record states them beside the numbers.
"""

from dataclasses import dataclass, field
from enum import Flag, auto
from typing import ClassVar, TypeVar

T = TypeVar("T")


class AccessError(ValueError):
    """An attack touched, or was called without, something that its threat model has to grant."""


@dataclass(frozen=True)
class Access:
    """What the adversary holds; another access is another constant below.

    Attributes:
        name: as in a record.
        value: completes "access to ...".
        includes: names of the accesses that who has this one has as well.
    """

    name: str
    # An access is its name; how a sentence words it may change.
    value: str = field(compare=False)
    includes: tuple[str, ...] = ()

    UPDATE: ClassVar["Access"]
    BLACK_BOX: ClassVar["Access"]
    WHITE_BOX: ClassVar["Access"]
    ALL_STEPS: ClassVar["Access"]
    FEDERATED: ClassVar["Access"]
    LABEL_ONLY: ClassVar["Access"]
    ONE_OFF: ClassVar["Access"]

    def __str__(self) -> str:
        return f"Access.{self.name}"


# Behind the class, because its body cannot make instances of it.
Access.UPDATE = Access("UPDATE", "one shared update and the model it was taken at")
Access.BLACK_BOX = Access("BLACK_BOX", "the answers of the final model")
# Who has the parameters can ask the model, too.
Access.WHITE_BOX = Access("WHITE_BOX", "the parameters of the final model", includes=("BLACK_BOX",))
Access.ALL_STEPS = Access("ALL_STEPS", "the update and the model of every step", includes=("WHITE_BOX", "ONE_OFF"))
Access.FEDERATED = Access("FEDERATED", "the updates of federated clients", includes=("WHITE_BOX",))
Access.LABEL_ONLY = Access("LABEL_ONLY", "the labels that the final model answers with")
Access.ONE_OFF = Access("ONE_OFF", "releases on all the data beside the steps, and the model they were taken at")


class Knows(Flag):
    """What the adversary knows beside its access."""

    NOTHING = 0
    LABELS = auto()
    BATCH_SIZE = auto()
    POPULATION = auto()
    DEFENSE = auto()
    OTHERS = auto()
    PRIOR = auto()
    SHADOWS = auto()


class Controls(Flag):
    """What the adversary may put into training."""

    NOTHING = 0
    CANARIES = auto()


MEANING = {
    Knows.LABELS: "the labels of the batch",
    Knows.BATCH_SIZE: "the number of examples in the batch",
    Knows.POPULATION: "public examples of the population",
    Knows.DEFENSE: "the scale of the noise",
    Knows.OTHERS: "the contribution of everybody else in the batch",
    Knows.PRIOR: "candidates of which one is the record that is sought",
    Knows.SHADOWS: "shadow models that were trained as the target was",
    Controls.CANARIES: "canaries among the training data",
    Access.WHITE_BOX: "the parameters of the model",
}
"""What each need is, in the words of an error message."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """A threat model: asked for by an attack, or offered by a target.

    Attributes:
        access: what is attacked.
        knows: side knowledge.
        controls: influence on training.
    """

    access: Access
    knows: Knows = Knows.NOTHING
    controls: Controls = Controls.NOTHING

    def grants(self, need: Access | Knows | Controls) -> bool:
        """Whether this threat model includes `need`."""
        if isinstance(need, Knows):
            return need in self.knows
        if isinstance(need, Controls):
            return need in self.controls
        return need == self.access or need.name in self.access.includes

    def missing_from(self, offered: "Requirements") -> list[Access | Knows | Controls]:
        """What is asked for here and not granted by `offered`; empty when `offered` is enough."""
        # Iterating a Flag gives its single members, from Python 3.11 on.
        asked = [self.access, *self.knows, *self.controls]
        return [need for need in asked if not offered.grants(need)]

    def to_dict(self) -> dict[str, str | list[str]]:
        """Names alone, for records: `{"access": "UPDATE", "knows": ["LABELS"], "controls": []}`."""
        return {
            "access": self.access.name,
            "knows": [str(need.name) for need in self.knows],
            "controls": [str(need.name) for need in self.controls],
        }


def granted(value: T | None) -> T:
    """The value of a field that the attack declared, for the type checker's sake.

    Raises:
        AccessError: the field is empty: of a target that was built step by step, a later step lacks what the
            first had.
    """
    if value is None:
        raise AccessError("the target grants less than it promised: a field that the attack declared is empty")
    return value
