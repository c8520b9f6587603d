"""What each membership attack needs of an audit, and the option that would give it; decided without any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leakbench.attacks.core import Access, Knows, Requirements

from ...catalog import methods as catalog
from ...plan.threat_models import THREAT_MODELS

OPTIONS = {
    Knows.POPULATION: "--population FILE",
    Knows.SHADOWS: "--shadows 64 --train FILE.py:FUNCTION --trust-code, or --bank FILE",
}
"""What enables an attack that needs to know this."""


@dataclass(frozen=True)
class Applicability:
    """Whether an attack runs, and what it lacks.

    Attributes:
        name: of the attack.
        runs: whether all that it needs is there.
        needs: the options that would enable it, or what no option gives; empty where it runs.
    """

    name: str
    runs: bool
    needs: str


def applicable(
    attacks: Sequence[str], *, population: bool, shadows: bool, white_box: bool = True, transcript: bool = False
) -> list[Applicability]:
    """What runs of some attacks, and what the others need.

    Args:
        attacks: names.
        population: whether there are public examples.
        shadows: whether there are shadow models.
        white_box: whether there are the model's parameters.
        transcript: whether there are the updates of its training, with the scale of their noise.
    """
    given = {Knows.POPULATION: population, Knows.SHADOWS: shadows, Knows.DEFENSE: transcript}
    knows = Knows.NOTHING
    for one, there in given.items():
        knows |= one if there else Knows.NOTHING
    found = []
    for name in attacks:
        requires = catalog.attack(name).requires
        lacking = [_access(requires, white_box=white_box, transcript=transcript), *_knowledge(requires, knows)]
        needs = " and ".join(filter(None, lacking))
        found.append(Applicability(name, not needs, needs))
    return found


def way_out(missing: Knows) -> str:
    """The options that give what is missing."""
    return " ".join(OPTIONS.get(one, str(one.name)) for one in missing)


def _access(requires: Requirements, *, white_box: bool, transcript: bool) -> str:
    row = THREAT_MODELS.get(("membership", requires.access))
    if row is None:
        return requires.access.value
    if row.reads != "nothing":
        return "" if transcript else f"{requires.access.value}, of which a finished model shows nothing"
    return "" if white_box or requires.access != Access.WHITE_BOX else requires.access.value


def _knowledge(requires: Requirements, knows: Knows) -> list[str]:
    missing = requires.knows & ~knows
    options = [OPTIONS[one] for one in missing if one in OPTIONS]
    # What a transcript holds beside updates comes with it; what it cannot hold, nothing here gives.
    others = [_MEANING[one] for one in missing if one in _MEANING]
    return [" ".join(options), *others]


_MEANING = {
    Knows.OTHERS: "what everybody else contributed to each update, which only who trained the model can say",
    Knows.PRIOR: "candidates of which one is the record that is sought",
}
