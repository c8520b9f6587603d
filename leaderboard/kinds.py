"""The one table of kinds of result: what a record can be about, and what boards, pages and checks say of each kind.

Records and manifests validate their kind against it; rows, controls, text and page are made by looping over it. Another
kind is another row here, besides its metrics (`metrics.py`) and whatever computes it. Standard library only.
"""

from dataclasses import dataclass
from typing import Literal

ControlRole = Literal["positive", "negative"]
"""A row that must leak, or one that must not."""


@dataclass(frozen=True, kw_only=True)
class NoiseVariant:
    """One form in which the target was released; records have its name as `task.noise`.

    Attributes:
        name: in records, manifests and suite files.
        label: for a table's row or a picture, as "no noise".
        preposition: before "noise" in running text, as "without".
        adjective: of a record that is missing, as in "no noise-free reconstruction record".
        needs_noise: whether it exists only for defenses that add noise.
    """

    name: str
    label: str
    preposition: str
    adjective: str
    needs_noise: bool = False


@dataclass(frozen=True, kw_only=True)
class KindOfResult:
    """What is known of a kind of result.

    Attributes:
        name: in records and manifests.
        main: its metric by which attacks are compared and controls are judged, and whose n says how many were counted;
            it has a column of the board.
        counts: what n of its metrics counts, in the plural.
        attacked: whether its records have an attack.
        target: what is attacked, where it is not the trained model. Its records then have tasks of their own, and join
            the row of every training of the same suite, defense and budget. Empty for the trained model.
        variants: the forms in which the target is released; empty where there is one form only.
        question: what its attacks asked, as a predicate; empty without attacks.
        absent: what a page says of a table without it; empty for nothing.
        powerless: what a page says of an attack that is near chance on a positive control, with "{}" for the defense;
            empty where chance is no single value.
        controls: roles that it judges.
        pictured: whether its arrays are images, which a page shows beside their originals.
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
    controls: tuple[ControlRole, ...] = ("positive", "negative")
    pictured: bool = False

    @property
    def own_task(self) -> bool:
        """Whether its records have tasks of their own, instead of the training's."""
        return bool(self.target)

    def variant(self, name: str | None) -> NoiseVariant | None:
        """The variant of a name; None for no or another name."""
        return next((variant for variant in self.variants if variant.name == name), None)

    def noise_words(self, name: str | None) -> str:
        """What follows an attack's name in a sentence, as " without noise"; empty where there is no variant."""
        variant = self.variant(name)
        return "" if variant is None else f" {variant.preposition} noise"


_OF_UPDATE = (
    # Without its noise a release shows what codec and bound hide by themselves.
    NoiseVariant(name="none", label="no noise", preposition="without", adjective="noise-free"),
    NoiseVariant(name="calibrated", label="with noise", preposition="with", adjective="noisy", needs_noise=True),
)

_TABLE = (
    # No control is judged by accuracy: a model may leak whatever it scores on held-out data.
    KindOfResult(name="utility", main="accuracy", counts="test examples", attacked=False, controls=()),
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
        # A batch of another may have the same labels, so that a negative control would fail by chance.
        controls=("positive",),
    ),
    KindOfResult(
        name="canaries",
        main="canary_epsilon",
        counts="canaries",
        question="asked which canaries were put into the training",
        # A bound above 0 comes by chance with one training in twenty, so that a negative control would fail as often.
        controls=("positive",),
    ),
)

KINDS = {kind.name: kind for kind in _TABLE}
"""Name -> what is known of it, in the order of a board's columns. Read where it is used, never copied at import, so
that a row added while a program runs is seen everywhere."""


def attacked() -> list[KindOfResult]:
    """The kinds that have attacks, in the order of the table."""
    return [kind for kind in KINDS.values() if kind.attacked]
