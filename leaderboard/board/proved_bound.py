"""Proved lower bound on a row's epsilon: the largest over its attacks, valid for all of them at once.

A record's bound fails with a probability of 0.05, and the largest of several bounds fails if any of them does. The
least bound of n trainings fails only if all n do: 0.05^n, because their coins are independent. So the largest over
attacks of the least over seeds fails with a probability of at most sum_a 0.05^n_a, and is shown if that is at most
0.05. Otherwise the bounds at the confidence of a verdict (1 - 1e-6 each, in the same records) are compared instead.

Guarantee:
    With a confidence of at least 0.95 the training of a row is not (epsilon, delta)-private under the bound's relation,
    for any epsilon below the value; this holds for all relations of a row at once. Assumes the assumptions of each
    bound's method, and that trainings with different splits drew their coins independently; a split counts once.
    Caveat: it holds for each row. Among many rows, a twentieth may be shown a bound that is too high.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..metrics import METRICS
from ..records.details import ProvedDetail
from ..records.record import Record
from .aggregate import BoardCell, Estimate, over_seeds
from .rows import Row

PROVED = {"epsilon_lower": "pairs of members and non-members", "canary_epsilon": "canaries"}
"""Metric of a proved bound -> the trials behind it."""

NAME = "epsilon_lower"
"""Name of a row's bound in exports."""

ERROR, ERROR_AT_VERDICT = 0.05, 1e-6
"""Largest probability that a record's value, or its value at the confidence of a verdict, exceeds epsilon."""


@dataclass(frozen=True, kw_only=True)
class AttackBound:
    """Bound by an attack.

    Attributes:
        cell: of the attack.
        metric: of `PROVED`.
        estimate: the least value of its seeds; None with the reason.
    """

    cell: BoardCell
    metric: str
    estimate: Estimate

    @property
    def details(self) -> list[ProvedDetail]:
        """Facts beside the values of the seeds measured."""
        return [ProvedDetail.of(record.metrics[self.metric].detail) for record in self._measured]

    @property
    def trainings(self) -> int:
        """Number of trainings with splits of their own; 1 if records name no split."""
        return max(1, len({record.task.digest for record in self._measured} - {None}))

    @property
    def at_verdict(self) -> float | None:
        """Least value of the seeds at the confidence of a verdict; None if one has none for its own delta."""
        if any(not _same_delta(detail) for detail in self.details):
            return None
        values = [detail.value_at_verdict for detail in self.details]
        numbers = [value for value in values if value is not None]
        return min(numbers) if len(numbers) == len(values) else None

    @property
    def claimed(self) -> float | None:
        """Largest claim of the seeds for the bound's relation and delta; None if one is infinite or unknown."""
        claims = [_claimed(record, detail) for record, detail in zip(self._measured, self.details, strict=True)]
        finite = [claim for claim in claims if claim is not None]
        return max(finite) if len(finite) == len(claims) else None

    @property
    def relation(self) -> str:
        """Relation of neighbours; empty if no record names it."""
        return next((detail.relation for detail in self.details if detail.relation), "")

    @property
    def delta(self) -> float | None:
        """Delta of the bound, the smallest of its seeds, at which all of them hold; None if no record names it."""
        return min((delta for detail in self.details if (delta := _delta(detail)) is not None), default=None)

    @property
    def _measured(self) -> list[Record]:
        return [self.cell.records[seed] for seed in self.estimate.seeds]


@dataclass(frozen=True, kw_only=True)
class ProvedBound:
    """Lower bound on a row's epsilon under a relation of neighbours.

    Attributes:
        value: nats; None if nothing is proved, with the reason.
        relation: of neighbours, which is not always that of the row's claim.
        delta: of the bound.
        claimed: epsilon of the claim for this relation and delta; None without a finite claim.
        attack: by which it is proved.
        metric: of its records.
        seeds: behind the value, which is the least of theirs.
        looks: number of bounds of the row, of all relations, that hold at once.
        confidence: with which all of them hold.
        reason: why there is no value, or how it was computed.
    """

    value: float | None
    relation: str = ""
    delta: float | None = None
    claimed: float | None = None
    attack: str | None = None
    metric: str = NAME
    seeds: tuple[int, ...] = ()
    looks: int = 0
    confidence: float | None = None
    reason: str = ""


