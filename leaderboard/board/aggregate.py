"""Means over seeds with their intervals, and the worst case over attacks.

The value of the strongest attack is a maximum over the attacks tried, and a maximum of noisy numbers is biased upwards,
the more so the more there are. So the strongest attack is selected on one half of the candidates, and its value is
measured on the other half, if records have both. The intervals of all attacks compared are simultaneous (Bonferroni
over the number of looks), so the largest high end covers the strongest attack, whichever it is. A missing measurement
has no value, never 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean, stdev
from typing import Literal

from scipy import special  # `scipy.stats` makes all distributions at import, in longer than a board takes

from ..kinds import KINDS
from ..metrics import METRICS
from ..records.details import CALIBRATION, REPORT, Half
from ..records.fields import Metric
from ..records.record import Record

LOW_END = "no interval: it is a low end by itself"
"""Reason for the absence of an interval: a proved bound is itself a lower confidence bound."""


class BoardError(ValueError):
    """Records that cannot be shown on the same board."""


@dataclass(frozen=True, kw_only=True)
class BoardCell:
    """Results of a defense against an attack (or of its utility) on a task, over seeds.

    Attributes:
        kind: as in the records.
        attack: label of the attack, with settings if attacks of the same name differ; None for utility.
        noise: variant of the release, if its kind has several: "none" is the release without its noise.
        records: seed -> its record with status "ok".
        estimates: those computed already by `over_seeds`, which boards and pages ask for several times.
    """

    kind: str
    attack: str | None
    noise: str | None
    records: Mapping[int, Record]
    estimates: dict[tuple[str, int, Half | None], "Estimate"] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Number of the board: a mean over seeds, or the worst such mean over attacks.

    Attributes:
        metric: its name in the records.
        value: mean over the seeds measured; None without measurements.
        low: lower end of the interval, 95 % simultaneous over `looks`; None without an interval.
        high: upper end.
        seeds: the seeds measured.
        looks: number of attacks compared.
        attack: label of the attack that reached the value.
        interval: "seeds" (Student t over seeds), "own" (the records' intervals, averaged), None.
        reason: why there is no value or no interval, or which seeds or attacks the value lacks.
        largest: largest value that the claim allows any test, mean over the same seeds; None if a record lacks it.
        largest_note: caveat about that bound; empty for none.
        chosen_on: scores on which the strongest attack was selected: the calibration half (the value is then from the
            other half), or the same scores as the value; None without a selection.
        unmeasured: labels of attacks without a number of this metric that have one of their kind's main metric, so that
            the worst case is only a lower limit.
    """

    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    seeds: tuple[int, ...] = ()
    looks: int = 1
    attack: str | None = None
    interval: Literal["seeds", "own"] | None = None
    reason: str | None = None
    largest: float | None = None
    largest_note: str = ""
    chosen_on: Literal["calibration half", "the same scores"] | None = None
    unmeasured: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Number of seeds behind the value."""
        return len(self.seeds)

    @property
    def ends(self) -> tuple[float, float] | None:
        """Interval (low, high), if there is one."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def gap(self) -> float | None:
        """Bound of the claim minus the value; negative by chance, or if the claim is wrong."""
        return None if self.largest is None or self.value is None else self.largest - self.value

    def words(self, digits: int) -> str:
        """Formats the value with its interval, as "0.93 [0.91, 0.95]"; n/a without a value.

        Args:
            digits: decimals.
        """
        if self.value is None:
            return "n/a"
        known = METRICS.get(self.metric)
        value = f"{self.value:.{digits}f}" if known is None else known.number(self.value, digits)
        return value if self.ends is None else f"{value} [{self.ends[0]:.{digits}f}, {self.ends[1]:.{digits}f}]"


def over_seeds(name: str, cell: BoardCell, *, looks: int = 1, half: Half | None = None) -> Estimate:
    """Computes the mean of a metric over the seeds of a cell, with a 95 % interval.

    The interval is Student's t over seeds. With a single seed, or with equal values (whose t interval would have no
    width), it is the mean of the records' own intervals, widened for `looks` as a normal interval would be. Both are
    clipped to the metric's range. For proved bounds the estimate is the least value, without an interval.

    Args:
        name: the metric.
        cell: its records.
        looks: number of simultaneous intervals.
        half: of the candidates, `CALIBRATION` or `REPORT`; None for all candidates.

    Returns:
        The estimate; its value is None, with a reason, if no record has a value.
    """
    key = name, looks, half
    if key not in cell.estimates:
        cell.estimates[key] = _over_seeds(name, cell, looks, half)
    return cell.estimates[key]


