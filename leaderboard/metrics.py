"""The one table of metrics: what each number is called, its kind, unit and range, and which direction is good.

Scorers, records, boards, pages and suite files read it; a metric of another name is allowed in a record, unchecked, and
can be no paper's figure. Standard library only.
"""

import math
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]
"""Which direction is good for the defender."""

Kind = Literal["utility", "membership", "reconstruction", "claim"]
"""The records that have it; `claim` is the ledger's figure, which stands in the claim of every record of a training."""


@dataclass(frozen=True, kw_only=True)
class KnownMetric:
    """What is known of a metric.

    Attributes:
        name: in records, suite files and CSV.
        kind: of the records that have it.
        label: for a reader.
        unit: of its values; empty for fractions and counts.
        better: direction that is good for the defender.
        least: end of the range of its values.
        most: other end.
        digits: behind the point, where a reader sees it.
        reported: whether papers report it, so that a figure of theirs can stand beside ours.
    """

    name: str
    kind: Kind
    label: str
    unit: str = ""
    better: Better
    least: float = 0.0
    most: float = 1.0
    digits: int = 3
    reported: bool = True

    @property
    def title(self) -> str:
        """Label and unit, as "PSNR, dB"."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    def clip(self, value: float) -> float:
        """The value, moved into the range where it is outside."""
        return min(max(value, self.least), self.most)


_TABLE = (
    KnownMetric(name="accuracy", kind="utility", label="accuracy", better="higher"),
    KnownMetric(name="loss", kind="utility", label="loss", unit="nats", better="lower", most=math.inf),
    KnownMetric(name="epsilon", kind="claim", label="claimed ε", better="lower", most=math.inf, digits=2),
    KnownMetric(name="auc", kind="membership", label="AUC", better="lower"),
    KnownMetric(name="tpr_at_1pct_fpr", kind="membership", label="TPR at 1 % FPR", better="lower"),
    KnownMetric(name="tpr_at_0.1pct_fpr", kind="membership", label="TPR at 0.1 % FPR", better="lower"),
    KnownMetric(name="advantage", kind="membership", label="advantage", better="lower", least=-1.0),
    KnownMetric(name="balanced_accuracy", kind="membership", label="balanced accuracy", better="lower"),
    KnownMetric(
        name="implied_epsilon", kind="membership", label="implied ε", better="lower", most=math.inf, reported=False
    ),
    KnownMetric(
        name="psnr", kind="reconstruction", label="PSNR", unit="dB", better="lower", most=math.inf, digits=1
    ),
    KnownMetric(
        name="psnr_floor", kind="reconstruction", label="PSNR of the mean public image", unit="dB", better="lower",
        most=math.inf, digits=1, reported=False,
    ),
    KnownMetric(name="mse", kind="reconstruction", label="MSE", better="higher", most=math.inf, digits=4),
    KnownMetric(name="ssim", kind="reconstruction", label="SSIM", better="lower", least=-1.0),
    KnownMetric(name="lpips", kind="reconstruction", label="LPIPS", better="higher", most=math.inf),
    KnownMetric(name="label_accuracy", kind="reconstruction", label="labels", better="lower", digits=2),
    KnownMetric(
        name="objective", kind="reconstruction", label="objective", better="higher", least=-math.inf, most=math.inf,
        reported=False,
    ),
)  # fmt: skip

METRICS = {metric.name: metric for metric in _TABLE}
"""Name -> what is known of it."""

REPORTED = tuple(metric.name for metric in _TABLE if metric.reported)
"""Names that a paper's figure can have."""
