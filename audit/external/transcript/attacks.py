"""Membership attacks on the transcript of a training: every one of the catalogue that reads updates or whole runs.

Attacks on one update are run on each step and their scores added up. Those that know the noise have log likelihood
ratios in nats, which are first mixed over whether the record took part, at the sampling rate of the claim. What every
other record contributed is in no transcript, so attacks that take it away say why they did not run.

Candidates get an order and aliases that tell nothing of membership, as for attacks on the final model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from leakbench.attacks.core import Access, Attack, Examples, Knows, MembershipScores
from leakbench.defenses.core import keyed

from ...catalog import methods as catalog
from ...targets.candidates import Candidates
from ..claim import StatedClaim
from ..model.attacks import READ_NO_STEP, AttackOutcome, Audited, outcome_of
from .format import WatchedTranscript
from .view import TranscriptView

MOST_GRADIENTS = 100_000
"""Gradients of candidates, one a step, that an attack on single updates takes; of more steps, some are read, evenly."""


def transcript_attacks() -> list[str]:
    """Names of the membership attacks of the catalogue that read updates of a training."""
    found = (catalog.attack(name) for name in catalog.names("attacks"))
    return sorted(one.name for one in found if one.kind == "membership" and one.requires.access not in READ_NO_STEP)


def run_on_transcript(
    audited: Audited,
    transcript: WatchedTranscript,
    asked: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    claim: StatedClaim | None = None,
    delta: float,
    seed: int = 0,
) -> Iterator[AttackOutcome]:
    """Runs attacks on what was released in training; what one cannot do ends none of the others.

    Args:
        audited: the final model and whom it is asked about.
        transcript: of its training.
        asked: names of attacks, each with its settings.
        claim: says how batches were drawn; everybody in every step where it does not, which makes attacks weaker alone.
        delta: of the claim, at which bounds on epsilon are computed.
        seed: of the candidates' order and aliases, and of the attacks' own coins.

    Yields:
        One outcome an attack, in their order.
    """
    knows = audited.offered | Knows.DEFENSE
    read = min(max(1, MOST_GRADIENTS // (len(audited.members) + len(audited.non_members))), len(transcript))
    for name, given in asked:
        attack = catalog.attack(name)
        settings = attack.settings(**given)
        if Knows.OTHERS in attack.requires.knows & ~knows:
            why = f"{name} needs what everybody else contributed to each update, which is in no transcript"
            yield AttackOutcome(name=name, settings=settings, requires=attack.requires.to_dict(), why_not=why)
            continue

        def asks(
            attack: Attack[Any], candidates: Candidates, coins: int, settings: Mapping[str, Any]
        ) -> MembershipScores:
            return _scores(attack, _view(audited, transcript, candidates.given, claim, read), coins, settings)

        found = outcome_of(audited, attack, settings, asks, knows=knows, delta=delta, seed=seed)
        yield replace(found, settings={**settings, "steps": f"{read} of {len(transcript)}"}) if found.scores else found


def _view(
    audited: Audited, transcript: WatchedTranscript, candidates: Examples, claim: StatedClaim | None, steps: int
) -> TranscriptView:
    """So many steps, evenly over the training."""
    everybody = claim is None or claim.sampling == "full" or claim.sample_rate is None
    return TranscriptView(
        transcript=transcript,
        model=audited.model,
        world=audited.world,
        candidates=Examples(ids=candidates.ids.cpu(), inputs=candidates.inputs.cpu(), labels=candidates.labels.cpu()),
        sample_rate=1.0 if claim is None or claim.sample_rate is None or everybody else claim.sample_rate,
        independent=claim is None or claim.sampling in ("", "poisson", "full"),
        most_steps=steps,
    )


def _scores(attack: Attack[Any], view: TranscriptView, seed: int, settings: Mapping[str, Any]) -> MembershipScores:
    if attack.requires.access is Access.ALL_STEPS:
        return attack(view.seen(), keyed(seed), **settings)
    return view.scores(attack, log_ratio=Knows.DEFENSE in attack.requires.knows, **settings)
