"""Schema of a suite file: its tables as pydantic models, and validation errors as sentences.

Nothing is coerced: a number in quotes is not a number, an unknown key is an error. A single value in place of a grid is
a grid of size 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ..catalog.messages import near_miss, way_out
from .federated import FederatedTable, PublicOnlyTable
from .fields import Count, Grid, ModelChoice, Rate, Seeds, Share, StrictTable, Text, rest_in
from .task import TRAINING, CanaryTable, PretrainTable, StatisticsTable, Task

BUDGETS = ("epsilon", "advantage", "tpr", "noise_multiplier")
"""Kinds of budget, of which a suite gives exactly one."""


class BudgetTable(StrictTable):
    """Target of noise calibration, or a noise multiplier (std / sensitivity): a single kind; a list is a grid."""

    epsilon: Grid[Rate] | None = None
    """In nats, at `delta`."""
    advantage: Grid[Share] | None = None
    """Largest TPR - FPR of a membership test on a single record."""
    tpr: Grid[Share] | None = None
    """Largest true positive rate of such a test at `fpr`."""
    fpr: Share | None = None
    """False positive rate of `tpr`."""
    noise_multiplier: Grid[Annotated[float, Field(ge=0)]] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)]


class LocalTable(StrictTable):
    """Several steps of a client, over its examples in their order, whose sum alone is shared."""

    epochs: Count = 1
    """Passes over the client's examples."""
    batch: Count
    """Examples per local step; must divide the number of the client's examples."""
    max_unroll: Count | None = None
    """Largest number of local steps that an attack may differentiate through; memory grows with it; 64 if absent."""


