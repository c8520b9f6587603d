"""Hyperparameter search (tuning) on public data: a grid for each defense, before any private data are read.

The public pool is divided into training examples (as many as private ones, under the same noise multiplier), validation
examples on which accuracy is measured, and a rest for methods that read public data. The pool must be the same under
every seed of the suite, so that it holds no member under any of them: the choice then costs no privacy, and the same
values serve all seeds. Every point of a grid is an artifact; a run over existing results computes the missing ones.
Trials of federated suites train public clients (`federated_tuning.py`).
"""

from __future__ import annotations

import itertools
from contextlib import closing
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from leakbench.attacks.core import Examples
from leakbench.benchmarks.core import Split, Splits
from leakbench.defenses.core import keyed, train
from leakbench.leaderboard.records.files import sweep
from leakbench.leaderboard.records.record import Provenance

from ..plan.artifact import Artifact
from ..plan.build import defend, load_splits, planned, reads_public, recipe_of
from ..plan.expand import budgets_of, requested_defense
from ..plan.federation import cannot_federate
from ..plan.pretrain import starting_model
from ..plan.request import Budget, SeedSet, TrainingRequest, digest_of, seed_of_data
from ..plan.splits_cache import load_data
from ..scoring.utility import score_utility
from ..subjects.outcome import examples_of, pick
from ..suite.errors import SuiteError
from ..suite.schema import TuneTable
from ..suite.suite import DefenseChoice, Suite
from ..suite.task import Task, Training
from ..targets.observe import logits_of
from .artifacts import compute_artifact, origin_of, read_computed, read_kept, write_document
from .executors.local import Local
from .federated_tuning import check_trial, trained_by_clients, trial_of
from .graph import Graph
from .placement import device_of
from .progress import Report

Placed = tuple[Artifact, Provenance, torch.device]
"""A point, the provenance of its code at the start of the run, and the device that it is computed on."""

SCHEMA = 2  # version of the files of points and choices; part of a point's name


def tune(
    suite: Suite,
    directory: Path,
    *,
    device: torch.device | None,
    jobs: int | None,
    report: Report,
    recompute: bool = False,
) -> Suite:
    """Runs the grids of a suite's `tune` table; returns the suite with the best values per defense and budget.

    Args:
        suite: with its overrides and selection.
        directory: choices go to `directory/tuning`, one file per defense and budget.
        device: as in `harness.run`.
        jobs: likewise.
        report: called with (points done, total number, latest event).
        recompute: whether points of other code are recomputed instead of refused.

    Raises:
        StaleError: existing points are edited, or of other code.
        SuiteError: the public data are too few for training, validation and reading.
    """
    if suite.tune is None:
        return suite
    grids = [
        (choice, budget, points)
        for choice in suite.defense_grid()
        if not cannot_federate(suite, choice)
        for budget in budgets_of(suite, choice)
        if (points := _points(suite, choice, budget))
    ]
    _check_public(suite)
    for _, _, points in grids if suite.federated is not None else ():
        for point in points:
            _check_trial(suite, point)
    results = _tried([point for _, _, grid in grids for point in grid], directory, device, jobs, report, recompute)
    tuned = suite
    for choice, budget, grid in grids:
        tried = [results[point.name] for point in grid]
        # `max` takes the first of equals: the order of the grid decides, not the order of completion.
        best = max(tried, key=lambda point: point["accuracy"])
        values = {key: best[key] for key in grid[0].request["tried"]}
        document = {
            "schema": SCHEMA,
            "suite": suite.name,
            "defense": choice.name,
            "budget": grid[0].request["budget"],
            "chosen": values,
            "grid": tried,
            "request": {key: value for key, value in grid[0].request.items() if key != "tried"},
        }
        # The digest is of the grid, not of its results, because ids of cells depend on it. The digest of the file, with
        # the results, is in the provenance.
        digest = digest_of({"grid": [point.request for point in grid]})
        write_document(document, directory / "tuning" / f"{digest}.json")
        tuned = tuned.with_tuned(choice, budget, values, digest)
    return tuned


