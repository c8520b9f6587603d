"""Table of the kinds of result: what a record measures (utility, membership, ...), and its words on boards and pages.

Records and manifests validate their kind against it; rows, controls, text and page loop over it. A new kind is a row
here, its metrics (`metrics.py`) and the code that computes it (CONTRIBUTING.md names its files). Standard library only.
"""

from dataclasses import dataclass
from typing import Literal

ControlRole = Literal["positive", "negative", "public_only"]
"""Role of a row that must leak (positive), must not leak (negative), or shows what public examples alone achieve."""

JUDGED: tuple[ControlRole, ...] = ("positive", "negative")
"""Roles with an expectation that a board compares with the measurement."""


@dataclass(frozen=True, kw_only=True)
class NoiseVariant:
    """Form in which the target was released; its name is `task.noise` in records.

    Attributes:
        name: in records, manifests and suite files.
        label: for a table's row or a picture, as "no noise".
        preposition: before "noise" in running text, as "without".
        adjective: for a missing record, as in "no noise-free reconstruction record".
        needs_noise: whether it exists only for defenses that add noise.
    """

    name: str
    label: str
    preposition: str
    adjective: str
    needs_noise: bool = False


@dataclass(frozen=True, kw_only=True)
class KindOfResult:
    """Kind of result and its words.

    Attributes:
        name: in records and manifests.
        main: metric by which attacks are compared and controls judged; it has a column of the board, and its n is the
            sample size that a board states.
        counts: unit of that sample size, in the plural.
        attacked: whether its records have an attack.
        target: subject of the attack if it is not the trained model; empty for the trained model. Records of such a
            kind have tasks of their own, and join the row of every training of the same suite, defense and budget.
        variants: forms in which the target is released; empty for a single form.
        question: the attacks' question, as a predicate; empty without attacks.
        absent: phrase for a table without this kind, completed on a page by "in these records"; empty for none.
        powerless: predicate for an attack near chance on a positive control, with "{}" for the defense; empty if
            chance is no single value.
        controls: roles of the controls that it judges.
        pictured: whether its arrays are images, which a page shows next to their originals.
    """

    name: str
    main: str
    counts: str
    attacked: bool = True
    target: str = ""
    variants: tuple[NoiseVariant, ...] = ()
    question: str = ""
    absent: str = ""
    powerless: str = ""
    controls: tuple[ControlRole, ...] = JUDGED
    pictured: bool = False

    @property
    def own_task(self) -> bool:
        """True if its records have tasks of their own, instead of the training's."""
        return bool(self.target)

    def variant(self, name: str | None) -> NoiseVariant | None:
        """Returns the variant of a name; None if there is no such variant."""
        return next((variant for variant in self.variants if variant.name == name), None)

    def noise_words(self, name: str | None) -> str:
        """Phrase after an attack's name in a sentence, as " without noise"; empty without a variant."""
        variant = self.variant(name)
        return "" if variant is None else f" {variant.preposition} noise"


_OF_UPDATE = (
    # The release without its noise shows how much codec and bound hide by themselves.
    NoiseVariant(name="none", label="no noise", preposition="without", adjective="noise-free"),
    NoiseVariant(name="calibrated", label="with noise", preposition="with", adjective="noisy", needs_noise=True),
)

_TABLE = (
    # Accuracy judges no control: a model may leak at any score on held-out data.
    KindOfResult(name="utility", main="accuracy", counts="test examples", attacked=False, controls=()),
    # Federated trainings alone have the next two.
    KindOfResult(name="federation", main="bytes_up", counts="messages", attacked=False, controls=()),
    KindOfResult(name="rounds", main="round_accuracy", counts="rounds", attacked=False, controls=()),
    KindOfResult(
        name="membership",
        main="auc",
        counts="candidates",
        question="asked who was in the training set",
        absent="no membership attack",
        powerless="does not tell the members of {} itself",
    ),
    KindOfResult(
        name="reconstruction",
        main="psnr",
        counts="images",
        target="one shared update",
        variants=_OF_UPDATE,
        question="asked for the images behind one shared update",
        absent="no attack on the images of a shared update",
        pictured=True,
    ),
    KindOfResult(
        name="labels",
        main="label_overlap",
        counts="batches",
        target="one shared update",
        variants=_OF_UPDATE,
        question="asked for the labels behind one shared update",
        absent="no attack on the labels of a shared update",
        # Another batch may have the same labels, so a negative control would fail by chance.
        controls=("positive",),
    ),
    KindOfResult(
        name="client_property",
        main="classes_named",
        counts="clients",
        question="asked which classes a client's examples are of",
        # A client's classes are no record: a claim for records allows any answer, and a training on other examples has
        # classes, too, so neither control would fail.
        controls=(),
    ),
    KindOfResult(
        name="canaries",
        main="canary_epsilon",
        counts="canaries",
        question="asked which canaries were put into the training",
        # A bound above 0 occurs by chance in 1 of 20 trainings, so a negative control would fail as often.
        controls=("positive",),
    ),
)

KINDS = {kind.name: kind for kind in _TABLE}
"""Name -> kind, in the order of a board's columns. Read at the place of use, never copied at import, so that a row
added while a program runs is seen everywhere."""


def attacked() -> list[KindOfResult]:
    """Returns the kinds that have attacks, in the order of the table."""
    return [kind for kind in KINDS.values() if kind.attacked]
