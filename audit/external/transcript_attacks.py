"""Membership attacks on the transcript of a training: every one of the catalogue that reads updates or whole runs.

Attacks on one update are run on each step and their scores added up. Those that know the noise have log likelihood
ratios in nats, which are first mixed over whether the record took part, at the sampling rate of the claim. What every
other record contributed is in no transcript, so attacks that take it away say why they did not run.

Candidates get an order and aliases that tell nothing of membership, as for attacks on the final model.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attacks.core import Access, AccessError, Attack, Examples, Knows, MembershipScores, NotApplicable, Requirements
from defenses.core import keyed

from ..catalog import methods as catalog
from ..catalog.messages import in_one_line
from ..plan.request import seed_of
from ..scoring.score import score
from ..scoring.truth import GroundTruth
from ..subjects.candidates import Candidates
from ..subjects.outcome import join
from .attacked import READ_NO_STEP, AttackOutcome, Audited
from .claim import StatedClaim
from .transcript import WatchedTranscript
from .transcript_view import TranscriptView

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
    examples = join(audited.members, audited.non_members)
    truth = GroundTruth(members=audited.members.ids, candidates=examples.ids)
    knows = audited.offered | Knows.DEFENSE
    for name, given in asked:
        attack = catalog.attack(name)
        settings = attack.settings(**given)
        about: dict[str, Any] = {"name": name, "settings": settings, "requires": attack.requires.to_dict()}
        if attack.check(Requirements(access=attack.requires.access, knows=knows)):
            missing = attack.requires.knows & ~knows
            if Knows.OTHERS in missing:
                why = f"{name} needs what everybody else contributed to each update, which is in no transcript"
                yield AttackOutcome(**about, why_not=why)
            else:
                yield AttackOutcome(**about, why_not=f"{name} needs more than is there", missing=missing)
            continue
        begun = time.perf_counter()
        key = {"attack": name, "settings": settings, "seed": seed}
        try:
            candidates = Candidates.draw(examples, seed_of(key, "candidates"))
            view = _view(audited, transcript, candidates.given, claim)
            found = candidates.answers(_scores(attack, view, seed_of(key, "attack"), settings))
            metrics = score(found, truth, delta=delta)
        except (NotApplicable, AccessError) as error:
            yield AttackOutcome(**about, why_not=f"{name} does not apply: {error}")
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            yield AttackOutcome(**about, why_not=f"{name} failed: {in_one_line(error)}", failed=True)
        else:
            about["settings"] = dict(settings) | {"steps": f"{view.steps_read} of {len(transcript)}"}
            yield AttackOutcome(**about, metrics=metrics, scores=found, seconds=time.perf_counter() - begun)


def _view(
    audited: Audited, transcript: WatchedTranscript, candidates: Examples, claim: StatedClaim | None
) -> TranscriptView:
    """Those steps that the number of candidates allows, evenly over the training."""
    everybody = claim is None or claim.sampling == "full" or claim.sample_rate is None
    return TranscriptView(
        transcript=transcript,
        model=audited.model,
        world=audited.world,
        candidates=Examples(ids=candidates.ids.cpu(), inputs=candidates.inputs.cpu(), labels=candidates.labels.cpu()),
        sample_rate=1.0 if claim is None or claim.sample_rate is None or everybody else claim.sample_rate,
        independent=claim is None or claim.sampling in ("", "poisson", "full"),
        most_steps=max(1, MOST_GRADIENTS // len(candidates)),
    )


def _scores(attack: Attack[Any], view: TranscriptView, seed: int, settings: Mapping[str, Any]) -> MembershipScores:
    given = copy.deepcopy(dict(settings))
    if attack.requires.access is Access.ALL_STEPS:
        return attack(view.seen(), keyed(seed), **given)
    return view.scores(attack, log_ratio=Knows.DEFENSE in attack.requires.knows, **given)