def _tried(
    grid: list[Artifact],
    directory: Path,
    device: torch.device | None,
    jobs: int | None,
    report: Report,
    recompute: bool,
) -> dict[str, dict[str, Any]]:
    """Returns the result of every point, by its name; missing points are computed."""
    folder = directory / "tuning" / "points"
    folder.mkdir(parents=True, exist_ok=True)
    # By name, so that a point shared by several budgets is computed once.
    points = {point.name: point for point in grid}
    sweep(folder)
    results = read_kept(points, folder, recompute=recompute)
    graph: Graph[Placed] = Graph()
    for name, point in points.items():
        if name not in results:
            graph.add(name, (point, origin_of(point), device_of(point, device)))
    done, total = len(points) - len(graph), len(points)
    report(done, total, "choosing settings on public data")
    work = partial(_make, folder=folder)
    with closing(Local(itemgetter(-1), jobs, folder).run(graph, work)) as executed:
        for (point, *_), _ in executed:
            done += 1
            report(done, total, point.words)
    # Points of this run are read from their files, too, because workers return no results.
    return read_computed(points.values(), folder)


def _make(placed: Placed, folder: Path) -> str:
    point, origin, device = placed
    return compute_artifact(point, folder, device, origin)


def _points(suite: Suite, choice: DefenseChoice, budget: dict[str, float]) -> list[Artifact]:
    """Returns a defense's grid: every combination of values for its keys that its entry does not set."""
    if suite.tune is None:
        return []
    keys = [key for key in suite.tune.grid if key in suite.tunable(choice)]
    if not keys:
        return []
    combinations = itertools.product(*(suite.tune.grid[key] for key in keys))
    return [_point(suite, suite.tune, choice, budget, dict(zip(keys, values, strict=True))) for values in combinations]


def _point(
    suite: Suite, tune: TuneTable, choice: DefenseChoice, budget: dict[str, float], tried: dict[str, Any]
) -> Artifact:
    at = choice.with_values(tried)
    task = suite.task_for(at)
    asked_for = TrainingRequest(
        suite=suite.name,
        defense=requested_defense(at),
        budget=Budget(**_budget_of(suite, budget)),
        control=None,
        seed=tune.seed,
        training=_on_public(task).model_copy(
            update={"epochs": tune.epochs or task.epochs, "federated": suite.federated}
        ),
    )
    request = {
        "suite": suite.name,
        "seed": tune.seed,
        "task": _task_of(asked_for.training),
        "schema": SCHEMA,
        "defense": asked_for.defense.canonical(),
        "budget": asked_for.budget.to_dict(),
        "control": None,
        "validation": tune.validation,
        "tried": tried,
        # Absent in central points, whose names are hashes of this.
        **({} if suite.federated is None else {"trial": trial_of(tune, suite.federated)}),
    }
    numbers = {key: format(value, "g") for key, value in tried.items() if isinstance(value, int | float)}
    values = ", ".join(f"{key} {value}" for key, value in (tried | numbers).items())
    words = f"tune {at.name} on public data: {values}"
    return Artifact(request, words, partial(_try, asked_for, request), (asked_for.defense,), asked_for)


def _budget_of(suite: Suite, budget: dict[str, float]) -> dict[str, float]:
    """Returns the training budget of a grid's points: the table's if it names one, else the suite's."""
    tune = suite.tune
    if tune is None or len(budget) == 1:  # a defense without noise has delta only
        return dict(budget)
    own = {"epsilon": tune.epsilon, "noise_multiplier": tune.noise_multiplier}
    return budget | {key: value for key, value in own.items() if key in budget and value is not None}


def _on_public(task: Task) -> Training:
    """Returns a task's training on public examples, of which none is a candidate or a canary."""
    return Training.of(task).model_copy(update={"candidates": None, "canaries": None})


def _task_of(training: Training) -> dict[str, Any]:
    """Returns a point's training in file form; without candidates, because no membership is tested here."""
    # Fields at their defaults are included, unlike in requests of cells: names of existing points are hashes of this.
    names = (
        "private", "non_member", "public", "optimizer", "schedule", "sampling", "engine", "batch", "epochs", "lr",
        "momentum",
    )  # fmt: skip
    # `to_dict` adds the fields introduced later, only if they are set.
    content = training.to_dict() | {name: getattr(training, name) for name in names}
    return {key: value for key, value in content.items() if key != "candidates"}


