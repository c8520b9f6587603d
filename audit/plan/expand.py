"""Expansion of a suite into cells: every defense x attack x budget x seed as a resolved request, before any compute.

Cells that attack the same model share a training, and all defenses of a seed start from the same weights. Cells that
cannot run are found here, by declared requirements, dry runs of plans and shapes of data, and carry the reason.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from leakbench.attacks.core import Controls, Knows
from leakbench.benchmarks import models
from leakbench.benchmarks.core import Sizes, Splits
from leakbench.defenses.core import Federated, Sampling, predict, refuse_batch_norm, standardised
from leakbench.leaderboard.kinds import KINDS
from leakbench.leaderboard.metrics import CLAIM, METRICS

from ..catalog import methods as catalog
from ..catalog import plugins
from ..suite.errors import SuiteError
from ..suite.federated import FederatedTable, PublicOnlyTable
from ..suite.fields import ModelChoice
from ..suite.suite import AttackChoice, DefenseChoice, Suite, check_sizes
from ..suite.task import PretrainTable, Training
from ..targets.local_steps import LocalTraining, why_not_summed
from .artifact import Artifact
from .build import initialised, planned, reads_public
from .canaries import why_none
from .cells import Cell, Plan
from .checkpoints import OF_CHECKPOINT, not_offered, with_checkpoint
from .federation import (
    cannot_federate,
    cannot_send,
    check_federation,
    check_message,
    draws_noise,
    hides_messages,
    message_of,
    sends_noise,
)
from .mislabelled_pool import without_mislabelled
from .pretrain import check_pretraining
from .request import Budget, Control, Request, RequestedMethod, TrainingRequest, Update
from .splits_cache import load_data
from .threat_models import OF_CLIENTS, THREAT_MODELS, threat_model

BASELINE = "sgd"
"""The defense that must leak: with controls, its cells are the positive control."""

OF_MODEL, OF_UPDATE = "trained_model", "shared_update"
"""Subjects for cells without an attack, and for attacks that no suite supports; keys of `SUBJECTS`."""


@dataclass(frozen=True)
class _Aimed:
    """An attack of the suite with its kind of result, its subject, and the reason why it can never run."""

    choice: AttackChoice
    kind: str
    subject: str
    skip: str
    needs: Callable[[Request], tuple[Artifact, ...]] | None = None
    canaries: bool = False
    active: bool = False

    @property
    def requested_attack(self) -> RequestedMethod:
        return RequestedMethod(kind="attacks", name=self.choice.name, settings=self.choice.settings)


def plan(suite: Suite, *, secure_noise: bool = False) -> Plan:
    """Resolves a suite into jobs and runs all checks that need no computation.

    Args:
        suite: with its overrides and selection.
        secure_noise: whether noise comes from the operating system; part of the request, so that such results are
            distinct from seeded ones.

    Returns:
        The jobs, and the cells that cannot run with their reasons.

    Raises:
        SuiteError: sizes that the data do not have, or a model that does not fit them.
    """
    _check_fits(suite)
    resolved, attacks = Plan(), [_aim(attack) for attack in suite.attack_grid()]
    for run in _runs(suite, secure_noise):
        _add(resolved, suite, run, attacks)
    if suite.controls and suite.whole and suite.federated is not None:
        for seed in suite.seeds:
            _add_public_only(resolved, suite, seed)
    _refuse_unsuited(suite, resolved)
    return resolved


def trainings(suite: Suite) -> list[TrainingRequest]:
    """Returns the requests of a suite's trainings; with `zoo`, of those that its checkpoints come from."""
    _check_fits(suite)
    return [_training_request(suite, run) for run in _runs(suite, secure_noise=False)]


def _runs(suite: Suite, secure_noise: bool) -> list[_Run]:
    """Returns every defense at every budget and seed."""
    runs = []
    for choice, control in _defenses(suite):
        budgets = budgets_of(suite, choice)
        # A model trained without the members leaks nothing at any budget, so a single budget suffices to test the
        # attack.
        for budget in budgets[:1] if control == "negative" else budgets:
            runs += [_Run(choice, control, budget, seed, secure_noise) for seed in suite.seeds]
    return runs


