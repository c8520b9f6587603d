"""Controls of a board: positive controls must leak, negative controls must not. Also lists refuted claims.

If plain SGD does not leak, the attacks are too weak or broken, and the board says nothing about the defenses. If a
model that was not trained on the data leaks, attacks or splits are broken.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ..kinds import JUDGED, KINDS, KindOfResult
from ..metrics import METRICS, Floor, KnownMetric
from ..records.record import Record
from ..records.task import UpdateTask
from .aggregate import BoardCell, Estimate, over_seeds, student
from .choices import is_choice, judged
from .rows import Row


@dataclass(frozen=True, kw_only=True)
class ControlResult:
    """Expectation about a control, and its outcome.

    Attributes:
        name: suite, defense, role and kind of result.
        suite: of the control.
        expected: in words.
        measured: in words, with the numbers.
        ok: whether the expectation holds; False for a control that was not measured.
    """

    name: str
    suite: str = ""
    expected: str
    measured: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A record whose claim was refuted: by its ledger, its noise, or an attack."""

    defense: str
    attack: str | None
    seed: int
    record: str
    sentence: str


def check_controls(rows: Sequence[Row], records: Iterable[Record]) -> tuple[ControlResult, ...]:
    """Compares every control with its expectation.

    Each kind of result is judged by its main metric. If chance is a single value (AUC: 0.5), the interval of at least
    one attack on a positive control must lie beyond it, and the interval of no attack on a negative control may. If the
    metric has a floor, measured in the same record (PSNR: that of the mean public image), the mean over seeds of a
    positive control must exceed it by the margin, for at least one attack. A negative control must not exceed it
    significantly: the interval of the mean paired difference reaches 0, or, with one seed, the difference is within the
    margin. Choices among candidates are judged separately, against the chance of a guess (`choices`).

    Args:
        rows: of the board.
        records: all records, including those of controls that never succeeded and have no row.

    Returns:
        A result for each control and kind of result, and a failed result for each table without controls if other
        tables have some, because controls say nothing about other tables. Empty if the records have no control.
    """
    records, results = list(records), []
    shown = set()
    for row in rows:
        if row.control is None:
            continue
        name = f"{row.suite}: {row.label}"
        # A kind whose cells all failed fails its control; a skipped kind was not run, as without an extra.
        kinds = {cell.kind for cell in row.cells} | {r.kind for r in row.unranked if r.status == "failed"}
        for kind in KINDS.values():
            if kind.name in kinds and row.control in kind.controls:
                results += [replace(result, suite=row.suite) for result in _of_kind(name, row, kind)]
        shown.add((row.suite, row.defense.name, row.control))
    for record in records:
        control = (record.suite, record.defense.name, record.control)
        if record.control is not None and control not in shown:
            shown.add(control)
            name = f"{record.suite}: {record.defense.name} ({record.control} control)"
            measured = f"nothing: every cell was skipped or failed, as {record.reason or record.status!r}"
            results.append(
                ControlResult(name=name, suite=record.suite, expected="a measurement", measured=measured, ok=False)
            )
    if results:
        results += [
            ControlResult(
                name=" · ".join(filter(None, section)),
                suite=section[0],
                expected="controls",
                measured="nothing",
                ok=False,
            )
            for section in _uncontrolled(rows, records)
        ]
    return tuple(results)


def _of_kind(name: str, row: Row, kind: KindOfResult) -> list[ControlResult]:
    """Judges a kind of result: choices among candidates separately, other attacks by the main metric."""
    cells = [cell for cell in row.cells if cell.kind == kind.name]
    choices, results = [cell for cell in cells if is_choice(cell)], []
    if choices:
        expected, measured, ok = judged(choices, positive=row.control == "positive")
        results.append(ControlResult(name=f"{name}, choice", expected=expected, measured=measured, ok=ok))
    failed = any(r.kind == kind.name and r.status == "failed" for r in row.unranked)
    if len(choices) < len(cells) or failed or not choices:
        floor = METRICS[kind.main].floor
        results.append(_above_chance(name, row, kind) if floor is None else _above_floor(name, row, kind, floor))
    return results


def _uncontrolled(rows: Sequence[Row], records: list[Record]) -> list[tuple[str, str, str, str]]:
    """Returns the tables that have contestants and no control of any status."""
    controls = [record for record in records if record.control in JUDGED]
    controlled = {(r.suite, r.task.data, r.task.model) for r in controls}
    suites = {record.suite for record in controls}
    # A row of images alone is filed under the data set of its images, where its suite has no other row.
    alone = {row.section for row in rows if isinstance(row.task, UpdateTask) and row.suite in suites}
    contestants = dict.fromkeys(row.section for row in rows if row.control is None)
    # Attacks on the final model are the same whatever the privacy unit, and so are their controls.
    return [section for section in contestants if section[:3] not in controlled and section not in alone]


def find_violations(records: Iterable[Record]) -> tuple[Violation, ...]:
    """Lists the records that carry the flag `claim_violated`.

    Args:
        records: all of the board.

    Returns:
        A violation for each, in the order of the records.
    """
    return tuple(_violation(record) for record in records if "claim_violated" in record.flags)


def leaks(metric: KnownMetric, estimate: Estimate) -> bool | None:
    """Returns whether an interval lies beyond chance, on the side that leaks; None without an interval."""
    if metric.proved and metric.chance is not None and estimate.value is not None:
        return metric.leak_sign * estimate.value > metric.leak_sign * metric.chance  # itself a lower bound
    end = estimate.low if metric.leak_sign > 0 else estimate.high
    if end is None or metric.chance is None:
        return None
    return metric.leak_sign * end > metric.leak_sign * metric.chance