def _over_seeds(name: str, cell: BoardCell, looks: int, half: Half | None) -> Estimate:
    metrics = {seed: record.metrics.get(name) for seed, record in sorted(cell.records.items())}
    if half is not None:
        metrics = {seed: None if metric is None else _on_half(metric, half) for seed, metric in metrics.items()}
    measured = {seed: m for seed, m in metrics.items() if m is not None and m.value is not None}
    gaps = _gaps(name, metrics)
    if not measured:
        reason = gaps or f"no {cell.kind} record"
        return Estimate(metric=name, value=None, attack=cell.attack, looks=looks, reason=reason)
    values = [m.value for m in measured.values() if m.value is not None]
    if name in METRICS and METRICS[name].proved:
        # The least of several lower bounds holds with the confidence of each. Their mean and their maximum hold only if
        # all of them do, so their error probabilities add up.
        reason = gaps or ("the least of its seeds, which is proved as each is" if len(values) > 1 else LOW_END)
        return Estimate(
            metric=name, value=min(values), seeds=tuple(measured), attack=cell.attack, looks=looks, reason=reason
        )
    center = min(max(fmean(values), min(values)), max(values))  # rounding must not leave the values' range
    ends, kind = student(values, looks=looks), "seeds"
    # Equal values, or a single value, have no spread over seeds, so the records' own intervals are used.
    if ends is None:
        ends, kind = _own_interval(list(measured.values()), looks), "own"
    if ends is None:
        why = next((m.reason for m in measured.values() if m.low is None and m.reason), None)
        gaps = gaps or why or "no interval: the records give none"
        kind = None
    low, high = _clip(name, ends) if ends else (None, None)
    return Estimate(
        metric=name, value=center, low=low, high=high, seeds=tuple(measured),
        looks=looks, attack=cell.attack, interval=kind, reason=gaps, largest=_largest(measured.values()),
        largest_note="; ".join(dict.fromkeys(m.detail.largest_note for m in measured.values())),
    )  # fmt: skip


def worst_case(name: str, cells: list[BoardCell], *, missing: str) -> Estimate:
    """Computes the worst case over attacks, with an interval that covers the strongest attack, whichever it is.

    Args:
        name: of a metric; `better` in its records gives the direction that is bad for the defense.
        cells: a cell for each attack compared.
        missing: reason to give if there is no attack to compare.

    Returns:
        Estimate of the attack with the worst mean, from the half of the candidates that had no part in its selection if
        records have halves.
    """
    looks = sum(over_seeds(name, cell).value is not None for cell in cells)
    worst = _worst_measured(name, cells, looks, missing=missing)
    unmeasured = {cell.attack or cell.kind: over_seeds(name, cell).reason for cell in cells if _lacks(name, cell)}
    if not looks or not unmeasured:
        return worst
    # An attack without a TPR, because of its few candidates, may be the strongest.
    clauses = [f"without {' and '.join(labels)}: {why}" for why, labels in _by_reason(unmeasured).items()]
    return replace(worst, unmeasured=tuple(unmeasured), reason="; ".join(filter(None, (worst.reason, *clauses))))


def _lacks(name: str, cell: BoardCell) -> bool:
    """True if a cell has a number of its kind's main metric, and a reason in place of one of this metric."""
    recorded = any(name in record.metrics for record in cell.records.values())
    main = KINDS[cell.kind].main
    return recorded and over_seeds(name, cell).value is None and over_seeds(main, cell).value is not None


def _by_reason(unmeasured: Mapping[str, str | None]) -> dict[str, list[str]]:
    labels: dict[str, list[str]] = {}
    for label, reason in unmeasured.items():
        labels.setdefault(reason or "not measured", []).append(label)
    return labels