def _refuse_unsuited(suite: Suite, resolved: Plan) -> None:
    """Refuses an added contestant that no cell of the suite can run."""
    for name in suite.added:
        own = [cell for cell in resolved.cells if name in (_name_of(cell.request.attack), cell.request.defense.name)]
        if own and all(cell.skip for cell in own):
            raise SuiteError(f"{suite.source}: {name} cannot be added: {own[0].skip}")


def _name_of(attack: RequestedMethod | None) -> str:
    return "" if attack is None else attack.name


def _check_fits(suite: Suite) -> None:
    """Refuses sizes that the data do not have, and models that do not fit them."""
    task, share = suite.task, suite.share
    # For the first seed only: a seed decides the members of a pool, not its size.
    first = _first_splits(f"{suite.source}: task.data", task.data, task.sizes, suite.seeds[0])
    shared = (
        None if share is None else _first_splits(f"{suite.source}: share.data", share.data, Sizes(), suite.seeds[0])
    )
    check_sizes(suite, len(first.private), n_share=None if shared is None else len(shared.private))
    if share is not None and shared is not None and any(_picks(attack) for attack in suite.attack_grid()):
        # Examples of earlier steps, and of the negative control, are no candidates: an attacker could rule them out.
        remaining = len(shared.non_member) - share.batch * (share.step + 1)
        if (prior := share.prior or Update.prior) - 1 > remaining:
            raise SuiteError(
                f"{suite.source}: share.prior: must be at most {max(remaining, 0) + 1}, the image and the non-members "
                f"that are in no step, got {prior}"
            )
    _check_model(f"{suite.source}: task.model", task.model, first)
    _check_views(suite, first)
    _check_statistics(suite, first)
    _check_pretraining(suite, first)
    _check_canaries(suite, first)
    check_federation(suite, first)
    check_message(suite)
    if share is not None and shared is not None:
        _check_model(f"{suite.source}: share.model", share.model, shared)


def _picks(attack: AttackChoice) -> bool:
    """True if an attack picks among given candidates."""
    return Knows.PRIOR in catalog.attack(attack.name).requires.knows


def _check_views(suite: Suite, splits: Splits) -> None:
    """Refuses augmentation for inputs that are not images, or too small."""
    for choice in suite.defense_grid():
        views = suite.task_for(choice).recipe.augmentation
        if views is not None:
            words = torch.zeros(1, views.words, dtype=torch.int64)
            try:
                views.apply(torch.zeros(1, *splits.input_shape), views.draw(words))
            except ValueError as error:
                raise SuiteError(f"{suite.source}: views of {choice.name!r}: {error}") from None


def _check_statistics(suite: Suite, splits: Splits) -> None:
    """Refuses statistics of a module that does not compute fixed features from the model's inputs."""
    task = suite.task
    if (statistics := task.recipe.statistics) is not None:
        model = initialised(task.model.name, task.model.settings, splits, 0)
        try:
            standardised(model, statistics, torch.zeros(1, *splits.input_shape))
        except ValueError as error:
            raise SuiteError(f"{suite.source}: task.statistics: {error}") from None


def _check_pretraining(suite: Suite, splits: Splits) -> None:
    """Refuses pretraining without public examples, or with a trainable part that the model lacks."""
    # The task by itself, too, because controls are trained on it.
    tasks = [("task.pretrain", suite.task)]
    tasks += [(f"pretrain of {choice.name!r}", suite.task_for(choice)) for choice in suite.defense_grid()]
    fine = []
    for where, task in tasks:
        if task.pretrain in fine:  # a defense overrides nothing else that is checked
            continue
        try:
            check_pretraining(task, splits)
        except ValueError as error:
            raise SuiteError(f"{suite.source}: {where}: {error}") from None
        fine.append(task.pretrain)


def _check_canaries(suite: Suite, splits: Splits) -> None:
    """Refuses more mislabelled canaries than non-members, and samplers that depend on how many are included."""
    for where, task in [
        ("task", suite.task),
        *((choice.name, suite.task_for(choice)) for choice in suite.defense_grid()),
    ]:
        if task.canaries is None:
            continue
        if task.sampling not in ("poisson", "full"):
            raise SuiteError(
                f"{suite.source}: canaries of {where!r}: must go with poisson or full sampling, got '{task.sampling}'"
            )
        try:
            without_mislabelled(splits, task)
        except ValueError as error:
            raise SuiteError(f"{suite.source}: canaries of {where!r}: {error}") from None


