"""Tasks of records: the settings and sizes of a training, or of a shared update. Standard library only.

Attributes are the values that boards, pages and checks read; a task has all further settings of its suite.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from ..kinds import KINDS
from .validation import OpenFields, convert


class RecordedTask(OpenFields):
    """Resolved task of a record.

    Attributes:
        data: name of the data set; empty if the cell failed before its task was resolved.
        model: name of the architecture; empty in the same case.
        digest: of the splits.
        noise: variant of the release; None for a training.
        tuning_digest: digest of the search on public data by which settings were chosen; None without a search.
        input_shape: of an example, channels first.
        input_range: least and largest value of inputs.
    """

    FIXED: ClassVar[tuple[str, ...]] = ()
    """Settings that a suite fixes for all of its defenses; defenses may override the rest."""

    data: str = ""
    model: str = ""
    digest: str | None = None
    noise: str | None = None
    tuning_digest: str | None = None
    input_shape: tuple[int, ...] | None = None
    input_range: tuple[float, ...] | None = None

    @property
    def fixed(self) -> dict[str, Any]:
        """Values of the settings that a suite fixes."""
        return {key: self.get(key) for key in self.FIXED}


class CanarySettings(OpenFields):
    """Canaries inserted into a training.

    Attributes:
        kind: as in a suite file.
    """

    kind: str = ""


class RecordedCheckpoint(OpenFields):
    """Trained checkpoint of a zoo that a record is of.

    Attributes:
        name: in the zoo, as `digits_mlp/dp_sgd/eps3/seed0`.
        sha256: of the file of its weights.
    """

    name: str = ""
    sha256: str = ""


class TrainingTask(RecordedTask):
    """Task of a trained model.

    Attributes:
        trained_on: number of examples, without canaries.
        steps: number of steps.
        sampling: name of the sampler.
        sample_rate: expected batch / number of examples.
        groups: number of parts of the examples that take turns in `cyclic` sampling.
        largest_batch: limit of `truncated_poisson` sampling; None for other samplers.
        federated: clients and rounds; None for central training.
        client_sizes: number of every client's examples; empty for central training.
        schedule_of: seed of the participants of the rounds; None for central training.
        statistics: settings of the released feature statistics; None without them.
        canaries: None without canaries.
        checkpoint_digest: SHA-256 of the attacked checkpoint's manifest; empty for a training of the run's own.
        checkpoint: the attacked checkpoint; None for a training of the run's own, and in older records.
    """

    FIXED = (
        *("model_settings", "model_digest", "private", "candidates", "non_member", "public"),
        *("optimizer", "schedule", "sampling", "statistics", "federated"),
    )

    trained_on: int
    steps: int
    sampling: str
    sample_rate: float
    groups: int = 1
    largest_batch: int | None = None
    federated: dict[str, Any] | None = None
    client_sizes: tuple[int, ...] = ()
    schedule_of: dict[str, Any] | None = None
    statistics: dict[str, Any] | None = None
    canaries: CanarySettings | None = None
    checkpoint_digest: str = ""
    checkpoint: RecordedCheckpoint | None = None


class UpdateTask(RecordedTask):
    """Task of a shared update.

    Attributes:
        step: number of the shared step.
        steps: planned number of steps; None for a run that ends at the shared step.
        batch: number of examples behind the update.
        local: settings of the client's local steps; None for a single step.
        message: clients, rounds, local steps and unit of a federated run, of which this is a client's first message;
            None for an update of central training.
    """

    FIXED = ("data", "model", "model_settings", "model_digest", "step", "steps", "batch", "images")

    step: int
    steps: int | None
    batch: int
    local: dict[str, int] | None = None
    message: dict[str, Any] | None = None

    @property
    def words(self) -> str:
        """The update, as "photos, convnet, batch 1, step 2", or with "first message, local steps 1" at the end."""
        prefixes = {"data": "", "model": "", "batch": "batch "} | ({"step": "step "} if self.message is None else {})
        words = [f"{prefix}{self[key]}" for key, prefix in prefixes.items() if key in self]
        if self.message is not None:
            words.append(f"first message, local steps {self.message.get('local_steps')}")
        return ", ".join(words)


def task_of(kind: str, content: Mapping[str, Any]) -> TrainingTask | UpdateTask:
    """Returns the task of a record, typed by its kind.

    Args:
        kind: of the record; an unknown kind is taken for one of a trained model.
        content: the task as plain JSON values.

    Raises:
        RecordError: a value is refused.
    """
    known = KINDS.get(kind) if isinstance(kind, str) else None
    cls = UpdateTask if known is not None and known.own_task else TrainingTask
    return convert(cls, content, "task")
