"""Reports of a model's audit (`audit.json`) and of an audit of scores."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .audit_findings import (
    AuditVerdict,
    ClaimReport,
    EpsilonBound,
    NoBound,
    RuleOutcome,
    SmallestLeak,
    SplitKind,
    Strongest,
)
from .fields import Metric, Provenance
from .report import DataSource, LayerRank, VersionedReport
from .transcript_report import TranscriptReport
from .validation import ADDED, OPTIONAL, CheckedFields, RecordError


@dataclass(frozen=True, kw_only=True)
class AuditedGroups(CheckedFields):
    """Candidates and public examples.

    Attributes:
        members: number of training examples.
        non_members: number of examples outside the training set.
        population: number of public examples.
        input_shape: of an example.
        input_range: least and largest value of candidates' inputs.
        classes: of the model.
        split: the owner's statement on how members were drawn.
    """

    members: int
    non_members: int
    population: int
    input_shape: tuple[int, ...]
    input_range: tuple[float, float]
    classes: int
    split: SplitKind


@dataclass(frozen=True, kw_only=True)
class GroupAccuracy(CheckedFields):
    """Accuracy of the model on both groups of candidates."""

    members: Metric
    non_members: Metric


@dataclass(frozen=True, kw_only=True)
class AttackRequires(CheckedFields):
    """Threat model of an attack.

    Attributes:
        access: to the model.
        knows: side information.
        controls: of the training.
    """

    access: str
    knows: tuple[str, ...]
    controls: tuple[str, ...]

    @property
    def words(self) -> str:
        """Access and side information in words."""
        knows = ", ".join(word.lower() for word in self.knows)
        return self.access.lower().replace("_", " ") + (f", knows {knows}" if knows else "")


@dataclass(frozen=True, kw_only=True)
class MembershipResult(CheckedFields):
    """Result of an attack on membership.

    Attributes:
        name: of the attack.
        settings: all of them.
        requires: its threat model.
        metrics: by name; empty if it did not run.
        why_not: why it did not run, in a sentence; empty if it ran.
        failed: whether it ended with an error, rather than being inapplicable.
        seconds: wall clock.
    """

    name: str
    settings: dict[str, Any]
    requires: AttackRequires
    metrics: dict[str, Metric]
    why_not: str
    failed: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ShiftReport(CheckedFields):
    """Distribution shift between members and non-members, without the model.

    Attributes:
        shift_p_value: under exchangeable groups; None with too few examples, as the next three.
        shift_auc: of a classifier on held-out examples.
        shift_detectable_auc: AUC that would be flagged with a power of 0.8.
        shift_by: the test with the least p-value.
        shift_examples: number of examples tested.
        found: whether the groups differ significantly.
        words: the difference in words; empty if none was found.
    """

    shift_p_value: float | None
    shift_auc: float | None
    shift_detectable_auc: float | None
    shift_by: str | None
    shift_examples: int
    found: bool
    words: str = field(default="", metadata=ADDED)


@dataclass(frozen=True, kw_only=True)
class ExposedExample(CheckedFields):
    """Member among those with the highest scores of an attack.

    Attributes:
        id: of the example.
        name: the owner's id.
        label: its class.
        score: of the attack.
        false_positive_rate: share of non-members with at least this score.
    """

    id: int
    name: str
    label: int
    score: float
    false_positive_rate: float


@dataclass(frozen=True, kw_only=True)
class ExposureReport(CheckedFields):
    """Exposure of single members and classes, by the scores of an attack.

    Attributes:
        attack: its name.
        nobody: why no member is listed; empty if some are.
        examples: the most exposed members first.
        classes: AUC among members and non-members of each class.
    """

    attack: str
    nobody: str = field(default="", metadata=ADDED)
    examples: tuple[ExposedExample, ...]
    classes: dict[str, Metric]

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [name for name in self.classes if not name.isdecimal()]:
            raise RecordError(f"classes must have numbers for keys, got {wrong[0]!r}")


@dataclass(frozen=True, kw_only=True)
class GradientAttackResult(CheckedFields):
    """Result of a reconstruction attack on gradients of single members.

    Attributes:
        name: of the attack.
        settings: all of them.
        psnr: of each image, dB, capped at 120; empty if it did not run.
        why_not: why it did not run, in a sentence; empty if it ran.
        seconds: wall clock.
    """

    name: str
    settings: dict[str, Any]
    psnr: tuple[float, ...]
    why_not: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class GradientsReport(CheckedFields):
    """Leakage of a shared gradient of this architecture.

    Attributes:
        ranks: of the equations, a row per layer; else why they are unknown.
        attacks: on gradients of the same members.
    """

    ranks: str | tuple[LayerRank, ...]
    attacks: tuple[GradientAttackResult, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(counts := {len(attack.psnr) for attack in self.attacks if attack.psnr}) > 1:
            raise RecordError(f"attacks must have a psnr of each of the same images, got {sorted(counts)}")


@dataclass(frozen=True, kw_only=True)
class BoundSettings(CheckedFields):
    """Settings of the bounds: delta in the absence of a claim, confidence, and the audit's seed."""

    delta: float
    level: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class ModelFile(CheckedFields):
    """Audited model.

    Attributes:
        file: its name.
        sha256: of its bytes.
        kind: format of the file.
        architecture: as named by the owner.
        parameters: number of parameters.
        notes: findings of the reading, a sentence each.
    """

    file: str
    sha256: str
    kind: str
    architecture: str
    parameters: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ExamplesSource(DataSource):
    """Source of a group of examples, with the notes of its reading."""

    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Normalization(CheckedFields):
    """Preprocessing of inputs, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ShadowsReport(CheckedFields):
    """Number of shadow models, and their source."""

    models: int
    source: str


@dataclass(frozen=True, kw_only=True)
class AuditedData(CheckedFields):
    """Examples of an audit; there may be no population and no shadow models.

    Attributes:
        name: of the data set.
        members: training examples.
        non_members: examples outside the training set.
        population: public examples.
        preprocess: applied to inputs.
        shadows: shadow models.
    """

    name: str
    members: ExamplesSource
    non_members: ExamplesSource
    population: ExamplesSource | None = field(default=None, metadata=OPTIONAL)
    preprocess: Normalization
    shadows: ShadowsReport | None = field(default=None, metadata=OPTIONAL)

    @property
    def sources(self) -> dict[str, ExamplesSource]:
        """Groups that have examples, by name."""
        groups = {"members": self.members, "non_members": self.non_members}
        return groups if self.population is None else groups | {"population": self.population}


@dataclass(frozen=True, kw_only=True)
class Remark(CheckedFields):
    """Finding of the pre-flight.

    Attributes:
        kind: a word for it, such as "overlap".
        stop: whether it ends the audit.
        sentence: the problem and its remedy.
    """

    kind: str
    stop: bool
    sentence: str


@dataclass(frozen=True, kw_only=True)
class PreflightReport(CheckedFields):
    """Findings of the pre-flight, and the accuracies that it measured."""

    findings: tuple[Remark, ...]
    numbers: dict[str, Metric]


@dataclass(frozen=True, kw_only=True)
class AuditReport(VersionedReport):
    """Report of a model's audit.

    Attributes:
        verdict: of the audit.
        groups: candidates and public examples.
        accuracy: of the model on both groups.
        attacks: all of them; those that did not run hold the reason.
        strongest: the strongest attack by each metric of the verdict.
        epsilon: the lower bound; else why there is none.
        shift: distribution shift between members and non-members.
        exposure: of single members and classes; None if no attack ran.
        gradients: leakage of a shared gradient.
        settings: of the bounds.
        provenance: of the code.
        claim: the owner's; None for none.
        device: of the computation.
        model: the audited file.
        data: sources of examples.
        preflight: checks before any attack.
        smallest_leak: smallest leak that these groups could show.
        transcript: verdict of a transcript of the training; None without one.
        rules: each with its outcome.
        not_tested: a sentence per attack or measurement that was not run.
        command: words of the command line.
        files: digests of the files beside this one; None if no folder was written.
    """

    FILE: ClassVar[str] = "audit.json"
    SCHEMA: ClassVar[str] = "leakbench-audit/1"
    SCORES: ClassVar[str] = "scores.parquet"
    PICTURES: ClassVar[str] = "pictures.parquet"

    schema: str = SCHEMA
    verdict: AuditVerdict
    groups: AuditedGroups
    accuracy: GroupAccuracy
    attacks: tuple[MembershipResult, ...]
    strongest: tuple[Strongest, ...]
    epsilon: EpsilonBound | NoBound
    shift: ShiftReport
    exposure: ExposureReport | None
    gradients: GradientsReport
    settings: BoundSettings
    provenance: Provenance
    claim: ClaimReport | None
    device: str
    model: ModelFile
    data: AuditedData
    preflight: PreflightReport
    smallest_leak: SmallestLeak
    transcript: TranscriptReport | None = field(default=None, metadata=ADDED)
    rules: tuple[RuleOutcome, ...]
    not_tested: tuple[str, ...]
    command: tuple[str, ...]
    files: dict[str, str] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class ScoresFile(CheckedFields):
    """Audited table: its name, digest, members and rows."""

    file: str
    sha256: str
    members: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class ScoreMetric(CheckedFields):
    """Measured number, with the reason why there is none or no interval; see `Metric`."""

    value: float | None
    low: float | None
    high: float | None
    n: int | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class ScoresResult(CheckedFields):
    """Metrics of a column of scores."""

    name: str
    metrics: dict[str, ScoreMetric]


@dataclass(frozen=True, kw_only=True)
class ScoresReport(VersionedReport):
    """Report of an audit of scores, without a model; see `AuditReport`."""

    SCHEMA: ClassVar[str] = "leakbench-scores/1"

    schema: str = SCHEMA
    verdict: AuditVerdict
    scores: ScoresFile
    attacks: tuple[ScoresResult, ...]
    epsilon: EpsilonBound | NoBound
    smallest_leak: SmallestLeak
    claim: ClaimReport | None
    rules: tuple[RuleOutcome, ...]


@dataclass(frozen=True, kw_only=True)
class WatchedTrainingReport(VersionedReport):
    """Report of an audit of a transcript against its claim, without the model; see `AuditReport`."""

    SCHEMA: ClassVar[str] = "leakbench-transcript/1"

    schema: str = SCHEMA
    verdict: TranscriptReport
    claim: ClaimReport
