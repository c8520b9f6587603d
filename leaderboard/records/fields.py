"""The parts of a record: metrics with intervals, methods with settings, claims, a paper's figures."""

import re
from dataclasses import dataclass, field
from typing import Any

from ..kinds import KINDS
from ..metrics import METRICS, Better
from .validation import RecordError, conform

SLACK = 1e-9
"""By how much rounding may put a value outside of its interval, relatively."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measured number, or the reason why there is none.

    Attributes:
        value: the estimate; None when it was not measured.
        low: lower end of the 95 % interval, or None.
        high: upper end, or None; both or neither.
        n: how many examples, images or pairs of steps the value rests on.
        better: which direction is good for the defender: accuracy "higher", auc "lower", mse "higher".
        reason: why there is no value (then required), or why there is no interval.
        detail: what belongs to the number, as {"fpr": the realised one, "fp": 3, "method": "DeLong"}.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    better: Better
    reason: str | None = None
    detail: dict[str, float | int | str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        conform(self)
        if self.value is None and not self.reason:
            raise RecordError("reason must say why value is null, got nothing")
        if (self.low is None) != (self.high is None):
            raise RecordError(f"low and high must come together, got {self.low} and {self.high}")
        if self.low is not None and self.high is not None:
            if self.value is None:
                raise RecordError(f"low must be null when value is, got {self.low}")
            if self.low > self.high:
                raise RecordError(f"low must be at most high, got {self.low} and {self.high}")
            # Value and ends come from formulas of their own, and rounding may put one past the other by a last digit.
            slack = SLACK * max(1.0, abs(self.value))
            if not self.low - slack <= self.value <= self.high + slack:
                raise RecordError(f"value must lie in its interval [{self.low}, {self.high}], got {self.value}")
        if self.n is not None and self.n < 0:
            raise RecordError(f"n must not be negative, got {self.n}")


@dataclass(frozen=True, kw_only=True)
class MethodUsed:
    """A defense or an attack with its complete settings, as called."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        conform(self)
        if not self.name:
            raise RecordError("name must not be empty, got ''")


