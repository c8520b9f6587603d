"""One trained model and what its cells ask of it: utility, and membership under each access.

The private data, the sampler's key and the noise stay in here. An attack gets an observation from `observe`, its result
goes to `score` together with the truth, and only metrics and per-example arrays leave.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attacks.core import Access, Attack, Examples, Knows, MembershipScores, Target
from benchmarks.core import Splits
from defenses.core import Defense, Ledger, Run, Sampling, full, keyed, train
from leaderboard.records.record import Metric

from ..catalog import methods as catalog
from ..observe import GroundTruth, RunView, World, logits_of, model_access, noise_found, observe_run, participation
from ..plan.expand import Cell, build_model, defend, load_splits, planned, reads_public, seed_of
from ..scoring.allowed import largest_auc, largest_tpr
from ..scoring.score import score
from ..scoring.utility import losses, score_utility
from .candidates import Candidates, refuse_comparison
from .outcome import Outcome, column, examples_of, finite, finite_claim, join, noise_for, pick, world_of

NOISE_TOLERANCE = 6.0
"""Standard deviations by which the noise found may differ from the noise claimed: one false alarm in 10^9 runs."""

TRANSCRIPT_MEMORY = 4 * 2**30
"""Bytes that the steps of a run may take in memory, for attacks that read all of them."""

WATCHED = 32
"""Steps of a run whose noise is looked at, as far as they fit into memory."""

WATCHED_MEMORY = 2**29
"""Bytes that these may take; the last step is kept whatever it takes."""

_ASKED_ALONE = 2
"""Members, and non-members, about whom an informed attack is asked again with nobody beside them."""


class TrainedModel:
    """One training run, and what its cells ask of it."""

    def __init__(self, cells: tuple[Cell, ...], device: torch.device) -> None:
        """Names the run that these cells share; nothing is computed before a cell asks."""
        self._request, self._device = cells[0].request, device
        self._splits: Splits = load_splits(self._request, device)
        names = {cell.request["attack"]["name"] for cell in cells if cell.kind == "membership"}
        self._left_over: dict[int, Tensor] = {}  # of steps without everybody: as the views of all cells need it
        self._all_steps = any(catalog.attack(name).requires.access is Access.ALL_STEPS for name in names)

    def outcome(self, cell: Cell) -> Outcome:
        """Trains, unless that was done for an earlier cell, and computes one cell."""
        metrics, arrays, flags = self._utility() if cell.kind == "utility" else self._membership(cell)
        claim = asdict(self._run.claim(self._request["budget"]["delta"]))
        if any(not torch.isfinite(p).all() for p in self._run.model.parameters()):
            flags = [*flags, "diverged"]
        if self._defense[1]:
            flags = [*flags, "noise_matched"]
        if self._run.public_used and self._splits.in_distribution_public:
            flags = [*flags, "public_in_distribution"]
        if "tuning_digest" in self._request["task"]:
            flags = [*flags, "tuned_on_public"]
        flags = [*flags, *self._run.remarks, *self._violations]
        return Outcome(
            metrics=metrics,
            task=self._resolved,
            claim=finite_claim(claim),
            noise_multiplier=self._defense[0].noise_multiplier,
            noise=self._run.noise,
            engine=self._run.engine,
            flags=flags,
            arrays=arrays,
        )

    @cached_property
    def _members(self) -> Examples:
        """The private examples, whose membership is the question."""
        return examples_of(self._splits.private, self._device)

    @cached_property
    def _trained_on(self) -> Examples:
        """The members; for the negative control public examples, so that the model never saw a member."""
        return self._members if self._request["control"] != "negative" else self._stand_ins[0]

    @cached_property
    def _read(self) -> Examples:
        """What the defense may read as public; in the negative control what is not trained on."""
        return self._public_pool if self._request["control"] != "negative" else self._stand_ins[1]

    @cached_property
    def _stand_ins(self) -> tuple[Examples, Examples]:
        """Of the public examples, in the negative control: as many as members to train on, and what may be read."""
        public = self._public_pool
        if not len(public):
            raise ValueError("the negative control trains on public examples; set task.public, or controls = false")
        most = len(public) // 2 if self._reads_public else len(public)
        coins = keyed(seed_of({"digest": self._splits.digest}, "stand-ins"))
        order = torch.randperm(len(public), generator=coins)
        own, rest = order.tensor_split([min(most, len(self._members))])
        return pick(public, own.sort().values), pick(public, rest)

    @cached_property
    def _public_pool(self) -> Examples:
        return examples_of(self._splits.public, self._device)

    @cached_property
    def _reads_public(self) -> bool:
        return reads_public(self._request["defense"]["name"], self._request["defense"]["settings"])

    @cached_property
    def _test(self) -> Examples:
        """What utility is measured on: the data set's own test set, or the non-members where it has none."""
        splits = self._splits
        return examples_of(splits.non_member if splits.test is None else splits.test, self._device)

    @cached_property
    def _defense(self) -> tuple[Defense, bool]:
        return defend(self._request, len(self._trained_on))

    @cached_property
    def _sampling(self) -> tuple[Sampling, int]:
        return planned(self._request, len(self._trained_on))

    @property
    def _sampler_key(self) -> int | None:
        """None, for a key from the operating system, where the noise is: one made of the request is no secret."""
        return None if self._request.get("noise") == "secure" else seed_of(self._request, "sampler")

    @cached_property
    def _run(self) -> Run:
        request, splits = self._request, self._splits
        task, data, public = request["task"], self._trained_on, self._read
        sampling, steps = self._sampling
        return train(
            build_model(task["model"], task["model_settings"], splits, request["seed"]),
            (data.inputs, data.labels),
            self._defense[0],
            sampling=sampling,
            steps=steps,
            lr=task["lr"],
            momentum=task["momentum"],
            optimizer=task["optimizer"],
            schedule=task["schedule"],
            public=(public.inputs, public.labels) if len(public) else None,
            noise=noise_for(request),
            seed=seed_of(request, "coins"),
            sampler_key=self._sampler_key,
            engine=task.get("engine", "auto"),
            device=self._device,
            observer="updates",
            observe_always=[steps - 1],
            observe_only=None if self._all_steps else watched(steps),
            observe_memory=TRANSCRIPT_MEMORY if self._all_steps else WATCHED_MEMORY,
        )

    @cached_property
    def _resolved(self) -> dict[str, Any]:
        sampling, steps = self._sampling
        splits = self._splits
        return {
            "digest": splits.digest,
            "private": len(self._members),
            "trained_on": len(self._trained_on),
            "non_member": len(splits.non_member),
            "public": len(splits.public),
            "tested_on": len(self._test),
            "input_shape": list(splits.input_shape),
            "public_in_distribution": splits.in_distribution_public,
            "steps": steps,
            "sample_rate": sampling.rate,
            "parameters": sum(p.numel() for p in self._run.model.parameters()),
        }

    @cached_property
    def _violations(self) -> list[str]:
        """Flags for what refutes a claim outright, as the auditor sees it who holds the data and the sampler's key.

        Scores of candidates of one run share its noise, so their ROC, however steep, is no bound on epsilon: that takes
        runs or canaries that are independent. The noise itself can be looked at: releases less what everybody
        contributed.
        """
        claim = self._run.claim(self._request["budget"]["delta"])
        if not math.isfinite(claim.epsilon):
            return []
        budget = self._request["budget"].get("epsilon", math.inf)
        overspent = claim.epsilon > budget * (1 + 1e-9)  # by the plans that were executed
        view = RunView(self._run, self._world, self._trained_on, self._sampling[0], kept=self._left_over)
        ratio, deviations = noise_found(view, watched(self._sampling[1]))
        flags = ["claim_violated"] if overspent or deviations < -NOISE_TOLERANCE else []
        return [*flags, f"noise_{ratio:.2g}x_of_claimed"] if abs(deviations) > NOISE_TOLERANCE else flags

    @cached_property
    def _world(self) -> World:
        return world_of(self._splits, self._device)

    @cached_property
    def _candidates(self) -> Examples:
        """As many members as non-members, drawn by the data set's digest and the seed: the same for all defenses.

        In this order members come first: no attack gets them so.
        """
        outside = examples_of(self._splits.non_member, self._device)
        if not len(outside):
            raise ValueError("membership needs non-members, and the sizes of this task leave none")
        limit = self._request["task"]["candidates"] or max(len(self._members), len(outside))
        count = min(limit, len(self._members), len(outside))
        coins = keyed(seed_of({"digest": self._splits.digest}, "candidates"))
        inside = pick(self._members, torch.randperm(len(self._members), generator=coins)[:count])
        return join(inside, pick(outside, torch.randperm(len(outside), generator=coins)[:count]))

    def _utility(self) -> tuple[dict[str, Metric], dict[str, Any], list[str]]:
        test = self._test
        logits = logits_of(self._run.model, test.inputs)
        columns = {
            "id": column(test.ids),
            "label": column(test.labels),
            "loss": column(losses(logits, test.labels)),
            "predicted": column(logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), -1)),
        }
        return score_utility(logits, test.labels), columns, []

    def _membership(self, cell: Cell) -> tuple[dict[str, Metric], dict[str, Any], list[str]]:
        request = cell.request["attack"]
        attack = catalog.attack(request["name"])
        access, knows = attack.requires.access, attack.requires.knows
        if access is Access.UPDATE:
            examples, members = self._of_one_step
        else:
            examples, members = self._candidates, self._members.ids
        # A copy of the public examples is made for those only who read them.
        world = self._world if Knows.POPULATION in knows else replace(self._world, population=None)

        def asked_about(some: Examples, purpose: str) -> MembershipScores:
            candidates = Candidates.draw(some, seed_of(cell.request, f"{purpose} {cell.id}"))
            informed = Knows.OTHERS in knows
            view = RunView(self._run, world, self._trained_on, self._sampling[0], candidates, informed, self._left_over)
            coins = keyed(seed_of(cell.request, f"attack {cell.id}"))
            target = self._target(view, attack)
            return candidates.answers(attack(target, coins, **copy.deepcopy(request["settings"])))

        result = asked_about(examples, "candidates")
        if Knows.OTHERS in knows and self._run.noise != "none":  # without noise everything can be seen anyway
            inside = torch.isin(examples.ids, members)
            coins = keyed(seed_of(cell.request, f"alone {cell.id}"))
            for kind in (inside, ~inside):
                places = kind.nonzero().flatten().cpu()
                for one in places[torch.randperm(len(places), generator=coins)[:_ASKED_ALONE]]:
                    refuse_comparison(request["name"], result, asked_about(pick(examples, one[None]), f"alone {one}"))
        truth = GroundTruth(members=members, candidates=examples.ids)
        columns = {
            "id": column(result.ids),
            "score": column(result.scores),
            "member": column(truth.membership(result.ids)),
        }
        delta = self._request["budget"]["delta"]
        claim = self._run.claim(delta)
        # For the reader: what the claim allows against the attacker that it is about, who has one run per question.
        # Where participation is known, sampling amplifies nothing, and the one step seen is all that was spent.
        if access is Access.UPDATE:
            seen, alone = self._run.transcript.steps[-1], Ledger(full())
            if seen.plan is not None:
                alone.record(seen.plan, seen.noise_multiplier, step=seen.step)
            claim = alone.claim(delta)
        epsilon = finite(claim.epsilon)
        metrics = score(result, truth, delta=delta)
        metrics["auc"].detail["largest_under_claim"] = largest_auc(epsilon, claim.delta)
        metrics["tpr_at_1pct_fpr"].detail["largest_under_claim"] = largest_tpr(epsilon, claim.delta, 0.01)
        flags = ["participation_known"] if access is Access.UPDATE else []
        test = self._splits.test
        if test is not None and torch.equal(test.ids, self._splits.non_member.ids):
            flags.append("non_members_are_test")
        # What scores mean is read off the run, not off the result: an attack's own word is a claim that nobody checked.
        if access in (Access.UPDATE, Access.ALL_STEPS) and self._run.noise == "none":
            flags.append("deterministic")
        if access is Access.ALL_STEPS and Knows.OTHERS in knows and participation(self._sampling[0]) == "dependent":
            flags.append("not_most_powerful")
        return metrics, columns, flags

    def _target(self, view: RunView, attack: Attack[Any]) -> Target:
        """What an attack of this access is given."""
        access = attack.requires.access
        if access is Access.ALL_STEPS:
            if self._run.transcript.truncated:
                raise ValueError(
                    f"{attack.name} reads every step, and what {self._sampling[1]} steps show takes more than "
                    f"{TRANSCRIPT_MEMORY / 2**30:.0f} GiB; take fewer epochs, a smaller model, or another attack"
                )
            return observe_run(view)
        if access is Access.UPDATE:
            return view.at(len(view) - 1, participation_known=True)
        return model_access(view, white_box=access is Access.WHITE_BOX)

    @cached_property
    def _of_one_step(self) -> tuple[Examples, Tensor]:
        """Whom the last update is judged by, those who took part in it and non-members, and who of them took part."""
        sampling, steps = self._sampling
        took_part = sampling.indices(steps - 1, len(self._trained_on), self._run.sampler_key)
        # In the negative control others took part; as many members stand in for them, and must not show.
        inside = pick(self._members, took_part[took_part < len(self._members)])
        outside = examples_of(self._splits.non_member, self._device)
        if (limit := self._request["task"]["candidates"]) is not None:
            coins = keyed(seed_of({"digest": self._splits.digest}, "one step"))
            inside, outside = (pick(e, torch.randperm(len(e), generator=coins)[:limit]) for e in (inside, outside))
        return join(inside, outside), inside.ids


def watched(steps: int) -> list[int]:
    """The numbers of the steps whose noise is looked at: spread evenly, the last one among them."""
    count = min(steps, WATCHED)
    return sorted({steps - 1 - i * steps // count for i in range(count)})
