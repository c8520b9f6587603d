"""Schema of a suite file: its tables as pydantic models, and validation errors as sentences.

Nothing is coerced: a number in quotes is not a number, an unknown key is an error. A single value in place of a grid is
a grid of size 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from ..catalog.messages import near_miss, way_out

SamplingName = Literal[
    "poisson", "truncated_poisson", "random_allocation", "cyclic", "shuffle", "partition", "fixed", "full"
]
SamplingAlone = Literal["poisson", "random_allocation", "shuffle", "partition", "fixed", "full"]
"""Samplers without further keys, so that a defense may override the task's."""
BUDGETS = ("epsilon", "advantage", "tpr", "noise_multiplier")
"""Units of a budget, of which exactly one is given."""


def _several(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,)


T = TypeVar("T")


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    # A repeated value requests the same cells twice: a mistake.
    if any(value in values[:place] for place, value in enumerate(values)):  # no set: a table cannot be hashed
        raise ValueError(f"must be distinct, got {list(values)}")
    return values


Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Padding = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), AfterValidator(_distinct)]
Grid = Annotated[tuple[T, ...], BeforeValidator(_several), Field(min_length=1), AfterValidator(_distinct)]


class StrictTable(BaseModel):
    """A table that refuses unknown keys and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelChoice(StrictTable):
    """A model by name, or as a table whose other keys are its settings."""

    name: Text
    settings: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        return _rest(value, "settings", ("name",)) if isinstance(value, dict) else {"name": value}


class StatisticsTable(StrictTable):
    """Private statistics that standardise fixed features before the first step, at a privacy cost of their own."""

    of: Text = "0"
    """Name of the submodule that computes the features from the model's inputs."""
    mean_norm: Rate
    """Largest norm of an example's channel means, L2, in feature units: a public constant."""
    square_norm: Rate
    """Largest norm of its mean squares, L2, in squared feature units."""
    noise_multiplier: Rate = 8.0
    """Noise standard deviation / norm, of either release."""