@dataclass(frozen=True, kw_only=True)
class RecordedClaim:
    """What the ledger claims for the run.

    Attributes:
        epsilon: the claim, nats; None is infinite.
        epsilon_rdp: the same by Renyi accounting, looser.
        delta: the probability the claim may fail with, in [0, 1).
        relation: neighbouring relation, as "add_remove", "zero_out" or "replace_one".
        unit: what is added or removed: "example" or "client".
        sampling: how batches were drawn, as "poisson".
        sample_rate: expected fraction of the data in a batch, in (0, 1].
        accountant: which one, with version and discretisation.
        as_if_poisson: what the claim would be had the batches been Poisson; None when they were.
        events: the mechanisms executed, in words.
        reason: why epsilon is infinite (then required), or a remark on the accounting.
        assumes: what the guarantee rests on beyond the mathematics, a sentence each.
        unverified: parts of the run that are none of leakbench's, a sentence each; the claim takes their word.
    """

    epsilon: float | None
    epsilon_rdp: float | None = None
    delta: float
    relation: str
    unit: str = "example"
    sampling: str
    sample_rate: float | None = None
    accountant: str
    as_if_poisson: float | None = None
    events: tuple[str, ...] = ()
    reason: str | None = None
    assumes: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        conform(self)
        if self.epsilon is None and not self.reason:
            raise RecordError("reason must say why epsilon is null (infinite), got nothing")
        for name in ("epsilon", "epsilon_rdp", "as_if_poisson"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise RecordError(f"{name} must not be negative, got {value}")
        # 0 is pure differential privacy; with delta = 1 every mechanism would keep the claim.
        if not 0 <= self.delta < 1:
            raise RecordError(f"delta must be in [0, 1), got {self.delta}")
        if self.sample_rate is not None and not 0 < self.sample_rate <= 1:
            raise RecordError(f"sample_rate must be in (0, 1], got {self.sample_rate}")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Which code gave a number: what is compared before a record of a former run is kept.

    Attributes:
        version: of leakbench.
        commit: of its checkout; None where it is installed without one.
        dirty: whether the checkout's code differed from that commit; None without a commit.
        source: SHA-256 over the source files that compute results. Two codes never have the same, whatever the commit.
        versions: of Python and of the packages that compute.
        third_party: "defense NAME" or "attack NAME" -> SHA-256 of the code of a method that is none of leakbench's.
        tuning: SHA-256 of the points tried where settings were chosen on public data; None where none were.
    """

    version: str
    commit: str | None = None
    dirty: bool | None = None
    source: str
    versions: dict[str, str] = field(default_factory=dict)
    third_party: dict[str, str] = field(default_factory=dict)
    tuning: str | None = None

    def __post_init__(self) -> None:
        conform(self)
        if not re.fullmatch(r"[0-9a-f]{64}", self.source):
            raise RecordError(f"source must be a SHA-256 in hexadecimal digits, got {self.source!r}")
        if (self.commit is None) != (self.dirty is None):
            raise RecordError(f"commit and dirty must come together, got {self.commit} and {self.dirty}")

    @property
    def code(self) -> str:
        """The library in words, as "0.1.0, commit 1a2b3c4d5e6f with changes"."""
        if self.commit is None:
            return f"{self.version}, source {self.source[:12]}"
        return f"{self.version}, commit {self.commit[:12]}" + (
            f" with changes {self.source[:12]}" if self.dirty else ""
        )

    def differences(self, now: "Provenance") -> list[str]:
        """What differs from another provenance in a way that may change results, in words; empty for nothing.

        A package that one of the two lacks is no difference: what needs it is skipped without it.

        Args:
            now: what this one, of a former run, is compared with.
        """
        found = []
        if self.source != now.source:
            found.append(f"leakbench was {self.code}, is {now.code}")
        # Where the source differs too, the sentence above has both versions already.
        if self.version != now.version and self.source == now.source:
            found.append(f"leakbench was {self.version}, is {now.version}")
        both = sorted(self.versions.keys() & now.versions.keys())
        found += [
            f"{name} was {self.versions[name]}, is {now.versions[name]}"
            for name in both
            if self.versions[name] != now.versions[name]
        ]
        found += [
            f"the code of {name} has changed"
            # A union, unlike packages: third-party code that is new or gone may have made the number.
            for name in sorted(self.third_party.keys() | now.third_party.keys())
            if self.third_party.get(name) != now.third_party.get(name)
        ]
        return found + (["the points tried for its tuning have changed"] if self.tuning != now.tuning else [])


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A paper's own figure for this cell, and where it stands there."""

    metric: str
    value: float
    source: str

    def __post_init__(self) -> None:
        conform(self)


def check_kind(kind: str) -> None:
    """Refuses a kind of result that is not in `KINDS`."""
    if kind not in KINDS:
        raise RecordError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")


def check_known(name: str, metric: Metric, kind: str) -> None:
    """Refuses a metric of a known name whose direction, range or kind of record is another.

    Args:
        name: the metric's name; unknown ones pass.
        metric: what was recorded under it.
        kind: of the record.

    Raises:
        RecordError: it contradicts `METRICS`.
    """
    known = METRICS.get(name)
    # A third party's metric: the table has nothing to hold it against.
    if known is None:
        return
    place = f"metrics.{name}"
    if known.kind != kind:
        raise RecordError(f"{place} must be in a {known.kind} record, got kind {kind!r}")
    if metric.better != known.better:
        raise RecordError(f"{place}.better must be {known.better!r} (for the defender), got {metric.better!r}")
    if metric.value is not None and not known.least <= metric.value <= known.most:
        raise RecordError(f"{place}.value must be in [{known.least:g}, {known.most:g}], got {metric.value}")