def _worst_measured(name: str, cells: list[BoardCell], looks: int, *, missing: str) -> Estimate:
    """Worst case over the attacks with a number; `looks` is how many they are."""
    if not looks:
        reasons = [over_seeds(name, cell).reason for cell in cells]
        reason = "; ".join(dict.fromkeys(r for r in reasons if r)) or missing
        return Estimate(metric=name, value=None, reason=reason)
    # Computed again with wider intervals: the maximum of k means leaves its own interval up to k times as often.
    compared = [_Compared(cell, over_seeds(name, cell, looks=looks)) for cell in cells]
    compared = [attack for attack in compared if attack.estimate.value is not None]
    estimates = [attack.estimate for attack in compared]
    sign = 1 if _better(name, cells) == "lower" else -1
    strongest, chosen = _strongest(compared, sign), None
    if looks > 1 and (chosen := _chosen_on_a_half(name, compared, sign)) is not None:
        # Attacks without halves are compared by their values on all candidates, so that none is left out.
        strongest = _strongest([chosen, *(attack for attack in compared if not _has_halves(name, attack))], sign)
    of_half, strongest = strongest is chosen, strongest.estimate
    low, high, interval, reason = None, None, None, strongest.reason
    if all(e.low is not None for e in estimates):
        pick = max if sign > 0 else min
        # max_k mu_k >= mu_j >= low_j for every j, and <= max_j high_j, since all intervals hold at once.
        low = pick(e.low for e in estimates if e.low is not None)
        high = pick(e.high for e in estimates if e.high is not None)
        interval = strongest.interval
    # An attack without an interval may be the strongest, so the intervals of the others need not cover it.
    elif strongest.low is not None:
        without = next(e.attack for e in estimates if e.low is None)
        reason = f"no interval: {without} was compared too and has none"
    if of_half:
        reaching = _reaching(strongest, low if sign < 0 else high, sign)
        why = strongest.reason if reaching.low is not None else strongest.reason or reason
        return replace(reaching, looks=looks, chosen_on="calibration half", reason=why)
    return Estimate(
        metric=name, value=strongest.value, low=low, high=high, seeds=strongest.seeds,
        looks=looks, attack=strongest.attack, interval=interval, reason=reason, largest=strongest.largest,
        largest_note=strongest.largest_note,
        chosen_on="the same scores" if looks > 1 else None,
    )  # fmt: skip


@dataclass(frozen=True)
class _Compared:
    """Attack with the estimate by which it is compared."""

    cell: BoardCell
    estimate: Estimate
    half: Half | None = None

    def on(self, seeds: Iterable[int]) -> float:
        """Returns the mean over a subset of its seeds."""
        cell = replace(self.cell, records={seed: self.cell.records[seed] for seed in seeds})
        return over_seeds(self.estimate.metric, cell, half=self.half).value or 0.0


def _strongest(compared: Sequence[_Compared], sign: int) -> _Compared:
    """Returns the attack with the worst mean, provided it is also worst on the seeds that it shares with others.

    Runs differ in how much they leak. So an attack with fewer seeds replaces another only if its mean is worse over all
    of its seeds and also over the seeds that both have: a single lucky seed must not beat a mean over three.

    Args:
        compared: attacks with values; not empty.
        sign: 1 if larger values are worse, else -1.
    """

    def rank(compared: _Compared) -> tuple[float, float]:
        # Ties go to the interval that reaches farther, so that the order of cells matters less.
        return sign * (compared.estimate.value or 0.0), sign * _pessimistic(compared.estimate, sign)

    best, *others = sorted(compared, key=lambda attack: -attack.estimate.n)
    for attack in others:
        both = sorted(set(attack.estimate.seeds) & set(best.estimate.seeds))
        alike = attack.estimate.seeds == best.estimate.seeds or not both
        if rank(attack) > rank(best) and (alike or sign * attack.on(both) > sign * best.on(both)):
            best = attack
    return best


def _has_halves(name: str, attack: _Compared) -> bool:
    """True if both halves of the candidates have numbers for all seeds of the attack's measurement."""
    estimates = [over_seeds(name, attack.cell, half=half) for half in (CALIBRATION, REPORT)]
    return all(estimate.seeds == attack.estimate.seeds for estimate in estimates)


def _chosen_on_a_half(name: str, compared: Sequence[_Compared], sign: int) -> _Compared | None:
    """Report-half estimate of the strongest attack by the calibration half; None if fewer than two have halves."""
    known = [
        _Compared(attack.cell, over_seeds(name, attack.cell, half=CALIBRATION), CALIBRATION)
        for attack in compared
        if _has_halves(name, attack)
    ]
    if len(known) < 2:
        return None
    cell = _strongest([replace(attack, estimate=_bare(attack.estimate)) for attack in known], sign).cell
    return _Compared(cell, over_seeds(name, cell, half=REPORT), REPORT)


def _bare(estimate: Estimate) -> Estimate:
    """Drops the interval, so that among equal means the first attack is selected."""
    return replace(estimate, low=None, high=None)


