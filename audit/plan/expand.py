"""The cells of a suite: every defense x attack x seed as a resolved request, decided before any compute.

A cell's id is a hash of its request, so a run over existing results knows what is missing, and adding a cell to a suite
moves no other. What a random process in a cell decides derives from the same hashes: cells that train the same model
share one `Training`, and all defenses of one seed start from the same weights. What cannot be run is found here, from
declarations, toy runs and shapes, and becomes a cell that says why.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attacks.core import Access, Knows, Requirements
from benchmarks import models
from benchmarks.core import Sizes, Splits
from defenses.core import (
    TOY_DIM,
    Defense,
    Sampling,
    ToyRows,
    calibrate,
    group_norm_instead,
    noise_multiplier,
    predict,
    refuse_batch_norm,
    seed_from,
)

from ..catalog import methods as catalog
from ..suite.schema import ModelChoice
from ..suite.suite import AttackChoice, DefenseChoice, Suite, SuiteError, check_sizes
from .splits_cache import load_data

BASELINE = "sgd"
"""The defense that must leak: with controls, its cells are the positive control."""

_SHARED = Knows.LABELS | Knows.BATCH_SIZE | Knows.POPULATION | Knows.DEFENSE
_RUN = Knows.POPULATION | Knows.DEFENSE | Knows.OTHERS
OFFERED = {
    ("reconstruction", Access.UPDATE): Requirements(access=Access.UPDATE, knows=_SHARED),
    ("membership", Access.UPDATE): Requirements(access=Access.UPDATE, knows=_RUN),
    ("membership", Access.ALL_STEPS): Requirements(access=Access.ALL_STEPS, knows=_RUN),
    ("membership", Access.BLACK_BOX): Requirements(access=Access.BLACK_BOX, knows=Knows.POPULATION),
    ("membership", Access.WHITE_BOX): Requirements(access=Access.WHITE_BOX, knows=Knows.POPULATION),
}
"""(kind of attack, access) -> the threat model that a suite offers."""


@dataclass(frozen=True)
class Cell:
    """One record to be.

    Attributes:
        request: everything that decides the result, as plain JSON values.
        attack: None for utility.
        skip: why it cannot be run; empty if it can.
        reported: the papers' figures for it, as (metric, value, source).
    """

    request: dict[str, Any]
    skip: str = ""
    reported: tuple[tuple[str, float, str], ...] = ()

    @property
    def id(self) -> str:
        """Name of its record."""
        return digest_of(self.request)

    @property
    def kind(self) -> str:
        """`utility`, `membership` or `reconstruction`."""
        return self.request["kind"]


@dataclass(frozen=True)
class Job:
    """Cells that are computed together: those of one trained model, or one cell of a shared update.

    Attributes:
        cells: in order.
        suite_digest: of the suite file.
    """

    cells: tuple[Cell, ...]
    suite_digest: str

    @property
    def words(self) -> str:
        """What it is, for progress."""
        first = self.cells[0].request
        what = {"utility": "train", "membership": "train"}.get(first["kind"], "share")
        control = f" ({first['control']} control)" if first["control"] else ""
        noise = f", noise {first['task']['noise']}" if what == "share" else ""
        return f"{what} {first['defense']['name']}{control}{noise}, seed {first['seed']}"


@dataclass(frozen=True)
class _Aimed:
    """An attack of the suite, what it finds out, and why it cannot be run whatever the defense."""

    choice: AttackChoice
    kind: str
    skip: str


@dataclass
class Plan:
    """All jobs of a run.

    Attributes:
        jobs: to be computed.
        skipped: cells that cannot be.
    """

    jobs: list[Job] = field(default_factory=list)
    skipped: list[Cell] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)

    @property
    def cells(self) -> list[Cell]:
        """Every cell, in the order of the suite."""
        return [cell for job in self.jobs for cell in job.cells] + self.skipped

    def add(self, cells: list[Cell], suite_digest: str) -> None:
        """Files cells that are computed together; one that is there already, under other words, is left out."""
        new = [cell for cell in cells if cell.id not in self._ids]
        self._ids |= {cell.id for cell in new}
        self.skipped += [cell for cell in new if cell.skip]
        if wanted := tuple(cell for cell in new if not cell.skip):
            self.jobs.append(Job(wanted, suite_digest))


def digest_of(request: dict[str, Any]) -> str:
    """The id of a request: the same for the same content, whatever its order."""
    canonical = json.dumps(request, sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def seed_of(request: dict[str, Any], purpose: str) -> int:
    """A seed for one random process of a request's training, whatever attack it is part of."""
    training = {k: v for k, v in request.items() if k not in ("attack", "kind")}
    if training.get("control") == "positive":  # a mark on what is trained, which changes nothing about it
        training["control"] = None
    return seed_from(json.dumps(training, sort_keys=True), purpose)


