"""Report of the audit of a shared update (`update.json`)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .fields import Provenance
from .report import DataSource, LayerRank, VersionedReport
from .validation import ADDED, CheckedFields, RecordError


@dataclass(frozen=True, kw_only=True)
class UpdateVerdict(CheckedFields):
    """Verdict in a word and a sentence; `audit.external.update.verdict` explains the words."""

    DERIVED: ClassVar = ("tone",)

    word: Literal["leaks", "something recovered", "no leak shown", "cannot be told"]
    sentence: str

    @property
    def tone(self) -> Literal["bad", "warn", "good"]:
        """Tone of the word on a page."""
        return "bad" if self.word == "leaks" else "good" if self.word == "no leak shown" else "warn"


@dataclass(frozen=True, kw_only=True)
class ModelBeforeStep(CheckedFields):
    """Checkpoint before the step: name and digest of its file, and its architecture."""

    file: str
    sha256: str
    architecture: str


@dataclass(frozen=True, kw_only=True)
class ConventionReport(CheckedFields):
    """Convention under which the update is read as a gradient: sign, scale, weight decay.

    Attributes:
        words: the convention, in words.
        factor: ratio of the update to the mean gradient.
        weight_decay: coefficient that was removed.
        ambiguous: why no result can be trusted; empty if the convention is known.
        unreadable: why no gradient can be read; empty if it can be.
    """

    words: str
    factor: float
    weight_decay: float
    ambiguous: str
    unreadable: str


@dataclass(frozen=True, kw_only=True)
class UpdateFile(CheckedFields):
    """Shared update.

    Attributes:
        file: its name.
        sha256: of its bytes.
        batch_size: examples in the batch.
        lr: learning rate of the step; None if not given.
        convention: under which it is read.
        lacking: names of the model's tensors that it lacks.
        training_mode: whether batch norms used the batch's statistics.
        clip_norm: bound on each example's gradient; None without clipping.
        noise_multiplier: noise standard deviation / clip norm.
    """

    file: str
    sha256: str
    batch_size: int
    lr: float | None
    convention: ConventionReport
    lacking: tuple[str, ...] = field(default=(), metadata=ADDED)
    training_mode: bool = field(default=False, metadata=ADDED)
    clip_norm: float | None
    noise_multiplier: float


@dataclass(frozen=True, kw_only=True)
class GuessComparison(CheckedFields):
    """Comparison of a reconstruction with guesses made without the update, by how much of the update each explains.

    Attributes:
        unexplained: squared whitened distance from the reconstruction's update to the shared update, over that from an
            update of zeros.
        guessed: the same for the best guess.
        guesses: number of guesses.
        public: whether guesses are public examples; otherwise they are uniform in the range of inputs.
        better: whether the reconstruction is nearer than every guess, by more than a fit of the noise explains.
    """

    unexplained: float
    guessed: float
    guesses: int
    public: bool
    better: bool


@dataclass(frozen=True, kw_only=True)
class UpdateAttack(CheckedFields):
    """Attack on an update. An instance of this class itself did not run; subclasses have the results.

    Attributes:
        name: of the attack.
        settings: all of them.
        kind: of its result.
        why_not: why it did not run, in a sentence; empty if it ran.
    """

    name: str
    settings: dict[str, Any]
    kind: str
    why_not: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if (type(self) is UpdateAttack) != bool(self.why_not):
            raise RecordError("why_not must be given where there is no result, and nowhere else")


@dataclass(frozen=True, kw_only=True)
class ReconstructedInputs(UpdateAttack):
    """Inputs that an attack returned; their values lie in the arrays beside the report.

    Attributes:
        images: number of inputs.
        labels: of the inputs.
        status: of the attack.
        certified: number of inputs proved to be in the batch; None if the attack proves nothing.
        proved: whether each input is; None if the attack proves nothing.
        objective: final mismatch; None if not finite.
        residual_ratio: unexplained distance over the distance expected of the noise; None if unknown.
        expected_error: largest root mean square error of the inputs under the noise; None if unknown.
        beside_guesses: comparison with guesses; None if there is none.
    """

    kind: Literal["reconstruction"]
    images: int
    labels: tuple[int, ...]
    status: str
    certified: int | None
    proved: tuple[bool, ...] | None
    objective: float | None
    residual_ratio: float | None
    expected_error: float | None = field(default=None, metadata=ADDED)
    beside_guesses: GuessComparison | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if {len(self.labels), len(self.proved or self.labels)} != {self.images}:
            raise RecordError(f"labels and proved must have an entry for each of {self.images} images")


@dataclass(frozen=True, kw_only=True)
class RecoveredLabels(UpdateAttack):
    """Counts of labels in the batch, by label, and the status of the attack."""

    kind: Literal["labels"]
    labels: dict[str, int]
    status: str


@dataclass(frozen=True, kw_only=True)
class CandidateResult(CheckedFields):
    """Candidate for membership in the batch.

    Attributes:
        name: the owner's id.
        p_value: its rank among public examples outside the batch.
        q_value: the p-value corrected for the number of candidates.
        shown: whether it is shown to have been in the batch.
    """

    name: str
    p_value: float
    q_value: float
    shown: bool


@dataclass(frozen=True, kw_only=True)
class JudgedCandidates(UpdateAttack):
    """Candidates for membership in the batch, judged at the attack's share of the false discovery rate."""

    kind: Literal["membership"]
    false_discovery_rate: float
    candidates: tuple[CandidateResult, ...]

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of candidates shown to have been in the batch."""
        return tuple(candidate.name for candidate in self.candidates if candidate.shown)


@dataclass(frozen=True, kw_only=True)
class UpdateReport(VersionedReport):
    """Report of the audit of a shared update.

    Attributes:
        verdict: of the audit.
        model: before the step.
        update: the shared file and its reading.
        data: sources of examples, by group.
        input_shape: of an example.
        input_range: least and largest value of public inputs.
        classes: of the model.
        parameters: number of the model's parameters.
        seed: of the generators.
        attacks: all of them; those that did not run hold the reason.
        notes: findings of the reading, a sentence each.
        ranks: of the equations, a row per layer; else why they are unknown.
        not_tested: a sentence per test that was not run.
        command: words of the command line.
        device: of the computation.
        provenance: of the code.
        files: digests of the files beside this one; empty if no folder was written.
    """

    FILE: ClassVar[str] = "update.json"
    SCHEMA: ClassVar[str] = "leakbench-update/4"
    ARRAYS: ClassVar[str] = "reconstructions.npz"
    CANDIDATES: ClassVar[str] = "candidates.parquet"

    schema: str = SCHEMA
    verdict: UpdateVerdict
    model: ModelBeforeStep
    update: UpdateFile
    data: dict[str, DataSource]
    input_shape: tuple[int, ...]
    input_range: tuple[float, float]
    classes: int
    parameters: int
    seed: int
    attacks: tuple[UpdateAttack | ReconstructedInputs | RecoveredLabels | JudgedCandidates, ...]
    notes: tuple[str, ...]
    ranks: str | tuple[LayerRank, ...]
    not_tested: tuple[str, ...]
    command: tuple[str, ...]
    device: str
    provenance: Provenance
    files: dict[str, str]
