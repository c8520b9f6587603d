"""Details of metrics: the facts beside a value, typed by the metric. Standard library only.

`KnownMetric.detail` names the type of each metric. A detail may have further keys, such as counts and methods.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from .validation import OpenFields, convert

D = TypeVar("D", bound="Detail")

Half = Literal["calibration", "report"]
"""Halves of the candidates: attacks are compared on the first, and the chosen attack's number is from the second."""

CALIBRATION: Half = "calibration"
REPORT: Half = "report"

LARGEST_UNDER_CLAIM, LARGEST_BY, LARGEST_NOTE = "largest_under_claim", "largest_by", "largest_note"
"""Keys of the largest value that the claim allows any test, the accounting that gives it, and a caveat to print with
it."""

ROC_RATES = tuple(10 ** (i / 6 - 4) for i in range(25))
"""False positive rates at which the AUC's detail holds the largest true positive rate under the claim."""


def half_key(half: str, field: str) -> str:
    """Key of a half's `value`, `low`, `high` or `n`, as "report_value"."""
    return f"{half}_{field}"


def roc_key(fpr: float) -> str:
    """Key of the largest true positive rate at a rate of `ROC_RATES`."""
    return f"largest_tpr_at_{fpr:.3g}_fpr"


@dataclass(frozen=True)
class HalfNumber:
    """Value of a metric on half of the candidates, with its interval; None for keys that the detail lacks."""

    value: float | None
    low: float | None
    high: float | None
    n: int | None


class Detail(OpenFields):
    """Detail of any metric.

    Attributes:
        largest_under_claim: largest value that the claim allows any test; None without a claim.
        largest_note: caveat to print with it; empty for none.
        calibration_value: value on the half of the candidates by which attacks are compared; None without halves, as
            its interval (`calibration_low`, `calibration_high`) and `calibration_n`.
        report_value: value on the other half, with `report_low`, `report_high` and `report_n`.
    """

    VALUES: ClassVar[Any] = float | int | str | None

    largest_under_claim: float | None = None
    largest_note: str = ""
    calibration_value: float | None = None
    calibration_low: float | None = None
    calibration_high: float | None = None
    calibration_n: int | None = None
    report_value: float | None = None
    report_low: float | None = None
    report_high: float | None = None
    report_n: int | None = None

    @classmethod
    def of(cls: type[D], detail: OpenFields) -> D:
        """Converts a detail to this type; metrics of a record have the type already."""
        return convert(cls, detail, "detail")

    def on(self, half: Half) -> HalfNumber:
        """Returns the number on a half of the candidates."""
        return HalfNumber(*(getattr(self, half_key(half, name)) for name in ("value", "low", "high", "n")))


class CountDetail(Detail):
    """Detail of a share.

    Attributes:
        correct: number of examples in the numerator.
    """

    correct: int = 0


class AucDetail(Detail):
    """Detail of the AUC of an attack on membership.

    Attributes:
        detectable: AUC that would be distinguished from 0.5 with a power of 0.8; None without candidates.
        shift_p_value: under exchangeable members and non-members; None with too few examples.
    """

    detectable: float | None = None
    shift_p_value: float | None = None

    @property
    def largest_roc(self) -> list[tuple[float, float]]:
        """Largest true positive rates under the claim, as (fpr, tpr); empty without a claim."""
        return [(fpr, float(tpr)) for fpr in ROC_RATES if isinstance(tpr := self.get(roc_key(fpr)), int | float)]


class ProvedDetail(Detail):
    """Detail of a proved lower bound on epsilon.

    Attributes:
        method: of the bound.
        relation: of neighbors.
        value_at_verdict: bound at the higher confidence at which it may refute a claim.
        ceiling_at_verdict: bound at that confidence if all guesses had been right.
        delta_at_verdict: delta of both.
        claimed: epsilon of the claim for this relation and delta; None without a finite claim.
    """

    method: str = ""
    relation: str = ""
    value_at_verdict: float | None = None
    ceiling_at_verdict: float | None = None
    delta_at_verdict: float | None = None
    claimed: float | None = None


class GainDetail(Detail):
    """Detail of a gain over an image without information.

    Attributes:
        detectable: smallest mean gain, dB, that would be detected with a power of 0.8; None for a single image.
    """

    detectable: float | None = None


class ChoiceDetail(Detail):
    """Detail of the success of choices among candidates.

    Attributes:
        kappa: success probability of a guess from the candidates alone, without the update.
    """

    kappa: float | None = None
