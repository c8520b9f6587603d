"""Whether the board can be trusted: controls that must leak or must not, and claims that were refuted.

A board on which plain SGD does not leak says nothing about the defenses: its attacks are too weak or broken.
One on which a model that never saw the data leaks has broken attacks or splits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..records.record import Record
from .aggregate import Cell, Estimate, over_seeds, student
from .rows import Row

MARGIN = 3.0
"""dB above the mean public image, half its error, that a positive control must gain on average, and that a single seed
of a negative one may gain by chance."""


@dataclass(frozen=True, kw_only=True)
class ControlResult:
    """One expectation about a control.

    Attributes:
        name: suite, defense, its role and what was measured.
        expected: in words.
        measured: in words, with the numbers.
        ok: whether the expectation holds; a control that was not measured does not hold.
    """

    name: str
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
    """Compares every control with what it must show.

    A positive control must have a worst-case AUC whose interval lies above 0.5, and a mean PSNR above that of
    the mean public image. A negative one must have no AUC interval above 0.5, and no PSNR significantly above
    that floor (its mean difference over seeds, paired, has an interval above 0; with one seed, it exceeds 3 dB).

    Args:
        rows: of the board.
        records: all of them, for controls of which nothing succeeded and which have no row.

    Returns:
        One result for each control and kind of attack, and a failed one for each table that has none while others have:
        theirs say nothing about it. Empty when the records have no control.
    """
    records, results = list(records), []
    shown = set()
    for row in rows:
        if row.control is None:
            continue
        name = f"{row.suite}: {row.label}"
        kinds = {cell.kind for cell in row.cells} | {r.kind for r in row.unranked if r.status == "failed"}
        if "membership" in kinds:
            results.append(_membership(name, row))
        if "reconstruction" in kinds:
            results.append(_reconstruction(name, row))
        shown.add((row.suite, row.defense.name, row.control))
    for record in records:
        control = (record.suite, record.defense.name, record.control)
        if record.control is not None and control not in shown:
            shown.add(control)
            name = f"{record.suite}: {record.defense.name} ({record.control} control)"
            measured = f"nothing: every cell was skipped or failed, as {record.reason or record.status!r}"
            results.append(ControlResult(name=name, expected="a measurement", measured=measured, ok=False))
    if results:
        results += [
            ControlResult(name=" · ".join(filter(None, section)), expected="controls", measured="nothing", ok=False)
            for section in _uncontrolled(rows, records)
        ]
    return tuple(results)


def _uncontrolled(rows: Sequence[Row], records: list[Record]) -> list[tuple[str, str, str]]:
    """Tables with contestants and without a control of any status."""
    controls = [record for record in records if record.control is not None]
    there = {(r.suite, str(r.task.get("data", "")), str(r.task.get("model", ""))) for r in controls}
    suites = {record.suite for record in controls}
    # A row of images alone stands under the data of its images, where no other row of its suite is.
    alone = {row.section for row in rows if "step" in row.task and row.suite in suites}
    contestants = dict.fromkeys(row.section for row in rows if row.control is None)
    return [section for section in contestants if section not in there | alone]


def find_violations(records: Iterable[Record]) -> tuple[Violation, ...]:
    """Lists the records that carry the flag `claim_violated`.

    Args:
        records: all of the board.

    Returns:
        In the order of the records.
    """
    return tuple(_violation(record) for record in records if "claim_violated" in record.flags)


def _membership(name: str, row: Row) -> ControlResult:
    auc = row.auc
    expected = "AUC above 0.5" if row.control == "positive" else "AUC not above 0.5"
    attacks = [over_seeds("auc", cell, looks=auc.looks) for cell in row.cells if cell.kind == "membership"]
    lows = [attack.low for attack in attacks if attack.value is not None]
    if auc.value is None:
        measured, ok = f"nothing: {auc.reason}", False
    elif row.control == "positive":
        measured, ok = _measured(auc), any(low is not None and low > 0.5 for low in lows)
    else:
        measured, ok = _measured(auc), all(low is not None and low <= 0.5 for low in lows)
    return ControlResult(name=f"{name}, membership", expected=expected, measured=measured, ok=ok)


def _measured(auc: Estimate) -> str:
    ends = "without an interval" if auc.low is None else f"[{auc.low:.3f}, {auc.high:.3f}]"
    return f"AUC {auc.value:.3f} {ends} by {auc.attack}"


def _reconstruction(name: str, row: Row) -> ControlResult:
    cells = [cell for cell in row.cells if cell.kind == "reconstruction"]
    gains = [(cell, _gains(cell)) for cell in cells]
    gains = [(cell, pairs) for cell, pairs in gains if pairs]
    word = "above" if row.control == "positive" else "not above"
    expected = f"PSNR {word} the mean public image's"
    name = f"{name}, reconstruction"
    if not gains:
        why = row.psnr_free.reason or row.floor.reason or "no psnr with its psnr_floor"
        return ControlResult(name=name, expected=expected, measured=f"nothing: {why}", ok=False)
    best, pairs = max(gains, key=lambda gain: fmean(psnr - floor for psnr, floor in gain[1]))
    psnr, floor = fmean(p for p, _ in pairs), fmean(f for _, f in pairs)
    measured = f"PSNR {psnr:.1f} dB against {floor:.1f} dB by {best.attack}"
    if row.control == "positive":
        return ControlResult(name=name, expected=expected, measured=measured, ok=psnr > floor + MARGIN)
    leaks = any(_lower_end([p - f for p, f in pairs], looks=len(gains)) > 0 for _, pairs in gains)
    return ControlResult(name=name, expected=expected, measured=measured, ok=not leaks)


def _gains(cell: Cell) -> list[tuple[float, float]]:
    """(psnr, floor) of every seed that has both, dB."""
    pairs = []
    for record in cell.records.values():
        psnr, floor = record.metrics.get("psnr"), record.metrics.get("psnr_floor")
        if psnr is not None and floor is not None and psnr.value is not None and floor.value is not None:
            pairs.append((psnr.value, floor.value))
    return pairs


def _lower_end(values: list[float], *, looks: int) -> float:
    ends = student(values, looks=looks)
    # One seed has no spread to go by: it then takes a margin that chance does not give.
    return fmean(values) - MARGIN if ends is None else ends[0]


def _violation(record: Record) -> Violation:
    attack = record.attack.name if record.attack else None
    claim = record.claim
    words = f"{record.defense.name} against {attack or 'nothing'}, seed {record.seed}"
    if claim is not None and claim.epsilon is not None:
        words += f", claims epsilon {claim.epsilon:.3g} at delta {claim.delta:g}"
    for name in ("auc", "tpr_at_1pct_fpr"):
        metric = record.metrics.get(name)
        if metric is not None and metric.value is not None:
            ends = "" if metric.low is None else f" [{metric.low:.3f}, {metric.high:.3f}]"
            words += f", {name} {metric.value:.3f}{ends}"
    sentence = f"{words} (record {record.id})"
    return Violation(defense=record.defense.name, attack=attack, seed=record.seed, record=record.id, sentence=sentence)