def load_splits(request: dict[str, Any], device: torch.device, *, training: bool = False) -> Splits:
    """The splits that a request is about.

    Args:
        request: of any cell.
        device: where they are wanted.
        training: those of the training that a shared update's noise is calibrated for.
    """
    task = request["training"] if training else request["task"]
    sizes = Sizes(private=task.get("private"), non_member=task.get("non_member"), public=task.get("public"))
    return load_data(task["data"], request["seed"], sizes, device)


def build_model(name: str, settings: dict[str, Any], splits: Splits, seed: int) -> nn.Module:
    """A fresh model for a data set; the same weights for every defense of a seed.

    Layers of torchvision's models that mix examples become GroupNorm, without which no defense could train them.
    """
    model = models.build(
        name,
        input_shape=splits.input_shape,
        classes=splits.classes,
        seed=seed_from("model", name, json.dumps(settings, sort_keys=True), splits.name, seed),
        **settings,
    )
    return group_norm_instead(model) if name.startswith("torchvision:") else model


def plan(suite: Suite, *, secure_noise: bool = False) -> Plan:
    """Resolves a suite into jobs and checks everything that can be checked without computing.

    Args:
        suite: with its overrides and selection.
        secure_noise: whether noise comes from the operating system; a part of the request, so that such results never
            pass for seeded ones.

    Returns:
        The jobs, and the cells that cannot be run with their sentences.

    Raises:
        SuiteError: sizes that the data do not have, or a model that does not fit them.
    """
    here = torch.device("cpu")
    task = suite.task
    sizes = Sizes(private=task.private, non_member=task.non_member, public=task.public)
    try:
        first = load_data(task.data, suite.seeds[0], sizes, here)
    except ValueError as error:
        raise SuiteError(f"{suite.source}: task.data: {error}") from error
    try:
        share_data = None if suite.share is None else load_data(suite.share.data, suite.seeds[0], Sizes(), here)
    except ValueError as error:
        raise SuiteError(f"{suite.source}: share.data: {error}") from error
    check_sizes(suite, len(first.private), n_share=None if share_data is None else len(share_data.private))
    _check_model(f"{suite.source}: task.model", suite.task.model, first)
    if suite.share is not None and share_data is not None:
        _check_model(f"{suite.source}: share.model", suite.share.model, share_data)
    found, attacks = Plan(), [_aim(attack) for attack in suite.attack_grid()]
    for choice, control in _defenses(suite):
        budgets = budgets_of(suite, choice)
        for budget in budgets[:1] if control == "negative" else budgets:
            for seed in suite.seeds:
                tuned, digest = suite.tuned(choice, budget)
                _add(found, suite, tuned, control, budget, seed, attacks, secure_noise, digest)
    return found


def _defenses(suite: Suite) -> list[tuple[DefenseChoice, str | None]]:
    """Every defense, and its part as a control; controls are added when they are asked for and not there."""
    chosen: list[tuple[DefenseChoice, str | None]] = [(choice, None) for choice in suite.defense_grid()]
    if not suite.controls:
        return chosen
    baseline = DefenseChoice(name=BASELINE, settings=catalog.resolve("defenses", BASELINE, {}))
    chosen = [(c, "positive" if c.name == BASELINE else None) for c, _ in chosen]
    if not suite.whole:
        return chosen
    if all(control is None for _, control in chosen):
        chosen.append((baseline, "positive"))
    trained_alike = next(c for c, control in chosen if control == "positive")
    never_saw = [replace(baseline, training=trained_alike.training)]
    # Without noise there is nothing left to score who took no part; with noise the attack's own workings are tested.
    proving = [c for c, _ in chosen if _proves(c.name, json.dumps(c.settings))]
    # One without public data if there is any: the control trains on them, and a method that reads them gets half.
    never_saw += sorted(proving, key=lambda c: reads_public(c.name, c.settings))[:1]
    return [*chosen, *((c, "negative") for c in never_saw)]