def _first_splits(where: str, data: str, sizes: Sizes, seed: int) -> Splits:
    try:
        return load_data(data, seed, sizes)
    except ValueError as error:
        raise SuiteError(f"{where}: {error}") from error


def _defenses(suite: Suite) -> list[tuple[DefenseChoice, Control | None]]:
    """Returns every defense with its role as a control; requested controls that are not listed are added."""
    chosen: list[tuple[DefenseChoice, Control | None]] = [(choice, None) for choice in suite.defense_grid()]
    judged = any(KINDS[catalog.attack(attack.name).kind].controls for attack in suite.attack_grid())
    if not suite.controls or (suite.federated is not None and not judged):
        return chosen  # without attacks that controls judge, a federated suite has none but `public_only`
    baseline = DefenseChoice(name=BASELINE, settings=catalog.resolve("defenses", BASELINE, {}))
    chosen = [(c, "positive" if c.name == BASELINE else None) for c, _ in chosen]
    if not suite.whole:
        return chosen  # controls judge a suite as a whole
    if all(control is None for _, control in chosen):
        chosen.append((baseline, "positive"))
    # The negative control has the training settings of the positive one, and other training examples.
    trained_alike = next(c for c, control in chosen if control == "positive")
    never_saw = [replace(baseline, training=trained_alike.training)]
    remainders = any(_reads_remainders(attack) for attack in suite.attack_grid())
    if suite.zoo is not None or (suite.federated is not None and not remainders):  # a zoo offers no remainders
        return [*chosen, *((c, "negative") for c in never_saw)]
    # A second negative control has noise: without it, the remainder of a non-participant is 0, which cannot be scored.
    proving = [c for c, _ in chosen if _proves(c.name, json.dumps(c.settings))]
    # Defenses without public data are preferred: a defense that reads some leaves half of the public pool for training.
    never_saw += sorted(proving, key=lambda c: reads_public(requested_defense(c)))[:1]
    return [*chosen, *((c, "negative") for c in never_saw)]


def _reads_remainders(attack: AttackChoice) -> bool:
    """True if an attack knows all contributions but the candidate's."""
    return Knows.OTHERS in catalog.attack(attack.name).requires.knows


@cache
def _proves(name: str, settings: str) -> bool:
    """True if a defense proves an epsilon once it has noise; found by a dry run on a toy."""
    defense = catalog.method(name, json.loads(settings))
    if isinstance(defense, Federated) or defense.noise_multiplier is not None:
        return False  # a multiplier that a defense sets itself is 0: the catalogue refuses any other
    try:
        claim = predict(defense.with_noise(1.0), sampling=Sampling("poisson", 0.5), steps=4).claim(1e-5)
    except (Exception, SystemExit):
        return False  # the failure is recorded in its cells
    return math.isfinite(claim.epsilon)


def budgets_of(suite: Suite, choice: DefenseChoice) -> list[dict[str, float]]:
    """Returns the budgets of a defense; a defense without noise, or with its own, is trained once."""
    method = catalog.method(choice.name, choice.settings)
    if method.noise_multiplier is None and not (isinstance(method, Federated) and method.budgets):
        return suite.budget_grid()
    return [{"delta": suite.budget.delta}]


def requested_defense(choice: DefenseChoice) -> RequestedMethod:
    """Returns a defense of a suite in request form."""
    return RequestedMethod(kind="defenses", name=choice.name, settings=choice.settings)


@dataclass(frozen=True)
class _Run:
    """A defense at one budget and seed."""

    choice: DefenseChoice
    control: Control | None
    budget: dict[str, float]
    seed: int
    secure: bool


