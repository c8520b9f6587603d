"""Membership attacks on a training transcript: all attacks of the catalogue that read updates or whole runs.

Attacks on a single update run on each step, and their scores are summed. Scores of attacks that know the noise are log
likelihood ratios in nats, which are first mixed over the record's participation, at the claimed sampling rate. Other
records' contributions are not in a transcript, so attacks that subtract them report why they did not run.

Candidates get an order and aliases independent of membership, as for attacks on the final model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leakbench.attacks.core import Access, Attack, Examples, Knows, MembershipScores
from leakbench.defenses.core import keyed
from leakbench.leaderboard.records.record import RecordedRequirements

from ...catalog import methods as catalog
from ...plan.threat_models import reads_no_step
from ...targets.candidates import Candidates
from ..claim import StatedClaim
from ..model.attacks import AttackOutcome, Audited, outcome_of
from .format import WatchedTranscript
from .view import TranscriptView

MOST_GRADIENTS = 100_000
"""Most gradients of candidates, summed over steps, for an attack on single updates; beyond it steps are subsampled."""


def transcript_attacks() -> list[str]:
    """Names of the catalogue's membership attacks that read updates of a training."""
    attacks = (catalog.attack(name) for name in catalog.names("attacks"))
    return sorted(
        attack.name
        for attack in attacks
        if attack.kind == "membership"
        and attack.requires.access != Access.FEDERATED  # messages of clients are in no transcript of a training
        and not reads_no_step(attack.requires.access)
    )


def run_on_transcript(
    audited: Audited,
    transcript: WatchedTranscript,
    attacks: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    claim: StatedClaim | None = None,
    delta: float,
    seed: int = 0,
) -> Iterator[AttackOutcome]:
    """Runs attacks on the releases of a training; an attack that cannot run does not end the others.

    Args:
        audited: the final model with members and non-members.
        transcript: of its training.
        attacks: names of attacks, each with its settings.
        claim: states the sampling; without it full participation is assumed, which only weakens attacks.
        delta: of the claim, at which bounds on epsilon are computed.
        seed: of the candidates' order and aliases, and of the attacks' generators.

    Yields:
        An outcome per attack, in their order.
    """
    knows = audited.offered | Knows.DEFENSE
    read = min(max(1, MOST_GRADIENTS // (len(audited.members) + len(audited.non_members))), len(transcript))
    for name, chosen in attacks:
        attack = catalog.attack(name)
        settings = attack.settings(**chosen)
        if Knows.OTHERS in attack.requires.knows & ~knows:
            why = f"{name} needs what everybody else contributed to each update, which is in no transcript"
            yield AttackOutcome(
                name=name, settings=settings, requires=RecordedRequirements(attack.requires.to_dict()), why_not=why
            )
            continue

        def asks(
            attack: Attack[Any], candidates: Candidates, seed: int, settings: Mapping[str, Any]
        ) -> MembershipScores:
            return _scores(attack, _view(audited, transcript, candidates.given, claim, read), seed, settings)

        outcome = outcome_of(audited, attack, settings, asks, knows=knows, delta=delta, seed=seed)
        yield (
            replace(outcome, settings={**settings, "steps": f"{read} of {len(transcript)}"})
            if outcome.scores
            else outcome
        )


def _view(
    audited: Audited, transcript: WatchedTranscript, candidates: Examples, claim: StatedClaim | None, steps: int
) -> TranscriptView:
    """Builds a view of a given number of steps, evenly over the training."""
    public = audited.public_knowledge
    everybody = claim is None or claim.sampling == "full" or claim.sample_rate is None
    return TranscriptView(
        transcript=transcript,
        model=audited.model,
        # On the CPU, where a transcript is read.
        public_knowledge=replace(public, population=None if public.population is None else _on_cpu(public.population)),
        candidates=_on_cpu(candidates),
        sample_rate=1.0 if claim is None or claim.sample_rate is None or everybody else claim.sample_rate,
        independent=claim is None or claim.sampling in ("", "poisson", "full"),
        most_steps=steps,
    )


def _on_cpu(examples: Examples) -> Examples:
    return Examples(ids=examples.ids.cpu(), inputs=examples.inputs.cpu(), labels=examples.labels.cpu())


def _scores(attack: Attack[Any], view: TranscriptView, seed: int, settings: Mapping[str, Any]) -> MembershipScores:
    if attack.requires.access in (Access.ALL_STEPS, Access.BROADCAST):
        return attack(view.seen(), keyed(seed), **settings)
    return view.scores(attack, log_ratio=Knows.DEFENSE in attack.requires.knows, **settings)