@cache
def _proves(name: str, settings: str) -> bool:
    """Whether a defense proves an epsilon once it has noise."""
    defense: Defense = catalog.defense(name, json.loads(settings))
    if defense.noise_multiplier is not None:
        return False
    try:
        claim = predict(defense.with_noise(1.0), sampling=Sampling("poisson", 0.5), steps=4).claim(1e-5)
    except Exception:
        return False  # its cells record how it fails
    return math.isfinite(claim.epsilon)


def budgets_of(suite: Suite, choice: DefenseChoice) -> list[dict[str, float]]:
    """The budgets of a defense; one that adds no noise runs once, whatever the grid."""
    if catalog.defense(choice.name, choice.settings).noise_multiplier is None:
        return suite.budget_grid()
    return [{"delta": suite.budget.delta}]


def _add(
    found: Plan,
    suite: Suite,
    choice: DefenseChoice,
    control: str | None,
    budget: dict[str, float],
    seed: int,
    attacks: list[_Aimed],
    secure_noise: bool,
    tuning_digest: str,
) -> None:
    task = suite.task_for(choice)
    trained: dict[str, Any] = {
        "schema": 1,
        "suite": suite.name,
        "defense": {"name": choice.name, "settings": choice.settings},
        "budget": dict(budget),
        "control": control,
        "seed": seed,
        "task": {
            "data": task.data,
            "model": task.model.name,
            "model_settings": dict(task.model.settings),
            "private": task.private,
            "candidates": task.candidates,
            "batch": task.batch,
            "epochs": task.epochs,
            "lr": task.lr,
            "momentum": task.momentum,
            "optimizer": task.optimizer,
            "schedule": task.schedule,
            "sampling": task.sampling,
        },
    }
    # What is not asked for is no part of the request, so that a new setting moves no cell.
    trained["task"] |= {key: size for key in ("non_member", "public") if (size := getattr(task, key)) is not None}
    sizes = Sizes(private=task.private, non_member=task.non_member, public=task.public)
    trained["task"] |= _own(task.data, task.model.name, sizes, seed)
    if tuning_digest:
        trained["task"]["tuning_digest"] = tuning_digest
    if task.engine != "auto":
        trained["task"]["engine"] = task.engine
    # A part of the request only where noise is drawn, so that what has none is not computed again.
    if secure_noise and ("epsilon" in budget or "noise_multiplier" in budget):
        trained["noise"] = "secure"
    reason = _cannot_run(choice)
    group = [_cell(suite, choice, budget, None, trained | {"kind": "utility", "attack": None}, reason)]
    for aimed in attacks:
        attack, why = aimed.choice, reason or aimed.skip
        request = {"kind": aimed.kind, "attack": {"name": attack.name, "settings": attack.settings}}
        if aimed.kind == "membership":
            cell = _cell(suite, choice, budget, attack, trained | request, why)
            group.append(cell)
            continue
        if control == "negative" and choice.name != BASELINE:
            continue  # images have one negative control, without noise, where they would be found most easily
        kinds = ("none",) if suite.share is None else suite.share.noise
        if "none" in kinds and "epsilon" not in budget and "noise_multiplier" not in budget:
            kinds = ("none",)  # a defense without noise releases the same either way
        for noise in kinds:
            shared = trained | request | {"training": trained["task"], "task": _share(suite, noise, seed)}
            if noise == "none":
                shared.pop("noise", None)
            if suite.share is None:
                why = why or f"{attack.name} needs a shared update, and the suite has no [share] table"
            found.add([_cell(suite, choice, budget, attack, shared, why)], suite.digest)
    found.add(group, suite.digest)


