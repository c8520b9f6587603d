"""Membership inference on a model that was trained elsewhere: each attack under its own access, and its outcome.

Every attack gets candidates in an order and under aliases of its own, a copy of the model, and no membership. Scores
are compared with the truth in `scoring`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.attacks.core import (
    AccessError,
    Attack,
    Examples,
    Knows,
    MembershipScores,
    NotApplicable,
    Requirements,
    Target,
)
from leakbench.defenses.core import keyed
from leakbench.leaderboard.records.record import Metric, RecordedRequirements

from ...catalog import methods as catalog
from ...catalog.messages import in_one_line
from ...plan.request import seed_of
from ...plan.threat_models import reads_no_step, threat_model
from ...scoring.score import score
from ...scoring.truth import GroundTruth
from ...subjects.outcome import join
from ...targets.candidates import Candidates, copied
from ...targets.observe import FinalView, PublicKnowledge, logits_of
from .shadow_answers import AnsweredBank


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A finished model and its candidates.

    Attributes:
        model: in evaluation mode; never changed.
        members: training examples.
        non_members: examples outside the training set; their ids are distinct from the members'.
        population: public examples in neither group; None for none.
        classes: number of its classes.
    """

    model: nn.Module
    members: Examples
    non_members: Examples
    population: Examples | None = None
    classes: int

    def __post_init__(self) -> None:
        shared = torch.isin(self.members.ids, self.non_members.ids)
        if bool(shared.any()):
            raise ValueError(
                f"an example must be of one group, and {int(shared.sum())} of the members are non-members as well"
            )
        for name, group in (("members", self.members), ("non_members", self.non_members)):
            if not len(group):
                raise ValueError(f"{name} must hold at least one example, got none")

    @property
    def public_knowledge(self) -> PublicKnowledge:
        """Public knowledge: shapes, and the range of the candidates' inputs."""
        ends = [(group.inputs.min(), group.inputs.max()) for group in (self.members, self.non_members)]
        return PublicKnowledge(
            input_shape=tuple(self.members.inputs.shape[1:]),
            classes=self.classes,
            low=float(min(low for low, _ in ends)),
            high=float(max(high for _, high in ends)),
            population=None if self.population is None else copied(self.population),
        )

    @property
    def offered(self) -> Knows:
        """Knowledge that an attacker may have in addition to the model, without shadow models."""
        return Knows.NOTHING if self.population is None else Knows.POPULATION


@dataclass(frozen=True, kw_only=True)
class AttackOutcome:
    """Outcome of an attack.

    Attributes:
        name: of the attack.
        settings: all of them.
        requires: its threat model, as in a record.
        metrics: by name; empty if it did not run.
        scores: of all candidates, by id; None if it did not run.
        why_not: why it did not run and how to enable it, in a sentence; empty if it ran.
        missing: knowledge that it lacks.
        failed: whether it ended with an error, rather than being inapplicable.
        seconds: wall clock.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    requires: RecordedRequirements = field(default_factory=lambda: RecordedRequirements({}))
    metrics: dict[str, Metric] = field(default_factory=dict)
    scores: MembershipScores | None = None
    why_not: str = ""
    missing: Knows = Knows.NOTHING
    failed: bool = False
    seconds: float = 0.0


Asks = Callable[[Attack[Any], Candidates, int, dict[str, Any]], MembershipScores]
"""Runs an attack on its target, about candidates, given the seed of the attack's generator and its settings."""


def final_model_attacks() -> list[str]:
    """Returns the names of the catalogue's membership attacks on a final model."""
    attacks = (catalog.attack(name) for name in catalog.names("attacks"))
    return sorted(
        attack.name for attack in attacks if attack.kind == "membership" and reads_no_step(attack.requires.access)
    )