def _add(plan: Plan, suite: Suite, run: _Run, attacks: list[_Aimed]) -> None:
    """Adds the cells of a training as a job, and every shared update as a separate job."""
    trained = _training_request(suite, run)
    if suite.zoo is not None:
        trained = with_checkpoint(suite, suite.zoo, trained)
    choice, _ = suite.tuned(run.choice, run.budget)
    reason = _cannot_run(trained.defense) if suite.federated is None else cannot_federate(suite, choice)
    training_fields = vars(trained)  # the training's fields, repeated in the request of every cell

    def cell(request: Request, aimed: _Aimed | None, skip: str) -> Cell:
        attack = None if aimed is None else aimed.choice
        shared = aimed is not None and aimed.subject == OF_UPDATE
        changes = suite.changes_for(run.choice, attack, shared=shared)
        # A paper's figure applies to a model trained on its members, under the unchanged suite file.
        figures = [] if trained.never_saw or changes else suite.reported_for(choice, run.budget, attack)
        reported = tuple((f.metric, f.value, f.source) for f in figures if _of_kind(f.metric, request.kind))
        needs: tuple[Artifact, ...] = ()
        if aimed is not None and aimed.needs is not None and not skip:
            try:
                needs = aimed.needs(request)
            except ValueError as error:
                raise SuiteError(f"{suite.source}: attack: {error}") from None
        subject = OF_MODEL if aimed is None else aimed.subject
        if suite.zoo is not None and subject == OF_MODEL:
            subject, needs = OF_CHECKPOINT, ()
        if suite.federated is not None and subject == OF_MODEL:
            subject = OF_CLIENTS
        return Cell(request, subject, skip, reported, needs, changes)

    # Utility first: the training time is counted in the first cell of a job.
    kinds = ("utility",) if suite.federated is None else ("utility", "federation", "rounds")
    group = [cell(Request(**training_fields, kind=kind), None, reason) for kind in kinds]
    for aimed in attacks:
        request, why = Request(**training_fields, kind=aimed.kind, attack=aimed.requested_attack), reason or aimed.skip
        if aimed.subject != OF_UPDATE:
            if suite.federated is not None:
                why = why or _reads_more(aimed, suite.federated)
            elif suite.zoo is not None:
                why = why or not_offered(request)
            elif aimed.subject == OF_CLIENTS:
                why = why or f"{aimed.choice.name} needs messages of clients, and the suite has no [federated] table"
            elif aimed.canaries:
                why = why or _no_canaries(trained, aimed.choice.name)
            group.append(cell(request, aimed, why))
            continue
        if trained.never_saw and choice.name != BASELINE:
            continue  # images have a single negative control, without noise, which would show an unsound attack best
        if suite.federated is None and aimed.active:
            why = (
                why or f"{aimed.choice.name} needs a client that trains from a server's model; add a [federated] table"
            )
        if suite.share is None:
            why = why or f"{aimed.choice.name} needs a shared update, and the suite has no [share] table"
        why = why or (_cannot_share(trained.defense, suite) if suite.federated is None else cannot_send(suite, choice))
        for noise in _release_noises(suite, choice, trained.budget):
            plan.add([cell(_of_update(suite, request, noise, aimed.choice, choice), aimed, why)], suite.digest)
    plan.add(group, suite.digest)


def _of_kind(metric: str, kind: str) -> bool:
    """True if a paper's figure belongs into records of a kind, instead of another kind of the same training."""
    return metric not in METRICS or METRICS[metric].kind in (kind, CLAIM)


def _reads_more(aimed: _Aimed, table: FederatedTable) -> str:
    """Returns the reason why an attack cannot run on clients, if it reads what federated runs do not offer."""
    method = catalog.attack(aimed.choice.name)
    row = threat_model(method.kind, method.requires.access)
    if row is None or row.of_clients == "nothing":
        access = method.requires.access.name
        return f"{aimed.choice.name} needs {access} access to a training, which federated runs do not offer"
    if row.needs is not None and Knows.SHADOWS in method.requires.knows:
        return f"{aimed.choice.name} needs shadow models, and none are trained by clients"
    if row.of_clients in ("messages", "last message", "chosen models") and (
        hidden := hides_messages(table, aimed.choice.name)
    ):
        return hidden
    if row.of_clients == "last message" and table.local_steps != 1:
        return (
            f"{aimed.choice.name} needs the release of a single step, and a message is the sum of several; set "
            "local_steps = 1"
        )
    return ""