class PretrainTable(StrictTable):
    """Pretraining on the task's public examples before the defense's first step, without privacy for these examples.

    It reads the same examples and labels as methods with public data; those methods keep all of them.
    """

    epochs: Count
    """Passes over the public examples, each in a new order."""
    lr: Rate
    """Learning rate, of the mean loss of a batch."""
    batch: Count
    """Public examples per step."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    train: Literal["all", "last", "lora"]
    """Parameters that the defense then trains: `all` (fine-tuning), the `last` linear layer, behind fixed features
    (linear probing), or that layer and a low-rank product added to each other weight (`lora`)."""
    rank: Count | None = None
    """Rank of the products of `lora`."""
    alpha: Rate | None = None
    """Scale of `lora`: products are multiplied by alpha / rank; by 1 if absent."""

    @model_validator(mode="after")
    def _of_low_rank(self) -> PretrainTable:
        if (self.rank is not None) != (self.train == "lora"):
            got = "none" if self.rank is None else self.rank
            raise ValueError(f"rank must be given for train = 'lora', and for no other, got {got} for '{self.train}'")
        if self.alpha is not None and self.rank is None:
            raise ValueError(f"alpha must go with train = 'lora', got {self.alpha:g} for '{self.train}'")
        return self


CanaryName = Literal["dirac", "random", "orthonormal", "mislabelled", "blank", "crafted"]


class CanaryTable(StrictTable):
    """Records inserted into the training, each by an independent fair coin, for attacks that detect them."""

    kind: CanaryName
    """In gradient space: a coordinate each, a random direction, a vector of an orthonormal set. In input space: a
    mislabelled example, a blank with one pixel lit, a pattern of the two ends of the range with a random label."""
    number: Annotated[int, Field(ge=20)]
    """Number of all canaries, included or not."""
    norm: Rate | None = None
    """Norm of the gradient of a canary in gradient space before the bound, L2; 10 if absent."""


class TaskTable(StrictTable):
    """Data, model and settings of a training."""

    data: Text
    model: ModelChoice
    private: Count | None = None
    """Private examples to train on; the data set's own number if absent, as for the next two."""
    non_member: Annotated[int, Field(ge=0)] | None = None
    """Examples that are never trained on."""
    public: Annotated[int, Field(ge=0)] | None = None
    """Public examples."""
    candidates: Count | None = None
    """Number of members, and of non-members, in membership tests; all if absent."""
    batch: Count
    """Expected examples per step."""
    epochs: Count
    lr: Rate
    momentum: Momentum = 0.0
    optimizer: Literal["sgd", "adam"] = "sgd"
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    sampling: SamplingName = "poisson"
    groups: Annotated[int, Field(ge=2)] | None = None
    """For `cyclic` sampling: number of parts of the examples that take turns."""
    largest_batch: Count | None = None
    """For `truncated_poisson` sampling: examples drawn beyond it are dropped at random."""
    nominal_size: Count | None = None
    """A public number that replaces the number of private examples in the choice of sample rate, divisor and steps; if
    absent, that number itself, which claims then treat as public."""
    # None for absent, even with a default: fields added to a task later must change no digest of a suite.
    average: Decay | None = None
    """Decay of a moving average of the parameters, which is evaluated and attacked; no average if absent."""
    views: Count | None = None
    """Random crops of each image whose gradients are averaged and bounded once; the image itself if absent."""
    crop_padding: Padding | None = None
    """Pixels added on each side before a view is cropped; 4 if absent. Ignored without views."""
    horizontal_flip: bool | None = None
    """True to flip half of the views left to right, the default; ignored without views."""
    statistics: StatisticsTable | None = None
    """Statistics that standardise fixed features; features of the model itself if absent."""
    pretrain: PretrainTable | None = None
    """Pretraining on public examples before the private training, which starts from random weights if absent."""
    canaries: CanaryTable | None = None
    """Canaries inserted into the training in addition to the private examples; none if absent."""
    engine: Literal["auto", "layerwise", "torch.func", "opacus", "backpack"] = "auto"
    """Method that computes clipped sums; all give the same up to rounding."""
    unchecked: Literal[True] | None = None
    """True trains a model that could not be checked on synthetic examples; its claims are marked as unverified."""

    @model_validator(mode="after")
    def _sampled_as_it_says(self) -> TaskTable:
        for key, kind in (("groups", "cyclic"), ("largest_batch", "truncated_poisson")):
            value = getattr(self, key)
            if (self.sampling == kind) != (value is not None):
                got = "none" if value is None else value
                raise ValueError(
                    f"{key} must be given for {kind} sampling, and for no other, got {got} for '{self.sampling}'"
                )
        if self.nominal_size is not None and self.sampling not in ("poisson", "full"):
            raise ValueError(f"nominal_size must go with poisson or full sampling, got '{self.sampling}'")
        # The number of included canaries is a sum of secret bits, on which other samplers' batches depend.
        if self.canaries is not None and self.sampling not in ("poisson", "full"):
            raise ValueError(f"canaries must go with poisson or full sampling, got '{self.sampling}'")
        return self


TRAINING: Mapping[str, Any] = {
    "sampling": SamplingAlone,
    "lr": Rate,
    "batch": Count,
    "epochs": Count,
    "momentum": Momentum,
    "average": Decay,
    "views": Count,
    "crop_padding": Padding,
    "horizontal_flip": bool,
    "pretrain": PretrainTable,
    "canaries": CanaryTable,
    "release_noise": Literal["none", "calibrated"],
}
"""Values that a defense may override -> their types: the task's, and the [share] noise variant of its updates."""


class BudgetTable(StrictTable):
    """Target of noise calibration, or the noise multiplier (std / sensitivity): exactly one; a list is a grid."""

    epsilon: Grid[Rate] | None = None
    """Nats, at `delta`."""
    advantage: Grid[Share] | None = None
    """Largest TPR - FPR of a membership test on a single record."""
    tpr: Grid[Share] | None = None
    """Largest true positive rate of such a test at `fpr`."""
    fpr: Share | None = None
    """False positive rate of `tpr`."""
    noise_multiplier: Grid[Annotated[float, Field(ge=0)]] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)]


class LocalTable(StrictTable):
    """Several steps of a client, in the order of its examples, of which it shares only the sum."""

    epochs: Count = 1
    """Passes over the client's examples."""
    batch: Count
    """Examples per local step; must divide those of the client."""
    max_unroll: Count | None = None
    """Largest number of local steps that an attack may differentiate through; memory grows with it; 64 if absent."""


