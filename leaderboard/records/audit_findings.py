"""Findings of a membership audit: verdict, strongest attacks, bound on epsilon, smallest detectable leak.

`audit` computes them; its rules and the pages read them. Standard library only.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..metrics import METRICS
from .validation import ADDED, KEY, CheckedFields, RecordError

SplitKind = Literal["random", "unknown"]
"""The owner's statement on how members were drawn."""


@dataclass(frozen=True, kw_only=True)
class AuditVerdict(CheckedFields):
    """Verdict in a word and a sentence.

    Attributes:
        word: the answer; `within the claim` if attacks find something, but no more than the owner's claim allows.
        sentence: the evidence with its interval; without evidence, the leak that would have shown.
        by: the deciding attack; empty for none.
        how: evidence that decided: averages over all candidates, or the answers of highest confidence to pairs of a
            member and a non-member.
        weak: count of attacks that ran, as "3 of 10 attacks", if no leak was found and none of them had shadow models;
            empty otherwise.
    """

    DERIVED: ClassVar = ("tone", "headline")

    word: Literal["leaks", "within the claim", "no leak found", "cannot be told", "claim refuted"]
    sentence: str
    by: str = field(default="", metadata=ADDED)
    how: Literal["averages", "pairs", ""] = field(default="", metadata=ADDED)
    weak: str = field(default="", metadata=ADDED)

    @property
    def refuted(self) -> bool:
        """True if the claim is refuted, by whatever evidence."""
        return self.word == "claim refuted"

    @property
    def tone(self) -> Literal["bad", "good", "neutral", "warn"]:
        """Tone of the verdict on a page: finding no leak by weak attacks alone is neutral, not good."""
        if self.word in ("leaks", "claim refuted"):
            return "bad"
        if self.word == "cannot be told":
            return "warn"
        return "neutral" if self.weak else "good"

    @property
    def headline(self) -> str:
        """The word, followed by the count of attacks if none had shadow models."""
        return f"{self.word} by {self.weak}" if self.weak else self.word


@dataclass(frozen=True, kw_only=True)
class Strongest(CheckedFields):
    """Strongest attack by a metric: chosen on one half of the candidates, measured on the other.

    Attributes:
        metric: of the comparison.
        attack: its name.
        value: on the half that had no part in the choice.
        low: lower end of its 95 % interval.
        high: upper end.
        n: number of candidates in that half.
        of_all: whether there were too few candidates for halves; the value is then the largest on all candidates, which
            is biased in the attack's favor.
        chance: value of random scores.
        allowed: largest value that the claim allows any test, on average over runs; None without a claim.
    """

    DERIVED: ClassVar = ("found",)

    metric: str
    attack: str
    value: float
    low: float | None
    high: float | None
    n: int
    of_all: bool
    chance: float
    allowed: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric not in METRICS:
            raise RecordError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")

    @property
    def found(self) -> bool:
        """True if its interval lies above chance; each end errs in 2.5 % of audits."""
        return self.low is not None and not self.of_all and self.low > self.chance


@dataclass(frozen=True, kw_only=True)
class EpsilonBound(CheckedFields):
    """Largest lower bound on epsilon of several attacks under replace-one adjacency, with its evidence.

    Attributes:
        value: nats; 0 if nothing is shown.
        ceiling: value if all answers had been right.
        attack: name of the attack whose answers give the bound.
        pairs: number of pairs of a member and a non-member.
        guessed: number of pairs that were answered, fixed before scores were seen.
        correct: number of right answers.
        looks: number of attacks tried; the error probability is divided by it (Bonferroni).
        level: confidence of the largest of their bounds.
        delta: of the bound.
        split: the owner's statement on how members were drawn.
        claimed: epsilon that the claim implies under replace-one adjacency, at `delta`; None without a claim.
        needed: true share of right answers at which the claim would be refuted with a power of 0.8; None without a
            claim, or if no answers could refute it.
    """

    DERIVED: ClassVar = ("relation", "method", "refutes")

    value: float
    ceiling: float
    attack: str
    pairs: int
    guessed: int
    correct: int
    looks: int
    level: float
    delta: float
    split: SplitKind
    claimed: float | None = None
    needed: float | None = None

    relation: ClassVar = "replace_one"
    method: ClassVar = "one_run"

    @property
    def refutes(self) -> bool:
        """True if it refutes the claim, which requires a split stated to be random."""
        return self.split == "random" and self.claimed is not None and self.value > self.claimed

    @property
    def percent(self) -> str:
        """Level in percent, never rounded up: 97.5 is not 98, and 99.99 not 100."""
        return f"{100 * self.level:.10g}%"

    @property
    def share(self) -> float:
        """Share of right answers."""
        return self.correct / max(1, self.guessed)


@dataclass(frozen=True, kw_only=True)
class NoBound(CheckedFields):
    """Reason for the absence of a bound on epsilon."""

    why_not: str


@dataclass(frozen=True, kw_only=True)
class SmallestLeak(CheckedFields):
    """Smallest leak that groups of these sizes detect with a power of 0.8.

    Attributes:
        members: number of examples.
        non_members: number of examples.
        auc: on the half of the candidates that had no part in the choice of the attack.
        tpr_at_1pct_fpr: of all candidates; None with too few of either group.
        tpr_at_01pct_fpr: the same at a false positive rate of 0.1 %.
        pairs: number of pairs of a member and a non-member.
        epsilon_ceiling: largest bound of these pairs by the best of the attacks; None with fewer than 10 pairs.
        attacks: number of attacks whose largest bound is reported.
    """

    members: int
    non_members: int
    auc: float
    tpr_at_1pct_fpr: float | None
    tpr_at_01pct_fpr: float | None = field(metadata={KEY: "tpr_at_0.1pct_fpr"})
    pairs: int
    epsilon_ceiling: float | None
    attacks: int = field(default=1, metadata=ADDED)


@dataclass(frozen=True, kw_only=True)
class ImpliedPrivacy(CheckedFields):
    """Pair (epsilon, delta) that a claim implies under another neighboring relation."""

    epsilon: float
    delta: float
    relation: str


@dataclass(frozen=True, kw_only=True)
class ClaimReport(CheckedFields):
    """Owner's privacy claim.

    Attributes:
        epsilon: nats.
        delta: in (0, 1).
        relation: neighboring relation.
        sampling: of batches; empty if not stated.
        sample_rate: expected fraction of the examples in a batch; None if not stated.
        noise_multiplier: standard deviation of the noise / clip norm; None if not stated.
        steps: number of steps; None if not stated.
        implies: the claim under replace-one adjacency.
        errors: contradictions within the claim, a sentence each.
    """

    epsilon: float
    delta: float
    relation: str
    sampling: str
    sample_rate: float | None
    noise_multiplier: float | None
    steps: int | None
    implies: ImpliedPrivacy
    errors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RuleOutcome(CheckedFields):
    """Rule of `--fail-if`; `broken` says how it is broken, and is None if it is kept."""

    text: str
    broken: str | None
