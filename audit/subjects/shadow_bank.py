"""Shadow banks: models trained like a target, on random halves of its candidates, whose outputs are kept.

Shokri et al., S&P 2017; Carlini et al., S&P 2022. Shadow models use the target's trainer, defense, noise, sampler and
length, because outputs of another training differ, and a test calibrated on them finds less. Each is trained on as many
examples as the target: half of the candidates, and further examples of the pools that are not candidates. If members
outnumber non-members, the further examples are mostly members of the target, because no others are left.

Halves are seeded by the digest of the splits, which every record holds, and an attack is told which models were trained
on a candidate. It can infer the candidate's position from both, so positions must say nothing about membership in the
target: candidates are ordered by a hash of their content.

Canaries are in no shadow model, because a trainer of shadow models does not have them; a target with canaries is
trained on these additional records.

The target is never a model of its own bank. Every candidate is in exactly half of the models; if the target were among
them, an example in fewer than half of the others would be its member (the positive bias of "efficient" LiRA,
arXiv:2605.25819).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leakbench.attacks.core import MOST_VIEWS, Examples, Knows, NotApplicable, Shadows, balanced_halves, viewed
from leakbench.benchmarks.core import Splits
from leakbench.defenses.core import StackError, keyed, train, train_stacked

from ..catalog import methods as catalog
from ..plan.artifact import Artifact, Artifacts
from ..plan.build import defend, load_splits, planned, reads_public, recipe_of
from ..plan.pretrain import starting_model
from ..plan.request import Request, SeedSet, TrainingRequest, seed_of, seed_of_data
from ..targets.candidates import content_order
from ..targets.observe import logits_of
from .outcome import candidate_pools, examples_of, join, pick

TOGETHER = 8
"""Models per artifact, trained at once or in the same process; an interrupted run loses at most these."""


@dataclass(frozen=True, kw_only=True)
class ShadowStack:
    """Some models of a bank; calling it trains them.

    Attributes:
        request: the training of the target, without suite and control role: banks are shared by content.
        first: number of the first model, even.
        count: number of models, even: the second of each pair is trained on the candidates left out of the first.
        views: augmented views of each candidate that the models are queried on.
    """

    request: TrainingRequest
    first: int
    count: int
    views: int

    def content(self) -> dict[str, Any]:
        """Returns everything that determines the outputs, as plain JSON values."""
        return self._training() | {"shadows": {"first": self.first, "count": self.count, "views": self.views}}

    def _training(self) -> dict[str, Any]:
        """Returns the training alone, from which seeds derive: a larger bank contains the models of a smaller bank."""
        content = self.request.canonical()
        return {key: content[key] for key in content if key not in ("suite", "control")}

    def seed_for(self, purpose: str, model: int) -> int:
        """Returns a seed for a random process of one model.

        Args:
            purpose: name of the random draw, such as "noise".
            model: number of the model in the bank.
        """
        return seed_of(self._training(), f"shadow {model} {purpose}")

    def _seeds(self, number: int) -> SeedSet:
        """Returns the seeds of one model."""
        request = self.request
        # Random initial weights are the trainer's own draw; weights pretrained on public examples are shared by all.
        model = self.seed_for("model", number) if request.training.pretrain is None else request.seed
        return SeedSet.of(self._training(), model, run=f"shadow {number} ", secure=request.secure)

    def __call__(self, device: torch.device) -> dict[str, Any]:
        """Trains and queries the models; returns their outputs as plain JSON values."""
        splits = load_splits(self.request, device)
        candidates = by_content(join(*candidate_pools(splits, self.request.training.candidates, device)))
        public = examples_of(splits.public, device)
        augmented = viewed(candidates.inputs, self.views)  # refuses inputs that are not images, before any training
        halves = halves_of(splits, len(candidates), self.first + self.count)[self.first :]
        others = _non_candidates(splits, candidates, device)
        size = len(splits.private)
        members = []
        for number, half in enumerate(halves, start=self.first):
            order = torch.randperm(len(others), generator=keyed(self.seed_for("others", number)))
            non_candidates = len(candidates) + order[: max(0, size - int(half.sum()))]
            members.append(torch.cat([half.nonzero()[:, 0], non_candidates]))
        models = self._trained(join(candidates, others), members, public, splits)
        answers = [logits_of(model, augmented.flatten(0, 1)).unflatten(0, augmented.shape[:2]) for model in models]
        none = public.inputs.new_zeros(0, splits.classes)
        population = [logits_of(model, public.inputs) if len(public) else none for model in models]
        return {"logits": packed(torch.stack(answers)), "population": packed(torch.stack(population))}

    def _trained(self, pool: Examples, members: list[Tensor], public: Examples, splits: Splits) -> list[nn.Module]:
        """Trains the models: stacked in one training if it supports model and defense, else in sequence."""
        request, numbers = self.request, range(self.first, self.first + self.count)
        alike = len({len(chosen) for chosen in members}) == 1
        # Secret noise, and an explicitly requested engine, need the ordinary trainer.
        plain = not (request.secure or reads_public(request.defense)) and request.training.engine == "auto"
        if alike and plain:
            models = [self._begun(number, public, splits) for number in numbers]
            sampling, steps = planned(request, len(members[0]))
            try:
                train_stacked(
                    models,
                    (pool.inputs, pool.labels),
                    torch.stack(members),
                    defend(request, len(members[0]))[0],
                    sampling=sampling,
                    steps=steps,
                    lr=request.training.lr,
                    noise=keyed(self.seed_for("noise", self.first)),
                    seeds=[self.seed_for("coins", number) for number in numbers],
                    sampler_keys=[self.seed_for("sampler", number) for number in numbers],
                    recipe=recipe_of(request.training, splits),
                )
            except StackError:
                pass
            else:
                return models
        begun = ((number, self._begun(number, public, splits)) for number in numbers)
        return [
            self._alone(number, model, pick(pool, chosen), public, splits)
            for (number, model), chosen in zip(begun, members, strict=True)
        ]

    def _begun(self, number: int, public: Examples, splits: Splits) -> nn.Module:
        request = replace(self.request, seed=self._seeds(number).model)
        return starting_model(request, splits, public).to(public.inputs.device)

    def _alone(self, number: int, model: nn.Module, examples: Examples, public: Examples, splits: Splits) -> nn.Module:
        request, task = self.request, self.request.training
        sampling, steps = planned(request, len(examples))
        return train(
            model,
            (examples.inputs, examples.labels),
            defend(request, len(examples))[0],
            sampling=sampling,
            steps=steps,
            lr=task.lr,
            public=(public.inputs, public.labels) if len(public) and reads_public(request.defense) else None,
            **self._seeds(number).arguments(),
            recipe=recipe_of(task, splits),
            execution=task.execution(examples.inputs.device),
        ).model


def halves_of(splits: Splits, count: int, models: int) -> Tensor:
    """Returns which candidates, in content order, each model is trained on: bool [models, count], on the CPU.

    Args:
        splits: its digest is the seed.
        count: number of candidates.
        models: even.
    """
    return balanced_halves(count, models, keyed(seed_of_data(splits.digest, "shadow halves")))


def by_content(candidates: Examples) -> Examples:
    """Returns the candidates in content order, the order of a bank, which is independent of membership."""
    return pick(candidates, content_order(candidates))


def _non_candidates(splits: Splits, candidates: Examples, device: torch.device) -> Examples:
    """Returns the examples of the pools that are not candidates."""
    everybody = join(examples_of(splits.private, device), examples_of(splits.non_member, device))
    return pick(everybody, (~torch.isin(everybody.ids, candidates.ids)).nonzero()[:, 0])


def shadow_artifacts(request: Request) -> tuple[Artifact, ...]:
    """Returns the stacks of shadow models that an attack's cell depends on; none if it knows no shadow models.

    Args:
        request: of a cell with an attack, whose settings `shadows` and `views` give the number of models and of views.

    Raises:
        ValueError: an impossible number of models or views, or an attack without these settings.
    """
    requested_attack = request.requested_attack
    if Knows.SHADOWS not in catalog.attack(requested_attack.name).requires.knows:
        return ()
    if "shadows" not in requested_attack.settings:
        raise ValueError(
            f"{requested_attack.name} knows shadow models, so it must have a setting `shadows`, how many; it has none"
        )
    models, views = requested_attack.settings["shadows"], requested_attack.settings.get("views", 1)
    for name, value, rule, fits in (
        ("shadows", models, "an even number, at least 2: they halve the candidates", lambda n: n >= 2 and n % 2 == 0),
        ("views", views, f"a whole number in [1, {MOST_VIEWS}]", lambda n: 1 <= n <= MOST_VIEWS),
    ):
        if type(value) is not int or not fits(value):
            raise ValueError(f"{name} of {requested_attack.name} must be {rule}, got {value!r}")
    return tuple(_artifact(stack) for stack in bank_of(request.of_training(), models, views))


def bank_of(request: TrainingRequest, models: int, views: int) -> list[ShadowStack]:
    """Returns the stacks of a bank, in order.

    Args:
        request: the training of the target.
        models: number of models, even.
        views: augmented views of each candidate.
    """
    own = replace(request, suite="", control=None)
    return [
        ShadowStack(request=own, first=first, count=min(TOGETHER, models - first), views=views)
        for first in range(0, models, TOGETHER)
    ]


def _artifact(stack: ShadowStack) -> Artifact:
    request = stack.request
    words = f"train shadow models {stack.first + 1} to {stack.first + stack.count} of {request.defense.name}"
    return Artifact(
        request=stack.content(),
        words=f"{words}, seed {request.seed}",
        make=stack,
        methods=(request.defense,),
        training=request,
        models=stack.count,
    )


def read_bank(
    needs: Sequence[Artifact], results: Artifacts, splits: Splits, candidates: Examples, ids: Tensor
) -> Shadows:
    """Returns the outputs of a bank on the candidates, in the attack's order.

    Args:
        needs: stacks of the bank, in order.
        results: results of the stacks, by name.
        splits: the splits that the models were trained on.
        candidates: the candidates, in any order.
        ids: ids of the candidates, in the order of the result.

    Raises:
        NotApplicable: a model of the bank diverged.
    """
    return shadows_on(*outputs_of([results[artifact.name] for artifact in needs]), splits, candidates, ids)


def outputs_of(stacks: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    """Returns logits on the candidates in content order, and on the public examples, of stacks in order."""
    logits, population = (torch.cat([unpacked(stack[name]) for stack in stacks]) for name in ("logits", "population"))
    return logits, population


def shadows_on(logits: Tensor, population: Tensor, splits: Splits, candidates: Examples, ids: Tensor) -> Shadows:
    """Returns the outputs of a bank on the candidates, in the attack's order.

    Args:
        logits: [models, candidates, views, classes], of all candidates in content order.
        population: [models, public, classes].
        splits: the splits that the models were trained on.
        candidates: the candidates, in any order.
        ids: ids of the candidates, in the order of the result.

    Raises:
        NotApplicable: a model of the bank diverged.
    """
    logits, population = logits.to(ids.device), population.to(ids.device)
    diverged = ~(logits.isfinite().flatten(1).all(1) & population.isfinite().flatten(1).all(1))
    if int(diverged.sum()):
        raise NotApplicable(f"{int(diverged.sum())} of its {len(logits)} shadow models diverged; take a smaller lr")
    halves = halves_of(splits, len(candidates), len(logits)).to(ids.device)
    in_order = by_content(candidates).ids
    by_id = in_order.argsort()
    places = by_id[torch.searchsorted(in_order[by_id], ids)]
    return Shadows(
        logits=logits[:, places],
        trained_on=halves[:, places],
        population=population if population.shape[1] else None,
    )


def packed(values: Tensor) -> dict[str, Any]:
    """Encodes a tensor as plain JSON values: float32, little-endian, in base64; NaN and infinity included."""
    array = values.detach().cpu().numpy().astype("<f4")
    return {"shape": list(array.shape), "float32": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()}


def unpacked(content: dict[str, Any]) -> Tensor:
    """Decodes the result of `packed`.

    Raises:
        ValueError: number of values and shape do not fit.
    """
    raw, shape = base64.b64decode(content["float32"], validate=True), tuple(content["shape"])
    if len(raw) != 4 * math.prod(shape):
        raise ValueError(f"an array of shape {list(shape)} must have {4 * math.prod(shape)} bytes, got {len(raw)}")
    return torch.from_numpy(np.frombuffer(raw, dtype="<f4").astype(np.float32).reshape(shape))