class ShareTable(StrictTable):
    """The shared update attacked by reconstruction: of a fresh model, after `step` steps."""

    data: Text
    model: ModelChoice
    step: Annotated[int, Field(ge=0)] = 0
    """Steps before the shared step, so that methods with memory have some."""
    steps: Count | None = None
    """Planned length, used by schedules; ends at the shared step if absent."""
    batch: Count = 1
    """Examples of the client: those of the shared step, or of all its local steps."""
    local: LocalTable | None = None
    """Several local steps, whose sum is shared; a single step on the whole batch if absent."""
    images: Count = 1
    """Separate targets of a cell, each with its own batch."""
    lr: Rate | None = None
    """Learning rate of the earlier steps, and of local steps; the task's if absent."""
    noise: Grid[Literal["none", "calibrated"]] = ("none", "calibrated")
    """`none`: to measure the protection by the release alone; `calibrated`: with the noise of the budget."""
    prior: Annotated[int, Field(ge=2)] | None = None
    """Candidates that an attack with a prior picks from, including the image; 10 if absent."""

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
    """Public examples for validation accuracy; others, as many as private examples, are trained on."""
    epsilon: Rate | None = None
    """Budget at which settings are chosen for all budgets; if this and the next are absent, they are chosen at each
    budget separately."""
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    """The same, for budgets that are noise multipliers."""
    epochs: Count | None = None
    """Epochs of each trial; the task's if absent."""
    seed: Annotated[int, Field(ge=0)] = 0
    grid: dict[str, Grid[Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        return (
            _rest(value, "grid", [key for key in cls.model_fields if key != "grid"])
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
    selectors: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        named = ("defense", "metric", "value", "source", "attack")
        return _rest(value, "selectors", named) if isinstance(value, dict) else value


class Document(StrictTable):
    """A suite file. Entries of `defense` and `attack` are unchecked here: `validate` checks them by their methods."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    about: str = ""
    seeds: Seeds
    task: TaskTable
    budget: BudgetTable
    defense: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    attack: tuple[dict[str, Any], ...] = ()
    share: ShareTable | None = None
    tune: TuneTable | None = None
    controls: bool = True
    """True to run a positive and a negative control with the cells."""
    reported: tuple[ReportedRow, ...] = ()


# Excluded: models, methods and reported figures, whose further keys are settings and selectors.
_TABLES: dict[tuple[str, ...], type[StrictTable]] = {
    (): Document,
    ("task",): TaskTable,
    ("task", "statistics"): StatisticsTable,
    ("task", "pretrain"): PretrainTable,
    ("task", "canaries"): CanaryTable,
    ("budget",): BudgetTable,
    ("share",): ShareTable,
    ("share", "local"): LocalTable,
    ("tune",): TuneTable,
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
    """Returns a defense's override of a task setting, in the form of `TaskTable`; a table as plain content.

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
    """Returns values that a defense overrides, in the form of `TaskTable`: tables instead of plain content."""
    return {
        key: TRAINING[key].model_validate(value) if isinstance(value, dict) else value
        for key, value in overrides.items()
        if key in TaskTable.model_fields
    }


def sentences(error: ValidationError, raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the errors of a document as pairs (key.path, problem).

    Args:
        error: raised by its validation.
        raw: the document, for paths as in the file and for near-misses.
    """
    found = []
    for details in error.errors():
        above = details["loc"][:-1]  # empty if the document as a whole is wrong
        table = _TABLES.get(tuple(str(part) for part in above))
        found.append((path_in(raw, details["loc"]), _problem_in(table, details)))
    # A table at the top has no path of its own.
    return [(path or "top level", problem) for path, problem in found]


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
    kind, got, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, got {got!r}"
    if kind == "literal_error":
        # pydantic writes the choices as "'a', 'b' or 'c'".
        near = near_miss(str(got), str(context["expected"]).split("'")[1::2])
        return f"must be {context['expected']}, got {got!r}" + (f"; did you mean {near!r}?" if near else "")
    if kind == "value_error":
        return str(context["error"])
    if kind == "too_short":
        return "must have at least one entry, got none"
    if kind == "string_too_short":
        return "must not be empty, got ''"
    if kind == "string_pattern_mismatch":
        return f"must be letters, digits, '_', '-' and '.', got {got!r}"
    bounds = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
    keys = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    if kind in bounds:
        return f"must be {bounds[kind]} {context[keys[kind]]:g}, got {got!r}"
    # Other errors: pydantic's sentence, as a clause.
    return f"{details['msg'][0].lower()}{details['msg'][1:]}, got {got!r}"


def _rest(table: dict[str, Any], into: str, named: Sequence[str]) -> dict[str, Any]:
    """Moves all keys but the named ones into a nested table."""
    kept = {key: value for key, value in table.items() if key in named}
    return kept | {into: {key: value for key, value in table.items() if key not in named}}