def run_attacks(
    audited: Audited,
    attacks: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    bank: AnsweredBank | None = None,
    delta: float,
    seed: int = 0,
) -> Iterator[AttackOutcome]:
    """Runs attacks in turn; an attack that fails does not end the others.

    Args:
        audited: the model and its candidates.
        attacks: names of attacks, each with its settings.
        bank: answers of shadow models; None for none.
        delta: of the claim, for bounds on epsilon.
        seed: of the candidates' order and aliases, and of the attacks' own generators.

    Yields:
        An outcome per attack, in their order.
    """
    knows = audited.offered | (Knows.NOTHING if bank is None else Knows.SHADOWS)
    for name, chosen in attacks:
        attack = catalog.attack(name)
        settings = attack.settings(**_sized(attack, chosen, bank))
        if attack.kind != "membership" or not reads_no_step(attack.requires.access):
            why = f"{name} needs access to {attack.requires.access.value}, and a finished model shows no step"
            yield AttackOutcome(
                name=name, settings=settings, requires=RecordedRequirements(attack.requires.to_dict()), why_not=why
            )
            continue

        def asks(
            attack: Attack[Any], candidates: Candidates, seed: int, settings: Mapping[str, Any]
        ) -> MembershipScores:
            return attack(_target(audited, attack.requires, candidates, bank), keyed(seed), **settings)

        yield outcome_of(audited, attack, settings, asks, knows=knows, delta=delta, seed=seed)


def outcome_of(
    audited: Audited,
    attack: Attack[Any],
    settings: Mapping[str, Any],
    asks: Asks,
    *,
    knows: Knows,
    delta: float,
    seed: int,
) -> AttackOutcome:
    """Returns the outcome of an attack on candidates in an order and under aliases of its own.

    Args:
        audited: the model and its candidates.
        attack: the attack.
        settings: all of its settings.
        asks: runs the attack on its target.
        knows: knowledge granted to the attacker in addition to the target.
        delta: of the claim, for bounds on epsilon.
        seed: of the candidates' order and aliases, and of the attack's own generator.
    """
    about = {"name": attack.name, "settings": settings, "requires": RecordedRequirements(attack.requires.to_dict())}
    if why := attack.check(Requirements(access=attack.requires.access, knows=knows)):
        return AttackOutcome(**about, why_not=why, missing=attack.requires.knows & ~knows)
    begun = time.perf_counter()
    examples = join(audited.members, audited.non_members)
    key = {"attack": attack.name, "settings": settings, "seed": seed}
    try:
        candidates = Candidates.draw(examples, seed_of(key, "candidates"))
        scores = candidates.answers(asks(attack, candidates, seed_of(key, "attack"), copy.deepcopy(dict(settings))))
        metrics = score(scores, GroundTruth(members=audited.members.ids, candidates=examples.ids), delta=delta)
    except (NotApplicable, AccessError) as error:
        return AttackOutcome(**about, why_not=f"{attack.name} does not apply: {error}")
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        # An attack that fails on this model ends alone, and the report has its message.
        return AttackOutcome(**about, why_not=f"{attack.name} failed: {in_one_line(error)}", failed=True)
    return AttackOutcome(**about, metrics=metrics, scores=scores, seconds=time.perf_counter() - begun)


def _sized(attack: Attack, chosen: Mapping[str, Any], bank: AnsweredBank | None) -> Mapping[str, Any]:
    """Returns settings with as many shadow models as there are, unless a number is given."""
    if bank is None or "shadows" in chosen or "shadows" not in attack.defaults:
        return chosen
    return {**chosen, "shadows": bank.models}


def _target(audited: Audited, requires: Requirements, candidates: Candidates, bank: AnsweredBank | None) -> Target:
    """Returns the attack's target: copies, and functions over them."""
    shadows = bank.of(candidates.ids) if bank is not None and Knows.SHADOWS in requires.knows else None
    view = FinalView(copy.deepcopy(audited.model), audited.public_knowledge, candidates.given, shadows)
    row = threat_model("membership", requires.access)
    assert row is not None and row.build is not None  # noqa: S101  by `reads_no_step`
    return row.build(view)


def answers(model: nn.Module, examples: Examples) -> Float[Tensor, "n classes"]:
    """Returns the model's logits on examples."""
    return logits_of(model, examples.inputs)