def _check_public(suite: Suite) -> None:
    if suite.tune is None:
        return
    training = _on_public(suite.task)
    splits = load_data(training.data, suite.tune.seed, training.sizes)
    # If a seed decides all pools, an example that is public under one seed may be a member under another.
    for seed in suite.seeds:
        if not torch.equal(load_data(training.data, seed, training.sizes).public.ids, splits.public.ids):
            raise SuiteError(
                f"{suite.source}: tune: needs public examples that are the same under every seed, and those of "
                f"{suite.task.data!r} with seed {seed} hold members of seed {suite.tune.seed}; "
                f"take one seed, the same for seeds and tune.seed"
            )
    trained_on = suite.tune.trial_examples or len(splits.private)
    needed, available = trained_on + suite.tune.validation, len(splits.public)
    if needed >= available:
        lower = "task.private" if suite.federated is None else "tune.trial_examples"
        raise SuiteError(
            f"{suite.source}: tune: must leave public examples for methods that read some, got {available} of which "
            f"{trained_on} are trained on and {suite.tune.validation} judge; "
            f"raise task.public, or lower tune.validation or {lower}"
        )


def _check_trial(suite: Suite, point: Artifact) -> None:
    """Refuses public clients that cannot take the steps of private ones."""
    request = point.training
    if suite.tune is None or request is None:
        return
    splits = load_data(suite.task.data, suite.tune.seed, _on_public(suite.task).sizes)
    own, _, readable = _dealt(splits, point.request)
    public = splits.public
    clients = Split(ids=public.ids[own], inputs=public.inputs[own], labels=public.labels[own])
    try:
        check_trial(request, point.request["trial"], len(splits.private), clients, len(readable))
    except ValueError as error:
        raise SuiteError(f"{suite.source}: tune: {error}") from None


def _try(request: TrainingRequest, content: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Trains one point on public examples and measures its accuracy on others.

    Args:
        request: the training, with public data in place of private data.
        content: the point's own request, from which its seeds follow.
        device: device of the computation.
    """
    splits = load_splits(request, device)
    public = examples_of(splits.public, device)
    own, judges, public_rest = (pick(public, part) for part in _dealt(splits, content))
    seeds = SeedSet.of(content, request.seed)
    if request.training.federated is None:
        model = _trained(request, splits, own, public_rest, seeds)
    else:
        model = trained_by_clients(request, content["trial"], splits, own, public_rest, seeds)
    accuracy = score_utility(logits_of(model, judges.inputs), judges.labels)["accuracy"]
    measured = {"accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high, "n": accuracy.n}
    return content["tried"] | measured


def _dealt(splits: Splits, content: dict[str, Any]) -> tuple[Int64[Tensor, "_"], ...]:
    """Returns the positions of the public examples that are trained on, that judge, and that a method may read."""
    # Seeded by the data alone: all points are compared on the same examples.
    order = torch.randperm(len(splits.public), generator=keyed(seed_of_data(splits.digest, "tuning")))
    trained_on = content.get("trial", {}).get("examples") or len(splits.private)
    sizes = [trained_on, content["validation"]]
    return order.split([*sizes, len(splits.public) - sum(sizes)])


def _trained(request: TrainingRequest, splits: Splits, own: Examples, rest: Examples, seeds: SeedSet) -> nn.Module:
    """Returns the model of a central trial.

    Args:
        request: the training.
        splits: of its data.
        own: public examples that are trained on.
        rest: public examples that the method may read.
        seeds: of the trial. Seeded even for a run with secure noise, because it holds no private data.
    """
    task = request.training
    sampling, steps = planned(request, len(own))
    return train(
        # From the remaining public examples: training and validation examples must be new to the model.
        starting_model(request, splits, rest),
        (own.inputs, own.labels),
        defend(request, len(own))[0],
        sampling=sampling,
        steps=steps,
        lr=task.lr,
        public=(rest.inputs, rest.labels) if reads_public(request.defense) else None,
        **seeds.arguments(),
        recipe=recipe_of(task, splits),
        execution=task.execution(own.inputs.device),
    ).model
