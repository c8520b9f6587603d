"""Training settings chosen on public data: each defense by a grid, before anything private is touched.

Part of the public pool is trained on in place of the private examples (as many, under the same noise), another part
judges, the rest is public data for methods that read some. The pool must be the same under every seed, so that it holds
no member of any: then the choice costs no privacy, and the same values serve all seeds. Every point of a grid is a file
of its own; a run over existing results computes what is missing.
"""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from defenses.core import keyed, train
from leaderboard.records.files import read_bytes, sweep, write_bytes
from leaderboard.records.record import Provenance
from leaderboard.records.validation import build

from ..observe import logits_of
from ..plan.expand import budgets_of, build_model, defend, digest_of, load_splits, planned, reads_public, seed_of
from ..scoring.utility import score_utility
from ..subjects.outcome import examples_of, noise_for, pick
from ..suite.suite import DefenseChoice, Suite, SuiteError
from .executors.local import execute
from .progress import Report
from .provenance import library, third_party
from .resume import StaleError, refuse_other_code

SCHEMA = 2


@dataclass(frozen=True)
class _Point:
    """One training of a grid: the request that decides its result, and the values tried."""

    request: dict[str, Any]
    tried: dict[str, Any]

    @property
    def words(self) -> str:
        values = ", ".join(f"{key} {value:g}" for key, value in self.tried.items())
        return f"tune {self.request['defense']['name']} on public data: {values}"


def tune(
    suite: Suite,
    directory: Path,
    *,
    device: torch.device,
    jobs: int | None,
    report: Report,
    recompute: bool = False,
) -> Suite:
    """The suite with the settings of its `tune` table chosen; the suite itself where it has none.

    Args:
        suite: with its overrides and selection.
        directory: choices go to `directory/tuning`, one file for a defense and budget.
        device: where to compute.
        jobs: processes, as in `execute`.
        report: called with (points done, points in all, what just happened).
        recompute: whether points of another code are tried again, instead of refused.

    Raises:
        StaleError: points of another code, or edited ones, are there.
        SuiteError: the public data are too few to train on, to judge and to be read.
    """
    if suite.tune is None:
        return suite
    grids = [
        (choice, budget, points)
        for choice in suite.defense_grid()
        for budget in budgets_of(suite, choice)
        if (points := _points(suite, choice, budget))
    ]
    _check_public(suite)
    folder = directory / "tuning" / "points"
    folder.mkdir(parents=True, exist_ok=True)
    points = {digest_of(point.request): point for _, _, grid in grids for point in grid}
    sweep(folder)
    there = _kept(points, folder, recompute=recompute)
    todo = [point for name, point in points.items() if name not in there]
    done, total = len(points) - len(todo), len(points)
    report(done, total, "choosing settings on public data")
    work = partial(_try, folder=folder, device=device, origins={name: _origin(p) for name, p in points.items()})
    with closing(execute(todo, work, device=device, jobs=jobs, drafts=folder)) as executed:
        for point, _ in executed:
            done += 1
            report(done, total, point.words)
    there = _kept(points, folder)
    tuned = suite
    for choice, budget, grid in grids:
        tried = [there[digest_of(point.request)] for point in grid]
        # The first of equals.
        best = max(tried, key=lambda point: point["accuracy"])
        values = {key: best[key] for key in grid[0].tried}
        document = {
            "schema": SCHEMA,
            "suite": suite.name,
            "defense": choice.name,
            "budget": grid[0].request["budget"],
            "chosen": values,
            "grid": tried,
            "request": {key: value for key, value in grid[0].request.items() if key != "tried"},
        }
        digest = digest_of({"grid": [point.request for point in grid]})
        _write(document, directory / "tuning" / f"{digest}.json")
        tuned = tuned.with_tuned(choice, budget, values, digest)
    return tuned


def _points(suite: Suite, choice: DefenseChoice, budget: dict[str, float]) -> list[_Point]:
    """Every combination of the grid's values that this defense takes and does not set itself."""
    if suite.tune is None:
        return []
    keys = [key for key in suite.tune.grid if key in suite.tunable(choice)]
    points = []
    for values in itertools.product(*(suite.tune.grid[key] for key in keys)):
        tried = dict(zip(keys, values, strict=True))
        at = choice.with_values(tried)
        task = suite.task_for(at)
        request = _task_of(suite) | {
            "schema": SCHEMA,
            "defense": {"name": at.name, "settings": at.settings},
            "budget": _budget_of(suite, budget),
            "control": None,
            "seed": suite.tune.seed,
            "validation": suite.tune.validation,
            "tried": tried,
        }
        request["task"] = request["task"] | {
            "batch": task.batch,
            "epochs": suite.tune.epochs or task.epochs,
            "lr": task.lr,
            "momentum": task.momentum,
        }
        points.append(_Point(request, tried))
    return points if keys else []


