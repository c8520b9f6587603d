"""Rehearsal of methods that a command adds to a suite, on tiny tasks, before anything of the run is computed.

An error in a stranger's file would otherwise be shown by its first cell, after the cells before it. A defense plans
its first steps and its last one, on synthetic gradients with the shapes of the suite's model, and its codecs and bounds
release synthetic rows. An attack runs once on a tiny target of its access: a shared update, a stored checkpoint, or a
model trained for an epoch without noise. It runs in the same process of its own as in the run, for a limited time.

Caveat: a rehearsal that passes shows no more than that the code ran. Attacks on shadow models and on clients are not
rehearsed, because their targets take trainings of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from leakbench.attacks.core import InconsistentObservation, NotApplicable
from leakbench.defenses.core import (
    Account,
    Defense,
    Federated,
    Layout,
    Ledger,
    PrivateAverage,
    rehearsed,
    seeded,
    unverified,
)
from leakbench.defenses.core.gradients.executor import release_rows
from leakbench.defenses.core.training.calibration import TOY_LAYOUT

from ..catalog import methods as catalog
from ..catalog.messages import in_one_line
from ..isolation.worker import AttackTimeoutError, limited
from ..plan.build import build_model, load_splits, planned
from ..plan.cells import Cell, Plan
from ..plan.checkpoints import OF_CHECKPOINT
from ..plan.expand import OF_MODEL, OF_UPDATE
from ..plan.request import Request
from ..subjects.table import SUBJECTS
from ..suite.suite import ChoiceError, Suite
from .job import sentence

ROWS = 4
"""Synthetic gradients of a rehearsed step."""

LARGEST = 200_000
"""Parameters of a suite's model whose layout is rehearsed; a larger one is replaced by that of the dry runs."""

SECONDS = 20.0
"""Time that an attack may compute in its rehearsal; a slower one counts as rehearsed."""

RAN = "ran on a tiny task"
"""Outcome of a rehearsal that shows no error."""

_CPU = torch.device("cpu")


def rehearse(suite: Suite, plan: Plan) -> dict[str, str]:
    """Runs third parties' methods that were added to a suite on tiny tasks.

    Args:
        suite: with the added methods.
        plan: its cells, of which only those that will be computed matter.

    Returns:
        Kind and name of each of these methods -> `RAN`, or why its rehearsal shows less, in words.

    Raises:
        ChoiceError: a method failed; the sentence names its file and line.
    """
    outcomes = {}
    for kind, name in dict.fromkeys(suite.added_methods):
        if not catalog.foreign(kind, name):
            continue
        method = f"{catalog.KINDS[kind]} {name}"
        cell = (_defense_cell if kind == "defenses" else _attack_cell)(plan, name)
        if cell is None:
            outcomes[method] = "was not rehearsed: none of its cells to compute has a tiny form"
            continue
        try:
            outcomes[method] = _rehearse_defense(cell) if kind == "defenses" else _rehearse_attack(cell)
        except (NotApplicable, InconsistentObservation) as error:
            outcomes[method] = f"does not apply to a tiny task: {' '.join(str(error).split())}"
        except AttackTimeoutError:
            outcomes[method] = f"did not end on a tiny task within {SECONDS:g} s"
        # A method may raise any exception, and may end the process.
        except (Exception, SystemExit) as error:
            raise ChoiceError(
                f"{method} must run on a tiny task before the suite is computed, and raised "
                f"{sentence(error, cell.request)}; correct its file and run the command again"
            ) from error
    return outcomes


def _defense_cell(plan: Plan, name: str) -> Cell | None:
    return next((cell for cell in _runnable(plan) if cell.request.defense.name == name), None)


def _attack_cell(plan: Plan, name: str) -> Cell | None:
    """Returns the cheapest cell of an attack that has a tiny form; None without."""
    cells = [
        cell
        for cell in _runnable(plan)
        if cell.request.attack is not None
        and cell.request.attack.name == name
        and (
            cell.subject == OF_CHECKPOINT
            or (cell.subject == OF_UPDATE and cell.request.requested_update.message is None)
            or (cell.subject == OF_MODEL and not cell.needs)
        )
    ]
    # Noise has to be calibrated, which takes seconds; `min` keeps the first of equals.
    return min(cells, key=lambda cell: cell.request.budget.draws_noise, default=None)


def _runnable(plan: Plan) -> list[Cell]:
    return [cell for job in plan.jobs for cell in job.cells]


def _rehearse_defense(cell: Cell) -> str:
    """Plans the first two steps and the last one of a run, releases synthetic rows by these plans, returns `RAN`."""
    request = cell.request
    splits = load_splits(request, _CPU)
    model = build_model(request, splits)
    layout = Layout.of(model)
    layout = layout if layout.dim <= LARGEST else TOY_LAYOUT
    sampling, steps = planned(request, len(splits.private))
    method = catalog.method(request.defense.name, request.defense.settings)
    for defense in _parts(method):
        noisy = defense.with_noise(1.0) if defense.noise_multiplier is None else defense
        account, noise = Account(Ledger(sampling), remarks=unverified(defense=noisy)), seeded(0)
        rows = torch.randn(ROWS, layout.dim, generator=torch.Generator().manual_seed(0))
        whole = layout is not TOY_LAYOUT
        for step in rehearsed(
            noisy,
            account,
            steps=steps,
            only={0, min(1, steps - 1), steps - 1},
            layout=layout,
            architecture=partial(build_model, request, splits) if whole else None,
            input_shape=splits.input_shape if whole else (),
        ):
            if step.plan is not None:
                release_rows(step.plan, lambda _point, rows=rows: rows, rows, noise)
    return RAN


def _parts(method: Defense | Federated) -> list[Defense]:
    """Returns the central defenses of a method: the clients', and the server's if it adds noise."""
    if isinstance(method, Defense):
        return [method]
    return [method.client, *([method.server.defense] if isinstance(method.server, PrivateAverage) else [])]


def _rehearse_attack(cell: Cell) -> str:
    """Attacks a tiny form of a cell's target; returns `RAN`, or why there was nothing to attack."""
    request = replace(cell.request, secure=False)
    if cell.subject == OF_UPDATE:
        request = replace(request, update=replace(request.requested_update, images=1))
    if cell.subject != OF_MODEL:
        subject = SUBJECTS[cell.subject]((replace(cell, request=request),), _CPU, {})
    else:
        request = replace(request, training=request.training.model_copy(update={"epochs": 1}))
        tiny = replace(cell, request=request)
        subject = SUBJECTS[cell.subject]((tiny,), _CPU, {})
        try:
            utility = Request(**vars(request.of_training()), kind="utility")
            subject.outcome(Cell(utility, OF_MODEL))
        # A training that cannot be shortened says nothing about the attack.
        except Exception as error:
            return f"was not rehearsed: its target, trained for one epoch, raised {in_one_line(error)}"
    with limited(SECONDS):
        subject.outcome(replace(cell, request=request))
    return RAN
