"""Parts of a record: metrics with intervals, methods with settings, claims, a paper's figures."""

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..kinds import KINDS
from ..metrics import METRICS, Better
from .details import Detail
from .validation import OpenFields, RecordError, conform

# Plain mappings are accepted too: `conform` gives them their type.
if TYPE_CHECKING:
    AnyDetail = Detail
else:
    AnyDetail = Detail | Mapping[str, Any]

SLACK = 1e-9
"""Relative numerical slack by which a value may lie outside of its interval."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Measured number, or the reason why there is none.

    Attributes:
        value: the estimate; None when it was not measured.
        low: lower end of the 95 % interval, or None.
        high: upper end, or None; both or neither.
        n: number of examples, images or pairs of steps behind the value.
        better: direction that is good for the defender: accuracy "higher", auc "lower", mse "higher".
        reason: why there is no value (then required) or no interval.
        detail: further facts about the number, such as {"fpr": 0.009, "fp": 3, "method": "DeLong"}; in a record it has
            the type that `METRICS` names.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    better: Better
    reason: str | None = None
    detail: AnyDetail = field(default_factory=lambda: Detail({}))

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
            # Value and ends come from separate formulas, and rounding may move them past each other by a last digit.
            slack = SLACK * max(1.0, abs(self.value))
            if not self.low - slack <= self.value <= self.high + slack:
                raise RecordError(f"value must lie in its interval [{self.low}, {self.high}], got {self.value}")
        if self.n is not None and self.n < 0:
            raise RecordError(f"n must not be negative, got {self.n}")


@dataclass(frozen=True, kw_only=True)
class MethodUsed:
    """Defense or attack with its complete settings, as called."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        conform(self)
        if not self.name:
            raise RecordError("name must not be empty, got ''")


class RequestedBudget(OpenFields):
    """Privacy budget of a training, as requested.

    Attributes:
        epsilon: nats, to which noise was calibrated; None for another target, as the next two.
        advantage: largest TPR - FPR of a membership test.
        tpr: largest true positive rate of such a test at `fpr`.
        fpr: false positive rate of `tpr`.
        noise_multiplier: None if it was calibrated.
        delta: of the claim; None for an external model.
    """

    epsilon: float | None = None
    advantage: float | None = None
    tpr: float | None = None
    fpr: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None


class RecordedRequirements(OpenFields):
    """Threat model of an attack, by the names of its flags.

    Attributes:
        access: to the model or the training.
        knows: side information.
        controls: of the training.
    """

    access: str = ""
    knows: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedClaim:
    """Privacy guarantee that the ledger claims for the run.

    Attributes:
        epsilon: in nats; None is infinite.
        epsilon_rdp: epsilon by Renyi accounting, which is looser.
        delta: of (epsilon, delta)-differential privacy, in [0, 1).
        relation: neighbouring relation, as "add_remove", "zero_out" or "replace_one".
        unit: privacy unit: "example" or "client".
        sampling: of the batches, as "poisson".
        sample_rate: expected fraction of the data in a batch, in (0, 1].
        accountant: its name, with version and discretisation.
        as_if_poisson: epsilon under the assumption of Poisson sampling; None if sampling was Poisson.
        events: mechanisms executed, in words.
        reason: why epsilon is infinite (then required), or a remark on the accounting.
        assumes: assumptions of the guarantee beyond the mathematics, a sentence each.
        unverified: third-party components of the run, which the claim trusts without a check; a sentence each.
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
        # delta = 0 is pure differential privacy; with delta = 1 every mechanism would satisfy the claim.
        if not 0 <= self.delta < 1:
            raise RecordError(f"delta must be in [0, 1), got {self.delta}")
        if self.sample_rate is not None and not 0 < self.sample_rate <= 1:
            raise RecordError(f"sample_rate must be in (0, 1], got {self.sample_rate}")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Code that computed a number, compared before a record of a former run is kept.

    Attributes:
        version: of leakbench.
        commit: of its checkout; None if it is installed without a checkout.
        dirty: whether the checkout's code differed from that commit; None without a commit.
        source: SHA-256 over the source files that compute results; it differs between any two versions of the code.
        versions: of Python and of the packages that compute.
        third_party: "defense NAME" or "attack NAME" -> SHA-256 of the code of a third-party method.
        tuning: SHA-256 of the points tried, if settings were chosen on public data; None otherwise.
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
        """Version of the library in words, as "0.1.0, commit 1a2b3c4d5e6f with changes"."""
        if self.commit is None:
            return f"{self.version}, source {self.source[:12]}"
        return f"{self.version}, commit {self.commit[:12]}" + (
            f" with changes {self.source[:12]}" if self.dirty else ""
        )

    def differences(self, now: "Provenance") -> list[str]:
        """Lists the differences from another provenance that may change results, in words.

        A package that only one provenance has is no difference: methods that need it are skipped without it.

        Args:
            now: present provenance; this one is of a former run.
        """
        changes = []
        if self.source != now.source:
            changes.append(f"leakbench was {self.code}, is {now.code}")
        # If the source differs too, the sentence above states both versions already.
        if self.version != now.version and self.source == now.source:
            changes.append(f"leakbench was {self.version}, is {now.version}")
        both = sorted(self.versions.keys() & now.versions.keys())
        changes += [
            f"{name} was {self.versions[name]}, is {now.versions[name]}"
            for name in both
            if self.versions[name] != now.versions[name]
        ]
        changes += [
            f"the code of {name} has changed"
            # A union, unlike for packages: third-party code that is new or gone may have computed the number.
            for name in sorted(self.third_party.keys() | now.third_party.keys())
            if self.third_party.get(name) != now.third_party.get(name)
        ]
        return changes + (["the points tried for its tuning have changed"] if self.tuning != now.tuning else [])


@dataclass(frozen=True, kw_only=True)
class Reported:
    """Figure that a paper reports for this cell, and its place in the paper."""

    metric: str
    value: float
    source: str

    def __post_init__(self) -> None:
        conform(self)


def check_kind(kind: str) -> None:
    """Raises RecordError for a kind of result that is not in `KINDS`."""
    if kind not in KINDS:
        raise RecordError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")


def known_metric(name: str, metric: Metric, kind: str) -> Metric:
    """Returns the metric with the type of detail that it has in `METRICS`.

    Args:
        name: of the metric; unknown names pass.
        metric: recorded under that name.
        kind: of the record.

    Raises:
        RecordError: its kind of record, direction, range or detail contradicts `METRICS`.
    """
    known = METRICS.get(name)
    # Third parties' metrics are not in the table, so nothing can be checked.
    if known is None:
        return metric
    place = f"metrics.{name}"
    if known.kind != kind:
        raise RecordError(f"{place} must be in a {known.kind} record, got kind {kind!r}")
    if metric.better != known.better:
        raise RecordError(f"{place}.better must be {known.better!r} (for the defender), got {metric.better!r}")
    if metric.value is not None and not known.least <= metric.value <= known.most:
        raise RecordError(f"{place}.value must be in [{known.least:g}, {known.most:g}], got {metric.value}")
    if isinstance(metric.detail, known.detail):
        return metric
    typed = copy(metric)
    # Not `replace`, which would check every field again: a board has a hundred thousand metrics.
    object.__setattr__(typed, "detail", known.detail(metric.detail, f"{place}.detail"))
    return typed
