"""The lower bound on epsilon that an audit proves, with its qualifications, and the verdict on a claim.

A lower bound states how much privacy is certainly lost, up to its error rate and under its assumption. A claim is an
upper bound. Only a lower bound above a claim is evidence about the claim: it refutes it. A lower bound below it means
"no violation found", however close it is.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Relation = Literal["add_remove", "replace_one"]
Kind = Literal["confidence", "credible"]
ClaimVerdict = Literal["violation", "no violation found"]


@dataclass(frozen=True, kw_only=True)
class EpsilonEstimate:
    """A lower bound on epsilon, with the conditions under which it holds.

    Attributes:
        value: nats; 0 if nothing is proved.
        delta: at which it holds.
        level: confidence; the bound exceeds the truth in at most a fraction 1 - level of audits.
        method: name of the method.
        assumption: conditions on the trials for it to hold.
        relation: neighbouring relation between the data sets of the trials.
        positives: trials with the record.
        negatives: trials without it.
        looks: number of thresholds, splits or numbers of guesses among which the bound is the best; the error rate was
            divided by it.
        ceiling: the largest value that as many trials can prove, by a test without errors.
        kind: `credible` for a quantile of a posterior, which is no confidence bound.
        detail: counts, thresholds and parameters.
    """

    value: float
    delta: float
    level: float
    method: str
    assumption: str
    relation: Relation
    positives: int
    negatives: int
    looks: int
    ceiling: float
    kind: Kind = "confidence"
    detail: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.value >= 0:
            raise ValueError(f"value must be at least 0, got {self.value}")
        if self.relation not in get_args(Relation):
            raise ValueError(f"relation must be one of {', '.join(get_args(Relation))}, got {self.relation!r}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields; infinity becomes the string "inf", because JSON has no number for it."""
        return {name: "inf" if value == math.inf else value for name, value in asdict(self).items()}


def judge(estimate: EpsilonEstimate, *, epsilon: float, delta: float, relation: Relation) -> ClaimVerdict:
    """Compares a lower bound with a claim: a violation if the bound exceeds the claim.

    Args:
        estimate: from trials of the claim's own mechanism, with its sampling and normalisation.
        epsilon: claimed, nats; infinite if nothing is claimed.
        delta: claimed.
        relation: of the claim.

    Raises:
        ValueError: if the two do not match: another delta, another relation, a credible bound.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon of the claim must be at least 0, got {epsilon}")
    if estimate.kind != "confidence":
        raise ValueError(
            f"a claim must be judged by a confidence bound, got a {estimate.kind} one of {estimate.method}"
        )
    if estimate.delta != delta:
        raise ValueError(
            f"the bound must be at the delta of the claim, {delta}, got {estimate.delta}; compute it there"
        )
    if estimate.relation != relation:
        raise ValueError(
            f"the bound must be of the claim's relation, {relation}, got {estimate.relation}; "
            "an add/remove claim implies one of replacement, see `of_replacement`"
        )
    return "violation" if estimate.value > epsilon else "no violation found"


def of_replacement(epsilon: float, delta: float) -> tuple[float, float]:
    """Returns the replace-one guarantee that an add/remove claim implies: a removal and an addition.

    The pair follows from group privacy for groups of two (Dwork & Roth, 2014, Theorem 2.2). The claim's privacy loss
    distribution, if it is known, gives a tighter one.

    Returns:
        (2 epsilon, (1 + e^epsilon) delta), the latter at most 1.
    """
    return 2 * epsilon, min(1.0, (1 + math.exp(min(epsilon, 700.0))) * delta) if delta > 0 else 0.0


def check_level(level: float) -> None:
    """Refuses an invalid confidence level."""
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")


def check_delta(delta: float, *, least: float = 0.0) -> None:
    """Refuses an invalid delta, or a delta too small for a method."""
    if not least <= delta < 1 or (least > 0 and delta == 0):
        raise ValueError(f"delta must be in [{least:g}, 1), got {delta}")