def _reaching(chosen: Estimate, end: float | None, sign: int) -> Estimate:
    """Extends the interval of the selected attack on the report half so that it covers the strongest attack.

    The end that favors the defense is the attack's own, because the strongest attack is at least as strong. The other
    end is that of all attacks on all candidates, because a small calibration half may select a weaker attack.

    Args:
        chosen: estimate on the report half.
        end: end unfavorable to the defense, simultaneous over all attacks; None if an attack has no interval.
        sign: 1 if larger values are worse, else -1.
    """
    if chosen.low is None or chosen.high is None or end is None or chosen.value is None:
        return replace(chosen, low=None, high=None, interval=None)
    low, high = (chosen.low, max(chosen.value, end)) if sign > 0 else (min(chosen.value, end), chosen.high)
    return replace(chosen, low=low, high=high)


def _on_half(metric: Metric, half: Half) -> Metric:
    """Returns the metric on a half of the candidates, from its detail."""
    number = metric.detail.on(half)
    if number.value is None:
        return replace(metric, value=None, low=None, high=None, reason=metric.reason or f"no number on the {half} half")
    low, high = (None, None) if None in (number.low, number.high) else (number.low, number.high)
    return replace(metric, value=number.value, low=low, high=high, n=number.n)


def student(values: list[float], *, looks: int = 1) -> tuple[float, float] | None:
    """Two-sided 95 % t interval of a mean, simultaneous over `looks`.

    Args:
        values: a value for each seed.
        looks: number of simultaneous intervals (Bonferroni).

    Returns:
        Its ends; None for fewer than two values or equal values.
    """
    if len(values) < 2 or (spread := _spread(tuple(values))) == 0:
        return None
    # mean ± t(1 - alpha / (2 k); n - 1) s / sqrt(n), alpha = 5 %, k = looks.
    half = float(special.stdtrit(len(values) - 1, 1 - 0.025 / looks)) * spread / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


@lru_cache(maxsize=2**16)
def _spread(values: tuple[float, ...]) -> float:
    """Standard deviation; cached, because it is exact and slow, and a board asks for each cell's several times."""
    return stdev(values)


def _pessimistic(estimate: Estimate, sign: int) -> float:
    end = estimate.high if sign > 0 else estimate.low
    return end if end is not None else (estimate.value or 0.0)


def _better(name: str, cells: list[BoardCell]) -> str:
    if name in METRICS:
        return METRICS[name].better
    directions = {r.metrics[name].better for cell in cells for r in cell.records.values() if name in r.metrics}
    if len(directions) > 1:
        raise BoardError(f"metric {name!r} must have one direction, its records say both higher and lower")
    return directions.pop()


def _largest(metrics: Iterable[Metric]) -> float | None:
    largest = [metric.detail.largest_under_claim for metric in metrics]
    numbers = [value for value in largest if value is not None]
    return fmean(numbers) if len(numbers) == len(largest) else None


def _own_interval(metrics: list[Metric], looks: int) -> tuple[float, float] | None:
    ends = [(m.value, m.low, m.high) for m in metrics]
    # Half-widths of a normal estimate are proportional to z(1 - alpha / (2 k)).
    widen = float(special.ndtri(1 - 0.025 / looks) / special.ndtri(0.975))
    lows, highs = [], []
    for value, low, high in ends:
        if value is None or low is None or high is None:
            return None
        # An interval may end at its own estimate, as at 0 or 1; widening must not invert it.
        lows.append(min(low, value - widen * (value - low)))
        highs.append(max(high, value + widen * (high - value)))
    # Mean ends, not narrowed by sqrt(n): conservative if seeds agree, and the record's own for a single seed.
    return fmean(lows), fmean(highs)


def _clip(name: str, ends: tuple[float, float]) -> tuple[float, float]:
    known = METRICS.get(name)
    return ends if known is None else (known.clip(ends[0]), known.clip(ends[1]))


def _gaps(name: str, metrics: Mapping[int, Metric | None]) -> str | None:
    """Lists the seeds that lack the metric, a clause for each reason."""
    seeds_of: dict[str, list[int]] = {}
    for seed, metric in metrics.items():
        if metric is None:
            seeds_of.setdefault(f"{name} is not among the metrics recorded", []).append(seed)
        elif metric.value is None:
            seeds_of.setdefault(metric.reason or "not measured", []).append(seed)
    if len(seeds_of) == 1 and len(next(iter(seeds_of.values()))) == len(metrics):
        return next(iter(seeds_of))
    return "; ".join(f"seed {_join(seeds)}: {why}" for why, seeds in seeds_of.items()) or None


def _join(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds))
