"""Builders of what a request names: data splits, model, sampler, number of steps, defense with calibrated noise."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from leakbench.benchmarks import models
from leakbench.benchmarks.core import Splits
from leakbench.defenses.core import (
    TOY_DIM,
    Defense,
    Domain,
    Entry,
    MembershipLimit,
    Noise,
    Recipe,
    Sampling,
    ToyRows,
    calibrate,
    group_norm_instead,
    noise_multiplier,
    noise_within,
    predict,
    secure,
    seed_from,
    seeded,
)

from ..catalog import methods as catalog
from .mislabelled_pool import without_mislabelled
from .request import MethodAsked, Training, TrainingRequest, Update
from .splits_cache import load_data


def load_splits(request: TrainingRequest, device: torch.device, *, of: Update | None = None) -> Splits:
    """The splits that a request is about.

    Args:
        request: names the data set of its training, the sizes of the pools, and the seed.
        device: where they are wanted.
        of: a shared update, whose data set is wanted instead.
    """
    asked = of or request.training
    splits = load_data(asked.data, request.seed, asked.sizes, device)
    return splits if of is not None else without_mislabelled(splits, request.training)


def build_model(request: TrainingRequest, splits: Splits, *, of: Update | None = None) -> nn.Module:
    """A fresh model of a request; the same weights for every defense of a seed.

    Args:
        request: names the architecture of its training, and the seed.
        splits: decide the shape of inputs and the number of classes.
        of: a shared update, whose architecture is wanted instead.
    """
    asked = of or request.training
    return initialised(asked.model, asked.model_settings, splits, request.seed)


def initialised(name: str, settings: dict[str, Any], splits: Splits, seed: int) -> nn.Module:
    """A model with the weights that a seed gives it.

    Layers of torchvision's models that mix examples become GroupNorm, without which no defense could train them.

    Args:
        name: of an architecture, or the path of the user's own.
        settings: those given.
        splits: decide the shape of inputs and the number of classes.
        seed: of the suite.
    """
    model = models.build(
        name,
        input_shape=splits.input_shape,
        classes=splits.classes,
        # Not of the request, which names the defense: all defenses of a seed start from the same weights.
        seed=seed_from("model", name, json.dumps(settings, sort_keys=True), splits.name, seed),
        **settings,
    )
    return group_norm_instead(model, input_shape=splits.input_shape) if name.startswith("torchvision:") else model


def planned(request: TrainingRequest, examples: int) -> tuple[Sampling, int]:
    """The sampler and the number of steps of a request's training.

    Args:
        request: of any cell.
        examples: number of examples it trains on.
    """
    task = request.training
    rate = 1.0 if task.sampling == "full" else task.batch / (task.nominal_size or examples)
    if request.never_saw:
        rate = min(rate, 1.0)  # `check_sizes` looked at the members; the public pool may be smaller than a batch
    capped = {} if task.largest_batch is None else {"most": min(task.largest_batch, examples), "examples": examples}
    sampling = Sampling(task.sampling, rate, groups=task.groups, **capped)
    return sampling, max(1, round(task.epochs * sampling.steps_per_epoch))


def recipe_of(training: Training, splits: Splits) -> Recipe:
    """How a model is trained, with the range of its inputs where the data set is one of ours, which declares it.

    The range of a user's own data is read off them, private ones included, and the model must not be checked on it.

    Args:
        training: of a request.
        splits: of its data.
    """
    if training.data_digest:
        return training.recipe
    whole = not splits.private.inputs.is_floating_point()
    return replace(training.recipe, input_domain=Domain(low=splits.low, high=splits.high, whole=whole))


def defend(request: TrainingRequest, examples: int) -> tuple[Defense, bool]:
    """The defense of a request at its budget's noise, and whether that noise was matched instead of calibrated.

    A defense without a bound on an example's contribution proves nothing at any noise. For a budget that noise is
    calibrated to it gets what a bounded one would need: its record is flagged, and its epsilon stays infinite.

    Args:
        request: of any cell.
        examples: number of examples it trains on.
    """
    defense, budget = made(request.defense), request.budget
    if defense.noise_multiplier is not None or not budget.draws_noise:
        return defense, False
    if budget.noise_multiplier is not None:
        return defense.with_noise(float(budget.noise_multiplier)), False
    sampling, steps = planned(request, examples)
    # Sampling and steps of the very run: a multiplier that was calibrated for others proves another epsilon.
    run = {"sampling": sampling, "steps": steps}
    statistics = request.training.recipe.statistics
    before = () if statistics is None else statistics.plans()
    # At any positive multiplier: an entry of the ledger has a reason where its plan has no bound.
    entries = predict(defense.with_noise(1.0), sampling=sampling, steps=steps, before=before).entries
    if not any(entry.reason for entry in entries):
        # By the method's own plans, because what it releases once beside its steps spends budget, too.
        return calibrate(defense, **budget.wanted, **run, before=before), False
    beside = tuple(entry for entry in entries if entry.one_off and not entry.reason)
    if budget.epsilon is not None:
        return defense.with_noise(noise_multiplier(**budget.wanted, **run, beside=beside)), True
    limit = MembershipLimit(**budget.wanted)
    return defense.with_noise(noise_within(limit, (Entry(0, steps, 1.0, sampling),), beside=beside)), True


def made(method: MethodAsked) -> Defense:
    """The defense that a request names, before its noise is decided."""
    return catalog.defense(method.name, method.settings)


def noise_for(request: TrainingRequest) -> Noise:
    """The secret noise of a request: from its hash, or from the operating system."""
    return secure() if request.secure else seeded(request.seed_for("noise"))


def reads_public(method: MethodAsked) -> bool:
    """Whether a defense reads public data, found by a dry run of its plans on a toy."""
    return _reads_public(method.name, json.dumps(method.settings))


@cache
def _reads_public(name: str, settings: str) -> bool:
    # Settings come as JSON because a cache needs keys that can be hashed; the noise does not matter here.
    defense = catalog.defense(name, json.loads(settings))
    toy = ToyRows(TOY_DIM)
    predict(defense.with_noise(defense.noise_multiplier or 0.0), sampling=Sampling("poisson", 0.5), steps=4, public=toy)
    return toy.used
