"""Membership of a trained model: whom an attack is asked about, what it is given, and what its answer is worth."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from attacks.core import Examples, Knows, MembershipScores, Target
from defenses.core import Claim, Ledger, full, keyed

from ..catalog import methods as catalog
from ..observe import RunView, participation
from ..plan.cells import Cell
from ..plan.request import seed_of_data
from ..plan.threat_models import ThreatModel, threat_model
from ..scoring.allowed import largest_auc, largest_tpr
from ..scoring.score import score
from ..scoring.truth import GroundTruth
from .candidates import Candidates, refuse_comparison
from .outcome import Finding, column, examples_of, finite, join, pick
from .trained_run import TRANSCRIPT_MEMORY, TrainedRun

_ASKED_ALONE = 2
"""Members, and non-members, about whom an informed attack is asked again with nobody beside them."""


def membership(model: TrainedRun, cell: Cell) -> Finding:
    """Asks one attack who was among the training data, and scores what it says.

    Raises:
        ValueError: there is nobody to ask about, or the attack compares candidates with one another.
    """
    asked = cell.request.asked_attack
    attack = catalog.attack(asked.name)
    row = threat_model(attack.kind, attack.requires.access)
    if row is None or row.build is None:
        raise ValueError(f"{attack.name} needs {attack.requires.access.name} access, which no suite offers yet")
    knows = attack.requires.knows
    if row.participation_known:
        examples, members = _of_one_step(model)
    else:
        examples, members = _candidates(model), model.members.ids
    # A copy of the public examples is made for those only who read them.
    world = model.world if Knows.POPULATION in knows else replace(model.world, population=None)

    def asked_about(some: Examples, purpose: str) -> MembershipScores:
        candidates = Candidates.draw(some, cell.request.seed_for(f"{purpose} {cell.id}"))
        informed = Knows.OTHERS in knows
        view = RunView(model.run, world, model.trained_on, model.sampling[0], candidates, informed, model.left_over)
        coins = keyed(cell.request.seed_for(f"attack {cell.id}"))
        target = _target(view, row, attack.name, model.sampling[1])
        return candidates.answers(attack(target, coins, **copy.deepcopy(asked.settings)))

    result = asked_about(examples, "candidates")
    if Knows.OTHERS in knows and model.run.noise != "none":  # without noise everything can be seen anyway
        inside = torch.isin(examples.ids, members)
        coins = keyed(cell.request.seed_for(f"alone {cell.id}"))
        for kind in (inside, ~inside):
            places = kind.nonzero().flatten().cpu()
            for one in places[torch.randperm(len(places), generator=coins)[:_ASKED_ALONE]]:
                refuse_comparison(asked.name, result, asked_about(pick(examples, one[None]), f"alone {one}"))
    truth = GroundTruth(members=members, candidates=examples.ids)
    columns = {
        "id": column(result.ids),
        "score": column(result.scores),
        "member": column(truth.membership(result.ids)),
    }
    claim = _claim_against(model, row)
    epsilon = finite(claim.epsilon)
    metrics = score(result, truth, delta=model.request.budget.delta)
    metrics["auc"].detail["largest_under_claim"] = largest_auc(epsilon, claim.delta)
    metrics["tpr_at_1pct_fpr"].detail["largest_under_claim"] = largest_tpr(epsilon, claim.delta, 0.01)
    return Finding(metrics, columns, tuple(_flags(model, row, knows)))


def _target(view: RunView, row: ThreatModel, attack: str, steps: int) -> Target:
    """What an attack of this access is given."""
    if row.reads == "every step" and view.run.transcript.truncated:
        raise ValueError(
            f"{attack} reads every step, and what {steps} steps show takes more than "
            f"{TRANSCRIPT_MEMORY / 2**30:.0f} GiB; take fewer epochs, a smaller model, or another attack"
        )
    if row.build is None:
        raise ValueError(f"the threat model of {attack} must say how its target is built from a run")
    return row.build(view)


def _claim_against(model: TrainedRun, row: ThreatModel) -> Claim:
    """For the reader: what the claim allows against the attacker that it is about, who has one run per question.

    Where participation is known, sampling amplifies nothing, and the one step seen is all that was spent.
    """
    delta = model.request.budget.delta
    if not row.participation_known:
        return model.run.claim(delta)
    seen, alone = model.run.transcript.steps[-1], Ledger(full())
    if seen.plan is not None:
        alone.record(seen.plan, seen.noise_multiplier, step=seen.step)
    return alone.claim(delta)


def _flags(model: TrainedRun, row: ThreatModel, knows: Knows) -> list[str]:
    """What scores mean is read off the run, not off the result: an attack's own word is a claim that nobody checked."""
    flags = ["participation_known"] if row.participation_known else []
    test = model.splits.test
    if test is not None and torch.equal(test.ids, model.splits.non_member.ids):
        flags.append("non_members_are_test")
    if row.reads != "nothing" and model.run.noise == "none":
        flags.append("deterministic")
    informed = row.reads == "every step" and Knows.OTHERS in knows
    if informed and participation(model.sampling[0]) == "dependent":
        flags.append("not_most_powerful")
    return flags


def _candidates(model: TrainedRun) -> Examples:
    """As many members as non-members, drawn by the data set's digest and the seed: the same for all defenses.

    In this order members come first: no attack gets them so.
    """
    outside = examples_of(model.splits.non_member, model.device)
    if not len(outside):
        raise ValueError("membership needs non-members, and the sizes of this task leave none")
    limit = model.request.training.candidates or max(len(model.members), len(outside))
    count = min(limit, len(model.members), len(outside))
    coins = keyed(seed_of_data(model.splits.digest, "candidates"))
    inside = pick(model.members, torch.randperm(len(model.members), generator=coins)[:count])
    return join(inside, pick(outside, torch.randperm(len(outside), generator=coins)[:count]))


def _of_one_step(model: TrainedRun) -> tuple[Examples, Tensor]:
    """Whom the last update is judged by, those who took part in it and non-members, and who of them took part."""
    sampling, steps = model.sampling
    took_part = sampling.indices(steps - 1, len(model.trained_on), model.run.sampler_key)
    # In the negative control others took part; as many members stand in for them, and must not show.
    inside = pick(model.members, took_part[took_part < len(model.members)])
    outside = examples_of(model.splits.non_member, model.device)
    if (limit := model.request.training.candidates) is not None:
        coins = keyed(seed_of_data(model.splits.digest, "one step"))
        inside, outside = (pick(e, torch.randperm(len(e), generator=coins)[:limit]) for e in (inside, outside))
    return join(inside, outside), inside.ids