def _own(data: str, model: str, sizes: Sizes, seed: int) -> dict[str, str]:
    """Digests of what is the user's own: a name does not say that what is behind it has changed."""
    found = {}
    if ":" in data:
        found["data_digest"] = load_data(data, seed, sizes, torch.device("cpu")).digest
    path = Path(model.rpartition(":")[0]).expanduser()
    if path.suffix == ".py" and path.is_file():
        found["model_digest"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _cell(
    suite: Suite,
    choice: DefenseChoice,
    budget: dict[str, float],
    attack: AttackChoice | None,
    request: dict[str, Any],
    skip: str,
) -> Cell:
    figures = [] if request["control"] == "negative" else suite.reported_for(choice, budget, attack)
    return Cell(request, skip, tuple((f.metric, f.value, f.source) for f in figures))


def _share(suite: Suite, noise: str, seed: int) -> dict[str, Any]:
    share = suite.share
    if share is None:
        return {"noise": noise}
    return {
        "data": share.data,
        "model": share.model.name,
        "model_settings": dict(share.model.settings),
        "step": share.step,
        "steps": share.steps,
        "batch": share.batch,
        "images": share.images,
        "lr": suite.task.lr if share.lr is None else share.lr,
        "noise": noise,
        **_own(share.data, share.model.name, Sizes(), seed),
    }


def reads_public(name: str, settings: dict[str, Any]) -> bool:
    """Whether a defense reads public data; its plans are tried on a toy."""
    return _reads_public(name, json.dumps(settings))


@cache
def _reads_public(name: str, settings: str) -> bool:
    defense: Defense = catalog.defense(name, json.loads(settings))
    toy = ToyRows(TOY_DIM)
    predict(defense.with_noise(defense.noise_multiplier or 0.0), sampling=Sampling("poisson", 0.5), steps=4, public=toy)
    return toy.used


@cache
def _toy_run(name: str, settings: str) -> str:
    try:
        defense: Defense = catalog.defense(name, json.loads(settings))
        predict(defense.with_noise(defense.noise_multiplier or 0.0), sampling=Sampling("poisson", 0.5), steps=4)
    except catalog.MissingExtra as error:
        return str(error)
    except Exception:
        return ""  # a defense that fails does so in its cells, which record it
    return ""


def _cannot_run(choice: DefenseChoice) -> str:
    """Why a defense cannot run here; its plans are tried on a toy."""
    return _toy_run(choice.name, json.dumps(choice.settings))


def _aim(attack: AttackChoice) -> _Aimed:
    method = catalog.attack(attack.name)
    offered = OFFERED.get((method.kind, method.requires.access))
    if offered is None:
        why = f"{attack.name} needs {method.requires.access.name} access, which no suite offers yet"
    else:
        why = method.check(offered) or ""
    return _Aimed(attack, method.kind, why)


def _check_model(where: str, choice: ModelChoice, splits: Splits) -> None:
    for key, default in models.defaults(choice.name).items():
        value = choice.settings.get(key, default)
        if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
            raise SuiteError(f"{where}.{key}: must be of type {type(default).__name__}, got {value!r}")
    try:
        refuse_batch_norm(build_model(choice.name, choice.settings, splits, 0))
    except (ModuleNotFoundError, TypeError, ValueError, RuntimeError) as error:
        raise SuiteError(f"{where}: {choice.name!r} cannot be built: {' '.join(str(error).split())}") from error


def requires(attack: str) -> dict[str, Any]:
    """An attack's threat model, by names."""
    return catalog.attack(attack).requires.to_dict()


def planned(request: dict[str, Any], examples: int) -> tuple[Sampling, int]:
    """The sampler and the number of steps of a request's training.

    Args:
        request: of a trained cell, or the `training` of a shared one.
        examples: number of examples it trains on.
    """
    task = request.get("training", request["task"])
    rate = 1.0 if task["sampling"] == "full" else task["batch"] / examples
    if request["control"] == "negative":
        rate = min(rate, 1.0)  # the public pool may be smaller than a batch of the members
    sampling = Sampling(task["sampling"], rate)
    return sampling, max(1, round(task["epochs"] * sampling.steps_per_epoch))


def defend(request: dict[str, Any], examples: int) -> tuple[Defense, bool]:
    """The defense of a request at its budget's noise, and whether that noise was matched rather than calibrated.

    A defense that proves nothing at any noise (no bound on an example) gets, for a budget in epsilon, the noise that a
    bounded one would need: its record is flagged, and its epsilon stays infinite.
    """
    name, settings = request["defense"]["name"], request["defense"]["settings"]
    defense: Defense = catalog.defense(name, settings)
    budget = request["budget"]
    if defense.noise_multiplier is not None or ("epsilon" not in budget and "noise_multiplier" not in budget):
        return defense, False
    if "noise_multiplier" in budget:
        return defense.with_noise(float(budget["noise_multiplier"])), False
    sampling, steps = planned(request, examples)
    wanted = {"epsilon": budget["epsilon"], "delta": budget["delta"], "sampling": sampling, "steps": steps}
    if not any(entry.reason for entry in predict(defense.with_noise(1.0), sampling=sampling, steps=steps).entries):
        # What the method releases once, beside its steps, is a part of the budget.
        return calibrate(defense, **wanted), False
    return defense.with_noise(noise_multiplier(**wanted)), True