def attack_bounds(row: Row) -> Iterator[AttackBound]:
    """Yields the bound of every attack that recorded a bound, without a value if it could prove nothing.

    Args:
        row: of a board. A negative control has none: its candidates were in no training.
    """
    for cell, metric in product(row.cells if row.control != "negative" else (), PROVED):
        if any(metric in record.metrics for record in cell.records.values()):
            bound = AttackBound(cell=cell, metric=metric, estimate=over_seeds(metric, cell))
            if len({detail.relation for detail in bound.details}) > 1:
                bound = replace(bound, estimate=replace(bound.estimate, value=None, seeds=(), reason=_RELATIONS))
            yield bound


def proved_bounds(row: Row) -> list[ProvedBound]:
    """Returns the largest bound of each relation that was measured, by its share of the claim, the largest first.

    Args:
        row: of a board.

    Returns:
        Bounds that hold at once; if the records have none, a single bound without a value.
    """
    bounds = list(attack_bounds(row))
    measured = [bound for bound in bounds if bound.estimate.value is not None]
    if not measured:
        return [ProvedBound(value=None, reason=_why_none(row, bounds))]
    error = sum(ERROR**bound.trainings for bound in measured)
    # The choice of the confidence must not depend on the values. 1e-12: rounding of the sum.
    at_own_level = error <= ERROR + 1e-12
    confidence = 1 - error if at_own_level else 1 - len(measured) * ERROR_AT_VERDICT
    largest: dict[str, ProvedBound] = {}
    for bound in measured:
        value = bound.estimate.value if at_own_level else bound.at_verdict
        proved = ProvedBound(
            value=value,
            relation=bound.relation,
            delta=bound.delta,
            claimed=bound.claimed,
            attack=bound.cell.attack,
            metric=bound.metric,
            seeds=bound.estimate.seeds,
            looks=len(measured),
            confidence=confidence,
            reason=_how(bound, len(measured), confidence, at_own_level=at_own_level)
            if value is not None
            else _NO_VERDICT,
        )
        if bound.relation not in largest or _place(proved) > _place(largest[bound.relation]):
            largest[bound.relation] = proved
    return sorted(largest.values(), key=_place, reverse=True)


def proved_bound(row: Row) -> ProvedBound:
    """Returns the bound of a row that comes closest to refuting its claim.

    Args:
        row: of a board.
    """
    return proved_bounds(row)[0]


_NO_VERDICT = (
    "bounds of several attacks at a confidence of 0.95 each do not hold at once, and this one has no value at the "
    "confidence of a verdict and the same delta"
)


_RELATIONS = "bounds of its seeds are for different relations of neighbours, so the least of them is for none"


def bound_words(value: float) -> str:
    """Formats a lower bound in two decimals, rounded down.

    Args:
        value: nats.
    """
    return METRICS[NAME].number(value, 2)


def _place(bound: ProvedBound) -> tuple[bool, float, float]:
    share = 0.0 if bound.claimed is None or bound.value is None else bound.value / max(bound.claimed, 1e-9)
    return bound.value is not None, share, bound.value or 0.0


def _why_none(row: Row, bounds: Iterable[AttackBound]) -> str:
    if row.control == "negative":
        return "a negative control has its candidates in no training, so nothing is proved of it"
    reasons = dict.fromkeys(bound.estimate.reason for bound in bounds if bound.estimate.reason)
    return "; ".join(reasons) or "no attack was run whose pairs or canaries prove a bound"


def _how(bound: AttackBound, looks: int, confidence: float, *, at_own_level: bool) -> str:
    least = "the least of its seeds" if len(bound.estimate.seeds) > 1 else "of one training"
    among = "" if looks == 1 else f"the largest of {looks} bounds, "
    level = "" if at_own_level else ", each at a confidence of 1 - 1e-6"
    # Rounded down: a confidence must not be shown as more than it is.
    words = f"{int(confidence * 1e4 + 1e-6) / 1e4:g}"
    return f"from {PROVED[bound.metric]}: {among}{least}{level}; holds with a confidence of {words}"


def _delta(detail: ProvedDetail) -> float | None:
    delta = detail.get("delta")
    return delta if isinstance(delta, float) else None


def _same_delta(detail: ProvedDetail) -> bool:
    return detail.delta_at_verdict in (None, _delta(detail))


def _claimed(record: Record, detail: ProvedDetail) -> float | None:
    """Claim for the relation and delta of the bound; a canaries' detail has it for the delta of its verdict."""
    if _same_delta(detail):
        return detail.claimed
    claim = record.claim
    same = claim is not None and (claim.relation, claim.delta) == (detail.relation, _delta(detail))
    return claim.epsilon if claim is not None and same else None
