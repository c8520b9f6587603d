"""The parts of a record: metrics with intervals, methods with settings, claims, a paper's figures."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from .strict import RecordError, conform

Better = Literal["higher", "lower"]

# Name -> (better for the defender, least value, largest value). Other names are allowed, unchecked.
KNOWN: dict[str, tuple[Better, float, float]] = {
    "accuracy": ("higher", 0.0, 1.0),
    "loss": ("lower", -math.inf, math.inf),
    "auc": ("lower", 0.0, 1.0),
    "tpr_at_1pct_fpr": ("lower", 0.0, 1.0),
    "tpr_at_0.1pct_fpr": ("lower", 0.0, 1.0),
    "advantage": ("lower", -1.0, 1.0),
    "balanced_accuracy": ("lower", 0.0, 1.0),
    "implied_epsilon": ("lower", 0.0, math.inf),
    "psnr": ("lower", 0.0, math.inf),
    "mse": ("higher", 0.0, math.inf),
    "ssim": ("lower", -1.0, 1.0),
    "lpips": ("higher", 0.0, math.inf),
    "label_accuracy": ("lower", 0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measured number, or the reason why there is none.

    Attributes:
        value: the estimate; None when it was not measured.
        low: lower end of the 95 % interval, or None.
        high: upper end, or None; both or neither.
        n: how many examples or images the value rests on.
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
class Claim:
    """What the ledger claims for the run.

    Attributes:
        epsilon: the claim, nats; None is infinite.
        epsilon_rdp: the same by Renyi accounting, looser.
        delta: the probability the claim may fail with, in [0, 1).
        relation: neighbouring relation, as "add_remove" or "zero_out".
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
        if not 0 <= self.delta < 1:
            raise RecordError(f"delta must be in [0, 1), got {self.delta}")
        if self.sample_rate is not None and not 0 < self.sample_rate <= 1:
            raise RecordError(f"sample_rate must be in (0, 1], got {self.sample_rate}")


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A paper's own figure for this cell, and where it stands there."""

    metric: str
    value: float
    source: str

    def __post_init__(self) -> None:
        conform(self)


def check_known(name: str, metric: Metric) -> None:
    """Refuses a metric of a known name whose direction or range is another.

    Args:
        name: the metric's name; unknown ones pass.
        metric: what was recorded under it.

    Raises:
        RecordError: it contradicts `KNOWN`.
    """
    if name not in KNOWN:
        return
    better, least, largest = KNOWN[name]
    place = f"metrics.{name}"
    if metric.better != better:
        raise RecordError(f"{place}.better must be {better!r} (for the defender), got {metric.better!r}")
    if metric.value is not None and not least <= metric.value <= largest:
        raise RecordError(f"{place}.value must be in [{least:g}, {largest:g}], got {metric.value}")