def _budget_of(suite: Suite, budget: dict[str, float]) -> dict[str, float]:
    """The budget at which settings are chosen for a budget."""
    tune = suite.tune
    if tune is None or len(budget) == 1:  # a defense without noise has delta alone
        return dict(budget)
    own = {"epsilon": tune.epsilon, "noise_multiplier": tune.noise_multiplier}
    return budget | {key: value for key, value in own.items() if key in budget and value is not None}


def _task_of(suite: Suite) -> dict[str, Any]:
    """What is the same for every point: the public data, the model, and how it is trained."""
    task = suite.task
    return {
        "suite": suite.name,
        "seed": suite.tune.seed if suite.tune else 0,
        "task": {
            "data": task.data,
            "model": task.model.name,
            "model_settings": dict(task.model.settings),
            "private": task.private,
            "non_member": task.non_member,
            "public": task.public,
            "optimizer": task.optimizer,
            "schedule": task.schedule,
            "sampling": task.sampling,
            "engine": task.engine,
        },
    }


def _check_public(suite: Suite) -> None:
    if suite.tune is None:
        return
    request, here = _task_of(suite), torch.device("cpu")
    splits = load_splits(request, here)
    for seed in suite.seeds:
        if not torch.equal(load_splits(request | {"seed": seed}, here).public.ids, splits.public.ids):
            raise SuiteError(
                f"{suite.source}: tune: needs public examples that are the same under every seed, and those of "
                f"{suite.task.data!r} with seed {seed} hold members of seed {suite.tune.seed}; "
                f"take one seed, the same for seeds and tune.seed"
            )
    needed, there = len(splits.private) + suite.tune.validation, len(splits.public)
    if needed >= there:
        raise SuiteError(
            f"{suite.source}: tune: must leave public examples for methods that read some, got {there} of which "
            f"{len(splits.private)} are trained on and {suite.tune.validation} judge; "
            "raise task.public, or lower tune.validation or task.private"
        )


def _origin(point: _Point) -> Provenance:
    return replace(library(), third_party=third_party(point.request | {"attack": None}))


def _kept(points: dict[str, _Point], folder: Path, *, recompute: bool = False) -> dict[str, dict[str, Any]]:
    """The points of former runs that were tried with this code, by name: values and accuracy."""
    found, stale = {}, []
    for name, point in points.items():
        path = folder / f"{name}.json"
        if not path.exists() and not path.is_symlink():
            continue
        try:
            data = json.loads(read_bytes(path, "tuning"))
            result = data["result"]
            differs = build(Provenance, data["provenance"], "provenance").differences(_origin(point))
            if data["seal"] != digest_of(result):
                differs = ["it was edited after it was written"]
        except (ValueError, KeyError, TypeError):
            differs, result = ["it is not a whole document of this version"], {}
        if not differs:
            found[name] = result
        elif not recompute:
            stale.append(f"{point.words}: {'; '.join(differs)}")
    if stale:
        raise StaleError(
            f"{len(stale)} point{'s' if len(stale) > 1 else ''} in {folder} cannot be kept ({stale[0]}); "
            "compute them again with --recompute, or name another --out"
        )
    return found


def _try(point: _Point, *, folder: Path, device: torch.device, origins: dict[str, Provenance]) -> None:
    """Trains one point on public data and writes how well it did on others."""
    request = point.request
    refuse_other_code(origins[digest_of(request)])
    splits = load_splits(request, device)
    public, task = examples_of(splits.public, device), request["task"]
    coins = keyed(seed_of({"digest": splits.digest}, "tuning"))
    order = torch.randperm(len(public), generator=coins)
    sizes = [len(splits.private), request["validation"]]
    own, judges, rest = (pick(public, part) for part in order.split([*sizes, len(public) - sum(sizes)]))
    sampling, steps = planned(request, len(own))
    model = build_model(task["model"], task["model_settings"], splits, request["seed"])
    run = train(
        model,
        (own.inputs, own.labels),
        defend(request, len(own))[0],
        sampling=sampling,
        steps=steps,
        lr=task["lr"],
        momentum=task["momentum"],
        optimizer=task["optimizer"],
        schedule=task["schedule"],
        public=(rest.inputs, rest.labels) if reads_public(**request["defense"]) else None,
        noise=noise_for(request),
        seed=seed_of(request, "coins"),
        sampler_key=seed_of(request, "sampler"),
        engine=task["engine"],
        device=device,
    )
    accuracy = score_utility(logits_of(run.model, judges.inputs), judges.labels)["accuracy"]
    found = {"accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high, "n": accuracy.n}
    name, result = digest_of(request), point.tried | found
    document = {"result": result, "seal": digest_of(result), "provenance": asdict(origins[name])}
    _write(document, folder / f"{name}.json")


def _write(document: dict[str, Any], path: Path) -> None:
    write_bytes(path, json.dumps(document, indent=2, allow_nan=False).encode() + b"\n")
