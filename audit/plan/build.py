"""Builders of requested objects: data splits, model, sampler, number of steps, defense with calibrated noise."""

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
    Federated,
    MembershipLimit,
    Recipe,
    Sampling,
    ToyRows,
    calibrate,
    group_norm_instead,
    noise_multiplier,
    noise_within,
    predict,
    seed_from,
)

from ..catalog import methods as catalog
from ..suite.task import Training
from .mislabelled_pool import without_mislabelled
from .request import RequestedMethod, TrainingRequest, Update
from .splits_cache import load_data


def load_splits(request: TrainingRequest, device: torch.device, *, of: Update | None = None) -> Splits:
    """Returns the splits of a request.

    Args:
        request: names the data set of its training, the sizes of the pools, and the seed.
        device: device of the result.
        of: a shared update, whose data set is used instead.
    """
    source = of or request.training
    splits = load_data(source.data, request.seed, source.sizes, device)
    return splits if of is not None else without_mislabelled(splits, request.training)


def build_model(request: TrainingRequest, splits: Splits, *, of: Update | None = None) -> nn.Module:
    """Returns a fresh model of a request; the same weights for every defense of a seed.

    Args:
        request: names the architecture of its training, and the seed.
        splits: determine the shape of inputs and the number of classes.
        of: a shared update, whose architecture is used instead.
    """
    if of is not None:
        return initialised(of.model, of.model_settings, splits, request.seed)
    model = request.training.model
    return initialised(model.name, model.settings, splits, request.seed)


def initialised(name: str, settings: dict[str, Any], splits: Splits, seed: int) -> nn.Module:
    """Returns a model with weights initialised by a seed.

    Layers of torchvision's models that mix examples become GroupNorm, without which no defense could train them.

    Args:
        name: of an architecture, or path of the user's own model.
        settings: the given settings.
        splits: determine the shape of inputs and the number of classes.
        seed: from the suite.
    """
    model = models.build(
        name,
        input_shape=splits.input_shape,
        classes=splits.classes,
        # Seeds of a request depend on its defense; this one does not, so all defenses start from the same weights.
        seed=seed_from("model", name, json.dumps(settings, sort_keys=True), splits.name, seed),
        **settings,
    )
    return group_norm_instead(model, input_shape=splits.input_shape) if name.startswith("torchvision:") else model


def planned(request: TrainingRequest, examples: int) -> tuple[Sampling, int]:
    """Returns the sampler and the number of steps of a request's training.

    For clients it is the sampler of a client of average size, and the local steps of one that is in every round.

    Args:
        request: of any cell.
        examples: number of training examples.
    """
    task = request.training
    own = examples if task.federated is None else examples / task.federated.clients
    rate = 1.0 if task.sampling == "full" else task.batch / (task.nominal_size or own)
    if request.never_saw:
        rate = min(rate, 1.0)  # `check_sizes` checked the members; the public pool may be smaller than a batch
    capped = {} if task.largest_batch is None else {"most": min(task.largest_batch, examples), "examples": examples}
    sampling = Sampling(task.sampling, rate, groups=task.groups or 1, **capped)
    if task.federated is not None:
        return sampling, task.federated.federation(sampling.steps_per_epoch).steps
    if task.epochs is None:
        raise ValueError("epochs must be set for central training, got none")
    return sampling, max(1, round(task.epochs * sampling.steps_per_epoch))


def recipe_of(training: Training, splits: Splits) -> Recipe:
    """Returns the training recipe, with the input range if the data set is built in and declares it.

    The range of a user's own data is computed from all examples, private ones included, so the trainer must not use it
    when it checks the model on synthetic examples.

    Args:
        training: of a request.
        splits: of its data.
    """
    if training.data_digest:
        return training.recipe
    whole = not splits.private.inputs.is_floating_point()
    return replace(training.recipe, input_domain=Domain(low=splits.low, high=splits.high, whole=whole))


def defend(request: TrainingRequest, examples: int) -> tuple[Defense, bool]:
    """Returns the defense of a request at its budget's noise, and whether that noise was matched instead of calibrated.

    A defense without a bound on an example's contribution proves nothing at any noise multiplier. For a budget that
    needs calibration it gets the noise that a bounded defense would need: its record is flagged `noise_matched`, and
    its epsilon stays infinite.

    Args:
        request: of any cell.
        examples: number of training examples.
    """
    defense, budget = built(request.defense), request.budget
    if defense.noise_multiplier is not None or not budget.draws_noise:
        return defense, False
    if budget.noise_multiplier is not None:
        return defense.with_noise(float(budget.noise_multiplier)), False
    sampling, steps = planned(request, examples)
    # A multiplier calibrated for another sampler or length would prove another epsilon.
    run = {"sampling": sampling, "steps": steps}
    statistics = request.training.recipe.statistics
    before = () if statistics is None else statistics.plans()
    # Any positive multiplier will do: a ledger entry has a reason if its plan has no bound.
    entries = predict(defense.with_noise(1.0), sampling=sampling, steps=steps, before=before).entries
    if not any(entry.reason for entry in entries):
        # Calibrated on the method's own plans, because one-off releases spend budget, too.
        return calibrate(defense, **budget.wanted, **run, before=before), False
    beside = tuple(entry for entry in entries if entry.one_off and not entry.reason)
    if budget.epsilon is not None:
        return defense.with_noise(noise_multiplier(**budget.wanted, **run, beside=beside)), True
    limit = MembershipLimit(**budget.wanted)
    return defense.with_noise(noise_within(limit, (Entry(0, steps, 1.0, sampling),), beside=beside)), True


def built(method: RequestedMethod) -> Defense:
    """Returns the requested defense, before its noise is set."""
    return catalog.defense(method.name, method.settings)


def reads_public(method: RequestedMethod) -> bool:
    """True if a defense reads public data, found by a dry run on a toy; for a federated method that it may."""
    return _reads_public(method.name, json.dumps(method.settings))


@cache
def _reads_public(name: str, settings: str) -> bool:
    # Settings come as JSON because a cache needs hashable keys; the noise does not matter here.
    defense = catalog.method(name, json.loads(settings))
    if isinstance(defense, Federated):
        return True  # its messages and its server may read some
    toy = ToyRows(TOY_DIM)
    predict(defense.with_noise(defense.noise_multiplier or 0.0), sampling=Sampling("poisson", 0.5), steps=4, public=toy)
    return toy.used