class ShareTable(StrictTable):
    """The shared update from which inputs or labels are reconstructed: of a fresh model, after `step` steps.

    With `[federated]`, it is a client's first message.
    """

    data: Text
    model: ModelChoice
    step: Annotated[int, Field(ge=0)] = 0
    """Number of the shared step, counted from 0; earlier steps fill the memory of methods."""
    steps: Count | None = None
    """Planned number of steps, used by schedules; the run ends at the shared step if absent."""
    batch: Count = 1
    """Examples of the client: those of the shared step, or of all its local steps."""
    local: LocalTable | None = None
    """Several local steps, whose sum is shared; a single step on the whole batch if absent."""
    images: Count = 1
    """Number of targets of a cell, each with its own batch and update."""
    lr: Rate | None = None
    """Learning rate of the earlier steps, and of local steps; the task's if absent. With `[federated]`, the defense's
    own if absent."""
    noise: Grid[Literal["none", "calibrated"]] = ("none", "calibrated")
    """`calibrated` is the noise of the budget; `none` shows the protection by clipping and compression alone."""
    prior: Annotated[int, Field(ge=2)] | None = None
    """Number of candidates that an attack with a prior picks from, including the target image; 10 if absent."""

    @model_validator(mode="after")
    def _whole_epochs(self) -> ShareTable:
        if self.local is None:
            return self
        if self.batch % self.local.batch:
            raise ValueError(f"local.batch must divide batch, {self.batch}, got {self.local.batch}")
        if self.step % (each := self.batch // self.local.batch):
            raise ValueError(f"step must begin an epoch, a multiple of its {each} local steps, got {self.step}")
        return self


class TuneTable(StrictTable):
    """Hyperparameter search on public data, for every defense; other keys are the grid."""

    validation: Count
    """Number of public examples for validation; others, as many as there are private examples, are trained on."""
    trial_examples: Count | None = None
    """With clients: public examples that are trained on, divided as the private ones are, at the batch and the noise
    per step of the private run; as many as private ones if absent."""
    trial_rounds: Count | None = None
    """With clients: rounds of each trial; those of the private run if absent."""
    epsilon: Rate | None = None
    """Budget at which settings are chosen for all budgets; if this and `noise_multiplier` are absent, they are
    chosen at each budget separately."""
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    """The same, for budgets that are noise multipliers."""
    epochs: Count | None = None
    """Epochs of each trial; the task's if absent."""
    seed: Annotated[int, Field(ge=0)] = 0
    grid: dict[str, Grid[Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        return (
            rest_in(value, "grid", [key for key in cls.model_fields if key != "grid"])
            if isinstance(value, dict)
            else value
        )


class ReportedRow(StrictTable):
    """A paper's figure for some cells; other keys select them by settings, budget or training."""

    defense: Text
    metric: Text
    value: float
    source: Text
    attack: Text | None = None
    selectors: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        named = ("defense", "metric", "value", "source", "attack")
        return rest_in(value, "selectors", named) if isinstance(value, dict) else value


class Document(StrictTable):
    """A suite file. Entries of `defense` and `attack` are unchecked here: `validate` checks them by their methods."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    about: str = ""
    seeds: Seeds
    task: Task
    budget: BudgetTable
    defense: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    attack: tuple[dict[str, Any], ...] = ()
    share: ShareTable | None = None
    federated: FederatedTable | None = None
    public_only: PublicOnlyTable | None = None
    """The control that every federated suite has; with the settings of the table's defaults if absent."""
    tune: TuneTable | None = None
    zoo: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.+-]*$")] | None = None
    """First part of the names of trained checkpoints, which are attacked as they are: the run trains nothing."""
    controls: bool = True
    """True to run a positive and a negative control with the cells."""
    reported: tuple[ReportedRow, ...] = ()

    @model_validator(mode="after")
    def _final_models_alone(self) -> Document:
        if self.zoo is None:
            return self
        task = self.task
        tables = {
            "share": self.share,
            "federated": self.federated,
            "tune": self.tune,
            "task.canaries": task.canaries,
            "task.pretrain": task.pretrain,
            "task.statistics": task.statistics,
        }
        if trained := [name for name, table in tables.items() if table is not None]:
            raise ValueError(
                f"a suite with zoo must have no {trained[0]}: its checkpoints are final models of trainings"
            )
        return self


# Without models, methods and reported figures, whose further keys are settings and selectors.
_TABLES: dict[tuple[str, ...], type[StrictTable]] = {
    (): Document,
    ("task",): Task,
    ("task", "statistics"): StatisticsTable,
    ("task", "pretrain"): PretrainTable,
    ("task", "canaries"): CanaryTable,
    ("budget",): BudgetTable,
    ("share",): ShareTable,
    ("share", "local"): LocalTable,
    ("tune",): TuneTable,
    ("federated",): FederatedTable,
    ("public_only",): PublicOnlyTable,
}

_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
}


def training_value(key: str, value: Any) -> Any:
    """Returns a defense's override of a task setting, in the form of `Task`; a table as plain content.

    Raises:
        ValueError: the value is invalid.
    """
    kind = TRAINING[key]
    # A table has its own configuration, and pydantic accepts no second one.
    adapter = TypeAdapter(kind, config=None if _is_table(kind) else ConfigDict(allow_inf_nan=False))
    try:
        # Through JSON like whole suites, so that a value is accepted here if and only if the task would accept it.
        valid = adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        details = error.errors()[0]
        where = "".join(f"{part}: " for part in details["loc"])
        raise ValueError(where + _problem_in(kind, details)) from None
    return valid.model_dump(exclude_none=True) if isinstance(valid, StrictTable) else valid


def task_values(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values that a defense overrides, in the form of `Task`: tables instead of plain content."""
    return {
        key: TRAINING[key].model_validate(value) if isinstance(value, dict) else value
        for key, value in overrides.items()
        if key in Task.model_fields
    }


def sentences(error: ValidationError, raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the errors of a document as pairs (key.path, problem).

    Args:
        error: raised by its validation.
        raw: the document, for paths as in the file and for near-misses.
    """
    problems = []
    for details in error.errors():
        above = details["loc"][:-1]  # empty if the document as a whole is wrong
        table = _TABLES.get(tuple(str(part) for part in above))
        problems.append((path_in(raw, details["loc"]), _problem_in(table, details)))
    # A table at the top has no path of its own.
    return [(path or "top level", problem) for path, problem in problems]


def path_in(raw: Any, location: Sequence[str | int]) -> str:
    """Returns a location as `defense[1].clip_norm`, without parts that the file lacks, such as the 0 of a scalar grid.

    Args:
        raw: the document.
        location: keys and positions, outermost first.
    """
    path, node = "", raw
    for part in location:
        if isinstance(part, int):
            if not isinstance(node, list):
                continue  # the file has a single value, which `_several` turned into a grid
            path, node = f"{path}[{part}]", node[part] if part < len(node) else None
        elif isinstance(node, Mapping):
            path, node = (f"{path}.{part}" if path else part), node.get(part)
    return path


def _is_table(kind: Any) -> TypeGuard[type[StrictTable]]:
    return isinstance(kind, type) and issubclass(kind, StrictTable)


def _problem_in(table: Any, details: ErrorDetails) -> str:
    """Returns the error of a value, or of its key, with the table's own keys as suggestions."""
    if details["type"] == "extra_forbidden" and _is_table(table):
        return f"unknown key; {way_out(str(details['loc'][-1]), table.model_fields)}"
    return _problem(details)


def _problem(details: ErrorDetails) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, got {value!r}"
    if kind == "literal_error":
        # pydantic writes the choices as "'a', 'b' or 'c'".
        near = near_miss(str(value), str(context["expected"]).split("'")[1::2])
        return f"must be {context['expected']}, got {value!r}" + (f"; did you mean {near!r}?" if near else "")
    if kind == "value_error":
        return str(context["error"])
    if kind == "too_short":
        return "must have at least one entry, got none"
    if kind == "string_too_short":
        return "must not be empty, got ''"
    if kind == "string_pattern_mismatch":
        return f"must be letters, digits, '_', '-' and '.', got {value!r}"
    bounds = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
    keys = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    if kind in bounds:
        return f"must be {bounds[kind]} {context[keys[kind]]:g}, got {value!r}"
    # Other errors: pydantic's sentence, as a clause.
    return f"{details['msg'][0].lower()}{details['msg'][1:]}, got {value!r}"
