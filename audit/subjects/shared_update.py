"""Shared updates as a subject: reconstruction of inputs or labels from single updates, for several target batches.

Each update comes from a fresh model under the defense, with the noise of the cell's budget, or without noise to measure
the protection by clipping and compression alone. The negative control shares a decoy instead of the batch that is
scored: an attack that still seems to succeed finds only what is common to all images.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakbench.attacks.core import (
    Attack,
    Controls,
    Knows,
    LabelEstimate,
    Reconstruction,
    checked_labels,
    checked_reconstruction,
)
from leakbench.benchmarks.core import Splits
from leakbench.defenses.core import Defense, Federated, Noise, keyed
from leakbench.leaderboard.records.record import Metric

from ..catalog import methods as catalog
from ..plan.build import build_model, defend, load_splits, recipe_of
from ..plan.cells import Cell
from ..plan.federation import own_multiplier
from ..plan.request import seed_of_data
from ..scoring.choice import Pick, chosen, compare_choice
from ..scoring.images import ImageValues, summed_up
from ..scoring.labels import LabelledBatch, label_columns, public_shares, score_labels
from ..scoring.reconstruction import best_match, compare
from ..scoring.robustness import bound_metric, refuted
from ..targets.candidate_prior import Prior
from ..targets.candidates import copied
from ..targets.chosen_models import ActiveRounds, ChosenModels
from ..targets.local_steps import MAX_UNROLL, LocalTraining
from ..targets.observe import PublicKnowledge
from ..targets.simulated_message import SharedMessage, simulate_message, without_noise
from ..targets.simulated_update import Shared, simulate_share
from .federated_run import ClientsRun
from .outcome import Outcome, column, finite_claim, population_of, public_knowledge_of

CROWD = 1000
"""Largest number of other images among which a true image must be identified; the metric states the actual number."""


@dataclass(frozen=True)
class _Attacked:
    """A target batch, its shared update, and the attack's result.

    Attributes:
        match: for each input the best match among some public images; None without public images, and where labels or
            a choice among candidates are scored.
        values: per-image metrics of reconstructed images, before aggregation.
        choice: the attack's pick among given candidates; None for attacks without candidates.
    """

    inputs: Tensor
    labels: Tensor
    shared: Shared
    result: Reconstruction | LabelEstimate
    match: Tensor | None
    values: dict[str, ImageValues]
    choice: Pick | None = None


class SharedUpdates:
    """The shared updates of a cell, one per target batch."""

    def __init__(self, cells: tuple[Cell, ...], device: torch.device) -> None:
        """Takes the job's only cell and loads its data; no update is computed yet."""
        (cell,) = cells  # `expand` gives every cell on an update its own job: there is no training to share
        self._request, self._update, self._device = cell.request, cell.request.requested_update, device
        self._splits: Splits = load_splits(cell.request, device, of=self._update)

    def outcome(self, cell: Cell) -> Outcome:
        """Shares, attacks and scores every target of the cell."""
        request, update, splits = self._request, self._update, self._splits
        defense, matched = self._defended()
        # Read first, because the multiplier is replaced below.
        noisy = update.release_noise != "none"
        if isinstance(defense, Federated):
            calibrated = own_multiplier(defense) or 0.0
            defense = defense if noisy else without_noise(defense)
        else:
            calibrated = defense.calibrated_multiplier
            defense = defense if noisy else defense.with_noise(0.0)
        # One source for all targets: separate sources would have the same key, and repeat the noise.
        noise = request.seeds.noise_source()
        attacked = [self._attacked(cell, image, defense, noise) for image in range(update.images)]
        # An active server may send fewer models to some targets than to others: the claim is that of the most.
        last = max((target.shared for target in reversed(attacked)), key=_releases)
        # Targets are disjoint batches, each with a separate update: a single ledger is the cost to each of them.
        claim = asdict(last.claim(request.budget.delta))
        if not noisy and calibrated > 0 and not (isinstance(last, SharedMessage) and last.after_the_message):
            claim["reason"] = "the noise is switched off to see what the release alone hides"
        remarks = dict.fromkeys(remark for target in attacked for remark in target.shared.remarks)
        flags = [*sorted({target.result.status for target in attacked} - {"ok"}), *remarks]
        if matched and noisy:
            flags.append("noise_matched")
        metrics, arrays = self._measured(attacked)
        if "iip" in metrics:
            if attacked[-1].choice is None:
                success, others, batch = metrics["iip"], min(CROWD, len(splits.non_member)), update.batch
            else:
                # A single record of the batch is sought, so the attacker has a single try.
                success, others, batch = metrics["prior_success"], update.prior - 1, 1
                if splits.test is not None and torch.equal(splits.test.ids, splits.non_member.ids):
                    flags.append("non_members_are_test")
            metrics["rero_bound"] = bound_metric(last.ledger, others, batch=batch)
            if isinstance(last, SharedMessage) and last.unit == "client":
                reason = "the claim is for all of a client's data, and the bound for a record"
                metrics["rero_bound"] = Metric(value=None, n=others + 1, better="lower", reason=reason)
            if not request.never_saw and refuted(success, metrics["rero_bound"]):
                flags.append("claim_violated")
        return Outcome(
            metrics=metrics,
            task={
                "digest": splits.digest,
                "parameters": self._parameters(),
                "participation_known": True,
                "input_shape": list(splits.input_shape),
                "input_range": [splits.low, splits.high],
                **({"form": last.kind, "bytes": last.bytes} if isinstance(last, SharedMessage) else {}),
                **({"releases": _releases(last)} if self._is_active(cell) else {}),
            },
            claim=finite_claim(claim),
            noise_multiplier=calibrated if noisy else 0.0,
            noise=last.noise,
            engine=last.engine,
            flags=flags,
            arrays=arrays,
        )

    @staticmethod
    def _is_active(cell: Cell) -> bool:
        """True if the attack chooses the model of the client."""
        return Controls.MODEL in catalog.attack(cell.request.requested_attack.name).requires.controls

    def _defended(self) -> tuple[Defense | Federated, bool]:
        """Returns the defense at its budget's noise, and whether that noise was matched instead of calibrated."""
        if self._update.message is not None:
            return ClientsRun(self._request.of_training(), self._device).method
        # Size of the training, not of the update's pool: the noise is calibrated to the run that the update represents.
        return defend(self._request, len(load_splits(self._request, torch.device("cpu")).private))

    def _measured(self, targets: list[_Attacked]) -> tuple[dict[str, Metric], dict[str, Any]]:
        """Returns metrics over all targets, and the arrays that they follow from."""
        named = [(target, target.result) for target in targets if isinstance(target.result, LabelEstimate)]
        if not named:
            choices = [target.choice for target in targets if target.choice is not None]
            arrays = _choices(choices) if choices else _pictures(targets, targets[-1].shared.truth.floor)
            return summed_up([target.values for target in targets]), arrays
        public, classes = self._splits.public.labels, self._splits.classes
        batches = [
            LabelledBatch(result.labels, target.labels, public_shares(target.labels, public, classes))
            for target, result in named
        ]
        return score_labels(batches), label_columns(batches)

    def _attacked(self, cell: Cell, image: int, defense: Defense | Federated, noise: Noise) -> _Attacked:
        """Shares target number `image`, attacks the release, and scores the result."""
        request, update, splits = self._request, self._update, self._splits
        requested_attack = request.requested_attack
        attack = catalog.attack(requested_attack.name)
        knows = attack.requires.knows
        inputs, labels, decoy = self._batch(image)
        public_knowledge = public_knowledge_of(splits, self._device)
        prior = self._prior(image, inputs, labels) if Knows.PRIOR in knows else None
        common: dict[str, Any] = {
            "lr": update.lr,
            "seed": request.seed_for(f"coins {image}"),
            "public_knowledge": replace(
                public_knowledge, population=public_knowledge.population if Knows.POPULATION in knows else None
            ),
            "population": public_knowledge.population,
            "prior": None if prior is None else prior.given,
            "execution": request.training.execution(),
        }
        batch = (inputs, labels) if decoy is None else decoy
        model = build_model(request, splits, of=update)
        generator = keyed(request.seed_for(f"attack {cell.id} {image}"))
        if isinstance(defense, Federated) and self._is_active(cell):
            answer, shared = self._active(model, batch, defense, cell, image, common, attack, generator)
            return self._scored(image, inputs, labels, shared, answer, knows, prior)
        if isinstance(defense, Federated):
            shared: Shared = self._message(model, batch, defense, image, common)
        else:
            shared = simulate_share(
                model,
                *batch,
                defense,
                step=update.step,
                steps=update.steps,
                local=None if update.local is None else LocalTraining(**update.local),
                history=self._history(image),
                noise=noise,
                **common,
            )
        answer = attack(shared.observation, generator, **copy.deepcopy(requested_attack.settings))
        return self._scored(image, inputs, labels, shared, answer, knows, prior)

    def _scored(
        self,
        image: int,
        inputs: Tensor,
        labels: Tensor,
        shared: Shared,
        answer: Reconstruction | LabelEstimate,
        knows: Knows,
        prior: Prior | None,
    ) -> _Attacked:
        """Scores an attack's answer on target number `image`."""
        splits = self._splits
        if isinstance(answer, LabelEstimate):
            return _Attacked(
                inputs, labels, shared, checked_labels(answer, len(inputs), splits.classes, inputs), None, {}
            )
        # Checked against the true batch size, even if hidden from the attack: scoring matches true images with guesses,
        # so surplus guesses would count in the attack's favour.
        result: Reconstruction = checked_reconstruction(answer, len(inputs), inputs)
        if prior is not None:
            choice = chosen(result, prior.given.inputs, prior.place)
            return _Attacked(inputs, labels, shared, result, None, compare_choice(choice, result), choice)
        low, high = splits.low, splits.high
        public, population = None, population_of(splits, self._device)
        if population is not None:
            # Shuffled anew for each target, independently of private data.
            generator = keyed(seed_of_data(splits.digest, f"public match {image}"))
            order = torch.randperm(len(population), generator=generator)
            public = population.inputs[order.to(self._device)]
        matched = best_match(public, inputs, result.restarts, low=low, high=high)
        values = compare(
            result,
            inputs,
            labels,
            low=low,
            high=high,
            floor_image=shared.truth.floor,
            match_images=matched,
            # None of them is a target, and no attacker receives any.
            other_images=splits.non_member.inputs[:CROWD],
            labels_given=Knows.LABELS in knows,
        )
        return _Attacked(inputs, labels, shared, result, matched, values)

    def _active(
        self,
        model: nn.Module,
        batch: tuple[Tensor, Tensor],
        method: Federated,
        cell: Cell,
        image: int,
        common: dict[str, Any],
        attack: Attack[Any],
        generator: torch.Generator,
    ) -> tuple[Reconstruction, SharedMessage]:
        """Returns an active server's answer, and the last message with the charges of all."""
        public: PublicKnowledge = common["public_knowledge"]
        models = ChosenModels(model, public, (self._update.message or {}).get("chosen_models", 1))

        def message(sent: nn.Module, call: int) -> SharedMessage:
            # A key for each attack: noise that two attacks share would cancel between their models.
            return self._message(sent, batch, method, image, common, f" of chosen model {call} {cell.id}")

        rounds = ActiveRounds(models, message)
        target = models.target(
            rounds.release,
            labels=batch[1].clone(),
            batch_size=len(batch[1]),
            noise_multiplier=own_multiplier(method) or 0.0,
            population=None if public.population is None else copied(public.population),
        )
        settings = copy.deepcopy(self._request.requested_attack.settings)
        return attack(target, generator, **settings), rounds.shared()

    def _message(
        self,
        model: nn.Module,
        batch: tuple[Tensor, Tensor],
        method: Federated,
        image: int,
        common: dict[str, Any],
        purpose: str = "",
    ) -> SharedMessage:
        """Returns the first message of a client with these examples; each target has its own secret key."""
        update, secure = self._update, self._request.secure
        run, local = update.message or {}, update.local or {}
        return simulate_message(
            model,
            *batch,
            method,
            local_steps=run["local_steps"],
            rounds=run["rounds"],
            clients=run["clients"],
            batch=local.get("batch"),
            max_unroll=local.get("max_unroll", MAX_UNROLL),
            recipe=replace(recipe_of(self._request.training, self._splits), nominal_size=None),
            key=None if secure else self._request.seed_for(f"noise {image}{purpose}"),
            exact=secure,
            **common,
        )

    def _batch(self, image: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Returns target number `image`; for the negative control also the decoy batch that is shared instead."""
        update, pool = self._update, self._splits.private
        # Seeded by the data alone: every defense and attack gets the same targets.
        generator = keyed(seed_of_data(self._splits.digest, "targets"))
        order = torch.randperm(len(pool), generator=generator)
        size = update.batch
        chosen = order[image * size : (image + 1) * size]
        inputs, labels = pool.inputs[chosen].to(self._device), pool.labels[chosen].to(self._device)
        if not self._request.never_saw:
            return inputs, labels, None
        others, decoy = self._decoys(image), self._splits.non_member
        return inputs, labels, (decoy.inputs[others].to(self._device), decoy.labels[others].to(self._device))

    def _decoys(self, image: int) -> Tensor:
        """Returns positions of the non-members that the negative control shares."""
        size = self._update.batch
        return torch.arange(image * size, (image + 1) * size) % len(self._splits.non_member)

    def _past(self, image: int) -> Tensor:
        """Returns positions of the non-members in the steps before the shared step."""
        update, count = self._update, len(self._splits.non_member)
        needed = update.step * (update.batch if update.local is None else update.local["batch"])
        # Counted from the end of the pool, because decoys of the negative control are taken from its start.
        return count - 1 - (torch.arange(needed) + image * needed) % count

    def _prior(self, image: int, inputs: Tensor, labels: Tensor) -> Prior:
        """Draws candidates for the first record of target number `image`, the same for every defense and control."""
        pool = self._splits.non_member
        free = torch.ones(len(pool), dtype=torch.bool)
        # Parameters may reveal participants of earlier steps, and the control's decoy took part in the shared step.
        free[self._decoys(image)] = free[self._past(image)] = False
        key = seed_of_data(self._splits.digest, f"prior {image}")
        return Prior.draw(
            (inputs, labels), (pool.inputs, pool.labels), self._update.prior, key, allowed=free.nonzero()[:, 0]
        )

    def _history(self, image: int) -> tuple[Tensor, Tensor] | None:
        """Returns non-member examples for the steps before the shared step."""
        update, pool = self._update, self._splits.non_member
        if not update.step:
            return None
        past = self._past(image)
        return pool.inputs[past].to(self._device), pool.labels[past].to(self._device)

    def _parameters(self) -> int:
        model = build_model(self._request, self._splits, of=self._update)
        return sum(p.numel() for p in model.parameters())


def _releases(shared: Shared) -> int:
    """Returns the number of messages that a ledger is charged for; 1 for a shared update."""
    return shared.releases if isinstance(shared, SharedMessage) else 1


def _choices(choices: list[Pick]) -> dict[str, Any]:
    """Returns columns of the picks, a row per target; -1 without a pick."""
    return {
        "target": list(range(len(choices))),
        "candidates": [choice.candidates for choice in choices],
        "sought": [choice.sought for choice in choices],
        "picked": [-1 if choice.picked is None else choice.picked for choice in choices],
    }


def _pictures(targets: list[_Attacked], floor: Tensor | None) -> dict[str, Any]:
    """Returns columns of true and reconstructed images, flattened (shape in the record's task); null without a result.

    The floor, the mean public image, is the same for all targets and stored in the first row only.
    """
    reconstructions: list[list[float] | None] = []
    matches: list[list[float] | None] = []
    for target in targets:
        if not isinstance(target.result, Reconstruction):
            continue
        matches += (
            [None] * len(target.inputs)
            if target.match is None
            else [column(x.flatten()).tolist() for x in target.match]
        )
        pictures = [column(x.flatten()).tolist() for x in target.result.inputs[: len(target.inputs)]]
        reconstructions += pictures + [None] * (len(target.inputs) - len(pictures))
    return {
        "target": [t for t, target in enumerate(targets) for _ in target.inputs],
        "label": [int(label) for target in targets for label in target.labels],
        "original": [column(x.flatten()).tolist() for target in targets for x in target.inputs],
        "reconstruction": reconstructions,
        "public_match": matches,
        "floor": [*([] if floor is None else [column(floor.flatten()).tolist()]), *[None] * len(reconstructions)][
            : len(reconstructions)
        ],
    }