def _add_public_only(plan: Plan, suite: Suite, seed: int) -> None:
    """Adds the control that trains the network on the public examples alone, and takes no private step."""
    settings = suite.public_only or PublicOnlyTable()
    pretrain = PretrainTable(train="all", **settings.model_dump())
    task = suite.task.model_copy(update={"pretrain": pretrain})
    public = load_data(task.data, seed, task.sizes).public
    skip = ""
    if settings.batch > len(public):
        skip = (
            f"public_only needs at least {settings.batch} public examples, a batch, got {len(public)}; set task.public"
        )
    request = Request(
        suite=suite.name,
        defense=RequestedMethod(kind="defenses", name=BASELINE, settings=catalog.resolve("defenses", BASELINE, {})),
        budget=Budget(delta=suite.budget.delta),
        control="public_only",
        seed=seed,
        training=Training.of(task, federated=suite.federated, **_own(task.data, task.model.name, task.sizes, seed)),
        kind="utility",
    )
    changes = suite.changes_for(DefenseChoice(name="public_only"), shared=False)
    plan.add([Cell(request, OF_CLIENTS, skip, changes=changes)], suite.digest)


def _no_canaries(request: TrainingRequest, attack: str) -> str:
    """Returns the reason why a training has no canaries for an attack on them; empty if it has."""
    training = request.training
    if training.canaries is None:
        return f"{attack} needs canaries in the training; set task.canaries"
    splits = load_data(training.data, request.seed, training.sizes)
    model = initialised(training.model.name, training.model.settings, splits, 0)
    why = why_none(request, model, splits, planned(request, len(splits.private)))
    return f"{attack} needs canaries in the training: {why}" if why else ""


def _training_request(suite: Suite, run: _Run) -> TrainingRequest:
    choice, tuning_digest = suite.tuned(run.choice, run.budget)
    task, budget = suite.task_for(choice), Budget(**run.budget)
    return TrainingRequest(
        suite=suite.name,
        defense=requested_defense(choice),
        budget=budget,
        control=run.control,
        seed=run.seed,
        training=Training.of(
            task,
            tuning_digest=tuning_digest,
            federated=suite.federated,
            **_own(task.data, task.model.name, task.sizes, run.seed),
        ),
        # False without noise, so that such a cell has one id, and is not recomputed for --secure-noise.
        secure=run.secure and (budget.draws_noise or draws_noise(requested_defense(choice))),
    )


def _release_noises(suite: Suite, choice: DefenseChoice, budget: Budget) -> tuple[Literal["none", "calibrated"], ...]:
    """Returns the noise variants of shared updates; a defense without noise would release the same in both."""
    kinds: tuple[Literal["none", "calibrated"], ...] = ("none",) if suite.share is None else suite.share.noise
    alone = choice.training.get("release_noise")
    if alone is not None:
        if suite.share is None or alone not in kinds:
            raise SuiteError(
                f"{suite.source}: defense {choice.name}: release_noise must be one of share.noise, got {alone!r}"
            )
        kinds = ("none",) if alone == "none" else ("calibrated",)
    return ("none",) if "none" in kinds and not sends_noise(suite, choice, budget) else kinds


def _of_update(
    suite: Suite,
    request: Request,
    noise: Literal["none", "calibrated"],
    attack: AttackChoice,
    choice: DefenseChoice,
) -> Request:
    """Returns the request of an attack on a shared update, derived from the request of the training."""
    secure, share, clients = request.secure and noise != "none", suite.share, suite.federated
    if share is None:
        return replace(request, secure=secure, no_update=noise)
    local, message = None if share.local is None else share.local.model_dump(exclude_none=True), None
    if clients is not None:
        # Local steps are those of the clients' rounds; of the table only the batch and the limit are left.
        local = None if local is None else {key: value for key, value in local.items() if key != "epochs"}
        message = message_of(suite)
    rate = suite.task.lr if clients is None else suite.task_for(choice).lr
    update = Update(
        data=share.data,
        model=share.model.name,
        model_settings=dict(share.model.settings),
        step=share.step,
        steps=share.steps,
        batch=share.batch,
        images=share.images,
        lr=rate if share.lr is None else share.lr,
        release_noise=noise,
        local=local,
        # The default for attacks without candidates, whose cell does not depend on their number.
        prior=(share.prior or Update.prior) if _picks(attack) else Update.prior,
        message=message,
        **_own(share.data, share.model.name, Sizes(), request.seed),
    )
    return replace(request, secure=secure, update=update)


