"""Requirements of each membership attack in an audit, and the options that meet them; decided without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leakbench.attacks.core import Access, Knows, Requirements
from leakbench.leaderboard.records.audit_findings import SmallestLeak

from ...catalog import methods as catalog
from ...plan.threat_models import THREAT_MODELS

OPTIONS = {
    Knows.POPULATION: "--population FILE",
    Knows.SHADOWS: "--shadows 64 --train FILE.py:FUNCTION --trust-code, or --bank FILE",
}
"""Options that enable an attack with this required knowledge."""


@dataclass(frozen=True)
class Applicability:
    """Applicability of an attack, with its unmet requirements.

    Attributes:
        name: of the attack.
        runs: whether all requirements are met.
        needs: options that would enable it, or the requirement that no option meets; empty if it runs.
    """

    name: str
    runs: bool
    needs: str


@dataclass(frozen=True)
class PlannedSource:
    """Source of a group of examples, and their number."""

    source: str
    n: int


@dataclass(frozen=True)
class AuditPlan:
    """Attacks that an audit would run, and the smallest leak that they would show.

    Attributes:
        sources: of the groups' examples.
        attacks: those that would run, and the unmet requirements of the others.
        smallest_leak: the smallest leak that would show.
    """

    sources: dict[str, PlannedSource]
    attacks: tuple[Applicability, ...]
    smallest_leak: SmallestLeak


def applicable(
    attacks: Sequence[str], *, population: bool, shadows: bool, white_box: bool = True, transcript: bool = False
) -> list[Applicability]:
    """Returns which attacks run, and the unmet requirements of the others.

    Args:
        attacks: names.
        population: whether there are public examples.
        shadows: whether there are shadow models.
        white_box: whether the model's parameters are given.
        transcript: whether the updates of its training are given, with the scale of their noise.
    """
    offered = {Knows.POPULATION: population, Knows.SHADOWS: shadows, Knows.DEFENSE: transcript}
    knows = Knows.NOTHING
    for knowledge, available in offered.items():
        knows |= knowledge if available else Knows.NOTHING
    applicabilities = []
    for name in attacks:
        requires = catalog.attack(name).requires
        lacking = [_access(requires, white_box=white_box, transcript=transcript), *_knowledge(requires, knows)]
        needs = " and ".join(filter(None, lacking))
        applicabilities.append(Applicability(name, not needs, needs))
    return applicabilities


def way_out(missing: Knows) -> str:
    """Returns the options that provide the missing knowledge."""
    return " ".join(OPTIONS.get(knowledge, str(knowledge.name)) for knowledge in missing)


def _access(requires: Requirements, *, white_box: bool, transcript: bool) -> str:
    row = THREAT_MODELS.get(("membership", requires.access))
    if row is None:
        return requires.access.value
    if row.reads != "nothing":
        return "" if transcript else f"{requires.access.value}, of which a finished model shows nothing"
    return "" if white_box or requires.access != Access.WHITE_BOX else requires.access.value


def _knowledge(requires: Requirements, knows: Knows) -> list[str]:
    missing = requires.knows & ~knows
    options = [OPTIONS[knowledge] for knowledge in missing if knowledge in OPTIONS]
    # Other knowledge comes with a transcript, except for `_MEANING`, which no option provides.
    others = [_MEANING[knowledge] for knowledge in missing if knowledge in _MEANING]
    return [" ".join(options), *others]


_MEANING = {
    Knows.OTHERS: "what everybody else contributed to each update, which only who trained the model can say",
    Knows.PRIOR: "candidates of which one is the record that is sought",
}
