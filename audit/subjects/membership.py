"""Membership inference on a trained model: candidates, the attack's target, and metrics of its scores."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from leakbench.attacks.core import Examples, Knows, MembershipScores
from leakbench.defenses.core import Claim, Step, keyed
from leakbench.leaderboard.records.details import ProvedDetail

from .. import progress_events
from ..catalog import methods as catalog
from ..plan.cells import Cell
from ..plan.request import seed_of_data
from ..plan.threat_models import ThreatModel, threat_model
from ..scoring import random_split
from ..scoring.score import score
from ..scoring.theoretical_bounds import with_theoretical_bounds
from ..scoring.truth import GroundTruth
from ..targets.candidates import Candidates, content_order, refuse_comparison, repeated_alone
from ..targets.observe import RunView, participation
from .outcome import Finding, candidate_pools, column, examples_of, finite, join, pick
from .shadow_bank import read_bank
from .trained_run import TrainedRun
from .training_data import TrainingData


def membership(model: TrainedRun, cell: Cell) -> Finding:
    """Runs an attack on a trained model, and scores how well it separates members from non-members.

    Raises:
        ValueError: there are no candidates, or the attack compares candidates with one another.
    """
    requested_attack = cell.request.requested_attack
    attack = catalog.attack(requested_attack.name)
    row = threat_model(attack.kind, attack.requires.access)
    if row is None or row.build is None:
        raise ValueError(f"{attack.name} needs {attack.requires.access.name} access, which no suite offers yet")
    knows, build = attack.requires.knows, row.build
    if row.participation_known:
        examples, members = _of_one_step(model)
    else:
        # Members come first; `Candidates.draw` shuffles them before an attack gets them.
        pools = candidate_pools(model.splits, model.request.training.candidates, model.device)
        examples, members = join(*pools), model.members.ids
    # Public examples are copied for attacks, so the copy is skipped for attacks that do not read them.
    public_knowledge = (
        model.public_knowledge if Knows.POPULATION in knows else replace(model.public_knowledge, population=None)
    )

    def asked_about(chosen_examples: Examples, purpose: str, steps: Iterable[Step]) -> MembershipScores:
        candidates = Candidates.draw(chosen_examples, cell.request.seed_for(f"{purpose} {cell.id}"))
        shadows = None
        if Knows.SHADOWS in knows:
            shadows = read_bank(cell.needs, model.artifacts, model.splits, examples, candidates.ids)
        view = RunView(
            model.run,
            public_knowledge,
            model.trained_on,
            model.sampling[0],
            candidates,
            Knows.OTHERS in knows,
            model.residual_noise,
            shadows,
            model.replay,
            steps=steps,
        )
        # The same generator at every call: scores alone and among others may differ by their inputs, not by chance.
        generator = keyed(cell.request.seed_for(f"attack {cell.id}"))
        # A deep copy of the settings: an attack may modify a list in them, and the record stores them, too.
        return candidates.answers(attack(build(view), generator, **copy.deepcopy(requested_attack.settings)))

    with progress_events.named_activity(f"{attack.name} on {model.request.defense.name}, seed {model.request.seed}"):
        result = asked_about(examples, "candidates", model.all_steps)
        # Without noise there is nothing to cancel: a remainder alone reveals participation.
        steps_noisy = model.defense[0].calibrated_multiplier > 0
        noisy = steps_noisy or any(one_off.noise_multiplier > 0 for one_off in model.run.transcript.one_offs)
        if Knows.OTHERS in knows and noisy:
            generator = keyed(cell.request.seed_for(f"alone {cell.id}"))
            scored = result.scores[torch.searchsorted(result.ids, examples.ids)]
            chosen = repeated_alone(scored, torch.isin(examples.ids, members), generator)
            # Seeds are named by positions in content order: positions in the pools would reveal members, which come
            # first.
            place = content_order(examples).argsort()
            for alone in model.all_steps.read_by(
                [
                    partial(asked_about, pick(examples, position[None]), f"alone {int(place[position])}")
                    for position in chosen
                ]
            ):
                refuse_comparison(requested_attack.name, result, alone)
    truth = GroundTruth(members=members, candidates=examples.ids)
    return scored_membership(model, knows, result, truth, _claim_against(model, row), _flags(model, row, knows))


def scored_membership(
    model: TrainingData,
    knows: Knows,
    result: MembershipScores,
    truth: GroundTruth,
    claim: Claim | None,
    flags: list[str],
) -> Finding:
    """Returns metrics of an attack's scores beside what a claim allows, with columns and flags.

    Args:
        model: with the data of the test.
        knows: what the attack is given.
        result: its scores.
        truth: members among the candidates.
        claim: the guarantee for one record that bounds this attacker; None for none.
        flags: on how to read the scores.
    """
    columns = {
        "id": column(result.ids),
        "score": column(result.scores),
        "member": column(truth.membership(result.ids)),
    }
    flags = list(flags)
    metrics = score(result, truth, delta=model.request.budget.delta)
    if claim is not None:
        metrics = with_theoretical_bounds(metrics, claim.trade_off, informed=Knows.OTHERS in knows)
    metrics["auc"] = replace(metrics["auc"], detail=metrics["auc"].detail | model.shift.to_detail())
    split_bound = metrics[random_split.NAME]
    if why := random_split.not_a_random_split([str(flag.name) for flag in knows], flags):
        metrics[random_split.NAME] = random_split.unmeasured(len(result.ids), why)
    elif split_bound.value is not None and claim is not None and math.isfinite(claim.epsilon):
        allowed = claim.epsilon_at(claim.delta, replaced=True)
        detail = ProvedDetail.of(split_bound.detail)
        metrics[random_split.NAME] = replace(split_bound, detail=detail | {"claimed": finite(allowed)})
        if (detail.value_at_verdict or 0.0) > allowed:
            flags.append("claim_violated")
    return Finding(metrics, columns, tuple(flags))


def _claim_against(model: TrainedRun, row: ThreatModel) -> Claim:
    """Returns the claim that bounds an attacker of this threat model; records show its bound beside each metric.

    The bounds hold for independent runs, one per test, while all candidates here share a run. If participation in the
    visible step is known, sampling does not amplify that step. Earlier steps stay charged, because the parameters at
    the visible step depend on them.
    """
    delta = model.request.budget.delta
    if row.reads == "beside the steps" and all(one_off.step == 0 for one_off in model.run.transcript.one_offs):
        # All one-off releases precede the first step, so the model at which they are taken depends on a record through
        # other one-off releases only, such as feature statistics.
        ledger = model.run.ledger
        return replace(ledger, entries=[entry for entry in ledger.entries if entry.one_off]).claim(delta)
    if not row.participation_known:
        return model.run.claim(delta)
    return model.run.ledger.knowing(model.sampling[1] - 1).claim(delta)


def data_flags(model: TrainingData) -> list[str]:
    """Returns flags on members and non-members that differ by more than membership."""
    flags, test = [], model.splits.test
    # A test set may be collected separately.
    if test is not None and torch.equal(test.ids, model.splits.non_member.ids):
        flags.append("non_members_are_test")
    if model.shift.found:
        flags.append("distribution_shift")
    return flags


def _flags(model: TrainedRun, row: ThreatModel, knows: Knows) -> list[str]:
    """Returns flags on how to read the scores, derived from the run and not from the attack's unverified statements."""
    flags = ["participation_known"] if row.participation_known else []
    flags += data_flags(model)
    # An attacker who does not know the rest of a batch cannot read a record off the sum, with noise or without.
    noiseless = row.reads in ("last step", "every step") and model.defense[0].calibrated_multiplier == 0
    if row.reads in ("beside the steps", "every step"):
        noiseless |= any(one_off.noise_multiplier == 0 for one_off in model.run.transcript.one_offs)
    if noiseless and Knows.OTHERS in knows:
        flags.append("deterministic")
    informed = row.reads == "every step" and Knows.OTHERS in knows
    # Likelihood ratios of single steps multiply to that of the run only under independent participation and independent
    # noise, and none of them includes the releases of a trial.
    entries = model.run.ledger.entries
    plans = [step.plan.plan for step in model.run.transcript.steps if step.plan]
    dependent = participation(model.sampling[0]) == "dependent" or any(plan.correlated or plan.trial for plan in plans)
    # For steps outside the transcript, the ledger has the same information.
    if informed and (dependent or any(entry.row is not None or entry.trial for entry in entries)):
        flags.append("not_most_powerful")
    # One-off releases are charged to the claim, but belong to no step. An informed adversary sees the noisy scores that
    # a mask is derived from; statistics of features are released before training, and the transcript does not hold
    # them.
    shown = len(model.run.transcript.one_offs) if informed or row.reads == "beside the steps" else 0
    charged = sum(entry.steps for entry in entries if entry.one_off)
    if row.reads != "nothing" and shown < charged:
        flags.append("one_off_not_attacked")
    return flags


def _of_one_step(model: TrainedRun) -> tuple[Examples, Tensor]:
    """Returns candidates for an attack on the last update, participants and non-members, and ids of participants."""
    sampling, steps = model.sampling
    took_part = sampling.indices(steps - 1, len(model.trained_on), model.run.sampler_key)
    # The negative control trains on other examples: the members at the positions of its participants took part in
    # nothing, and must not be detected.
    inside = pick(model.members, took_part[took_part < len(model.members)])
    outside = examples_of(model.splits.non_member, model.device)
    if (limit := model.request.training.candidates) is not None:
        generator = keyed(seed_of_data(model.splits.digest, "one step"))
        inside, outside = (pick(e, torch.randperm(len(e), generator=generator)[:limit]) for e in (inside, outside))
    return join(inside, outside), inside.ids