def _above_chance(name: str, row: Row, kind: KindOfResult) -> ControlResult:
    """Judges a control by intervals against chance, for a metric with the same chance level in every record."""
    metric, worst = METRICS[kind.main], row.main(kind)[0]
    expected = f"{metric.label} {_side(metric, row)} {metric.chance:g}"
    # Widened for the number of attacks: each further attack is another chance to cross the chance level.
    attacks = [over_seeds(metric.name, cell, looks=worst.looks) for cell in row.cells if cell.kind == kind.name]
    verdicts = [leaks(metric, attack) for attack in attacks if attack.value is not None]
    if worst.value is None:
        measured, ok = f"nothing: {worst.reason}", False
    else:
        # Controls are judged on all candidates, and the board's value may be from half of them.
        shown = worst if worst.chosen_on != "calibration half" else _nearest_to_a_leak(metric, attacks)
        ends = f" {shown.words(metric.digits).partition(' ')[2]}" if shown.ends else " without an interval"
        ends = " or more" if metric.proved else ends
        measured = f"{metric.label} {metric.words(shown.value or 0.0)}{ends} by {shown.attack}"
        # None is an attack without an interval, which neither shows a leak nor clears a negative control.
        ok = any(verdicts) if row.control == "positive" else all(leak is False for leak in verdicts)
    return ControlResult(name=f"{name}, {kind.name}", expected=expected, measured=measured, ok=ok)


def _nearest_to_a_leak(metric: KnownMetric, attacks: Sequence[Estimate]) -> Estimate:
    """Returns the attack whose lower limit of the leak (its value without an interval) is farthest beyond chance."""

    def reach(attack: Estimate) -> float:
        end = attack.low if metric.leak_sign > 0 else attack.high
        return metric.leak_sign * ((attack.value or 0.0) if end is None else end)

    return max((attack for attack in attacks if attack.value is not None), key=reach)


def _above_floor(name: str, row: Row, kind: KindOfResult, floor: Floor) -> ControlResult:
    """Judges a control by the gain over a guess without any attack, whose value differs between records."""
    metric = METRICS[kind.main]
    expected = f"{metric.label} {_side(metric, row)} {floor.of}'s"
    name = f"{name}, {kind.name}"
    gains = [(cell, _gains(cell, metric, floor)) for cell in row.cells if cell.kind == kind.name]
    gains = [(cell, pairs) for cell, pairs in gains if pairs]
    if not gains:
        reasons = (row.main(kind)[0].reason, *(row.estimates[c.key].reason for c in METRICS[floor.metric].columns))
        why = next(filter(None, reasons), f"no {metric.name} with its {floor.metric}")
        return ControlResult(name=name, expected=expected, measured=f"nothing: {why}", ok=False)
    best, pairs = max(gains, key=lambda gain: fmean(metric.leak_sign * (value - free) for value, free in gain[1]))
    value, free = fmean(f for f, _ in pairs), fmean(f for _, f in pairs)
    measured = f"{metric.label} {metric.words(value)} against {metric.words(free)} by {best.attack}"
    if row.control == "positive":
        ok = metric.leak_sign * value > metric.leak_sign * free + floor.margin
        return ControlResult(name=name, expected=expected, measured=measured, ok=ok)
    # A negative control counts every attack; a positive control needs a single attack that works.
    lower = [
        _lower_end([metric.leak_sign * (f - g) for f, g in pairs], looks=len(gains), margin=floor.margin)
        for _, pairs in gains
    ]
    return ControlResult(name=name, expected=expected, measured=measured, ok=not any(end > 0 for end in lower))


def _side(metric: KnownMetric, row: Row) -> str:
    side = "above" if metric.leak_sign > 0 else "below"
    return side if row.control == "positive" else f"not {side}"


def _gains(cell: BoardCell, metric: KnownMetric, floor: Floor) -> list[tuple[float, float]]:
    """Pairs (value, floor) of every seed that has both, in the metric's unit."""
    pairs = []
    for record in cell.records.values():
        measurement, free = record.metrics.get(metric.name), record.metrics.get(floor.metric)
        if measurement is not None and free is not None and measurement.value is not None and free.value is not None:
            # Paired by record: both numbers are of the same images, whose difficulty cancels in the difference.
            pairs.append((measurement.value, free.value))
    return pairs


def _lower_end(values: list[float], *, looks: int, margin: float) -> float:
    ends = student(values, looks=looks)
    # A single seed has no spread, so its gain has to exceed the margin instead.
    return fmean(values) - margin if ends is None else ends[0]


def _violation(record: Record) -> Violation:
    attack = record.attack.name if record.attack else None
    claim = record.claim
    words = f"{record.defense.name} against {attack or 'nothing'}, seed {record.seed}"
    if claim is not None and claim.epsilon is not None:
        words += f", claims epsilon {claim.epsilon:.3g} at delta {claim.delta:g}"
    for known in METRICS.values():
        metric = record.metrics.get(known.name)
        if known.in_violations and metric is not None and metric.value is not None:
            ends = "" if metric.low is None else f" [{metric.low:.{known.digits}f}, {metric.high:.{known.digits}f}]"
            words += f", {known.name} {metric.value:.{known.digits}f}{ends}"
    sentence = f"{words} (record {record.id})"
    return Violation(defense=record.defense.name, attack=attack, seed=record.seed, record=record.id, sentence=sentence)