def _own(data: str, model: str, sizes: Sizes, seed: int) -> dict[str, str]:
    """Returns digests of the user's own data and model, because the content of a path may change."""
    digests = {}
    # The user's own data are named as `folder:PATH`, a model as `FILE.py:FUNCTION`.
    if ":" in data:
        digests["data_digest"] = load_data(data, seed, sizes).digest
    path = Path(model.rpartition(":")[0]).expanduser()
    if path.suffix == ".py" and path.is_file():
        content = [file.read_bytes() for file in plugins.source_files(str(path.resolve()) + ":f")]
        # A single file has its own digest; with local imports, all files are hashed.
        parts = content if len(content) == 1 else [hashlib.sha256(source).digest() for source in content]
        digests["model_digest"] = hashlib.sha256(b"".join(parts)).hexdigest()
    return digests


def _cannot_run(defense: RequestedMethod) -> str:
    """Returns the reason why a defense cannot run: a missing dependency, or clients; empty if it can."""
    return _toy_run(defense.name, json.dumps(defense.settings))


@cache
def _toy_run(name: str, settings: str) -> str:
    try:
        defense = catalog.defense(name, json.loads(settings))
        predict(defense.with_noise(defense.noise_multiplier or 0.0), sampling=Sampling("poisson", 0.5), steps=4)
    except (catalog.MissingExtra, catalog.FederatedMethod) as error:
        return str(error)
    except (Exception, SystemExit):
        return ""  # the failure is recorded in its cells
    return ""


def _cannot_share(defense: RequestedMethod, suite: Suite) -> str:
    """Returns the reason why a defense's local steps cannot be shared as a sum, found by planning on a toy."""
    share = suite.share
    if share is None or share.local is None:
        return ""
    local = json.dumps(share.local.model_dump(exclude_none=True))
    return _toy_share(defense.name, json.dumps(defense.settings), local, share.batch, share.step)


@cache
def _toy_share(name: str, settings: str, local: str, examples: int, step: int) -> str:
    try:
        defense = catalog.defense(name, json.loads(settings))
        return why_not_summed(defense, LocalTraining(**json.loads(local)), examples, step=step)
    except (Exception, SystemExit):
        return ""  # the failure is recorded in its cells


def _aim(attack: AttackChoice) -> _Aimed:
    """Checks an attack's requirements against the threat models of suites."""
    method = catalog.attack(attack.name)
    row = threat_model(method.kind, method.requires.access)
    if row is None:
        why = f"{attack.name} needs {method.requires.access.name} access, which no suite offers yet"
        if kinds := [kind for kind, access in THREAT_MODELS if access == method.requires.access]:
            why += f" for {method.kind}, but for {' and '.join(kinds)}: is what it returns annotated right?"
        return _Aimed(attack, method.kind, OF_UPDATE if method.kind == "reconstruction" else OF_MODEL, why)
    skip, controls = method.check(row.offered) or "", method.requires.controls
    canaries, active = Controls.CANARIES in controls, Controls.MODEL in controls
    return _Aimed(attack, method.kind, row.subject, skip, row.needs, canaries, active)


def _check_model(where: str, choice: ModelChoice, splits: Splits) -> None:
    for key, default in models.defaults(choice.name).items():
        value = choice.settings.get(key, default)
        # Not isinstance, which accepts true for 1.
        if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
            raise SuiteError(f"{where}.{key}: must be of type {type(default).__name__}, got {value!r}")
    # torch raises RuntimeError for mismatched sizes.
    try:
        refuse_batch_norm(initialised(choice.name, choice.settings, splits, 0))
    except (ModuleNotFoundError, TypeError, ValueError, RuntimeError) as error:
        raise SuiteError(f"{where}: {choice.name!r} cannot be built: {' '.join(str(error).split())}") from error
