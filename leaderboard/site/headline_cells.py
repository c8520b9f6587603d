"""Columns and cells of the headline board."""

import math
from collections.abc import Callable, Iterable

from ..board.aggregate import Estimate
from ..board.content import (
    Footnotes,
    at_least,
    claim_remark,
    looks_words,
    rank_words,
    seeds_words,
    strongest_words,
    uneven_words,
)
from ..board.proved_bound import ProvedBound, bound_words
from ..board.rows import DEGRADED, Row
from ..board.threat_models import NOT_ATTACKED
from ..metrics import METRICS
from ..page.figures import epsilon_words
from ..page.tables import Column, Value, value
from .headline import HeadlineEntry

COLUMNS = (
    Column(key="defense", title="Defense", number=False),
    Column(key="rank", title="Rank", hint="Among the complete contestants of the same ε, δ and unit, by worst AUC."),
    Column(key="accuracy", title="Accuracy", hint="On held-out data; higher is more useful.", best="descending"),
    Column(key="epsilon", title="Claimed ε", hint="What the accountant proves; lower is more private."),
    Column(key="proved", title="Proved ε", unit="at least", hint="Lower bound that the attacks prove together."),
    Column(key="auc", title="Worst AUC", hint="Of the strongest membership attack; 0.5 is chance, 1 tells all."),
    Column(key="tpr", title="Worst TPR", unit="at 1 % FPR", hint="Members found at one false alarm in a hundred."),
    Column(key="psnr", title="Worst PSNR", unit="dB, as released", hint="Of images found in one released update."),
    Column(key="picked", title="Picked right", unit="as released", hint="Share of images picked out of candidates."),
    Column(key="attack", title="Strongest attack", number=False),
    Column(key="coverage", title="Measured", unit="of cells", hint="Cells, and attacks.", best="descending"),
    Column(key="seeds", title="Seeds", hint="How many runs a mean is over.", best="descending"),
    Column(key="tier", title="Checked", number=False),
)
"""Columns in order."""

UNDER_THREAT = ("rank", "proved", "auc", "tpr", "psnr", "picked", "attack", "coverage")
"""Columns whose cells depend on the threat model."""

_TIERS = ("verified", "self-reported", "unverified parts")


def measured_columns(entries: Iterable[HeadlineEntry]) -> list[Column]:
    """Returns the columns that have a value in some row.

    Args:
        entries: of all sections.
    """
    entries = list(entries)
    return [c for c in COLUMNS if any(_CELLS[c.key](entry, Footnotes()).order is not None for entry in entries)]


def cells_of(entry: HeadlineEntry, columns: Iterable[Column], notes: Footnotes) -> dict[str, Value]:
    """Returns the cells of a row; a missing measurement is n/a, with its reason, and sorted last.

    Args:
        entry: row of the headline board.
        columns: of `COLUMNS`.
        notes: collects the reasons.
    """
    return {column.key: _CELLS[column.key](entry, notes) for column in columns}


def _noted(text: str, order: float | str | None, reason: str, notes: Footnotes, ends: str = "") -> Value:
    return Value(text=text, order=order, reason=reason, note=notes.number(reason), ends=ends)


def _number(row: Row, estimate: Estimate, notes: Footnotes) -> Value:
    lower_end = METRICS[estimate.metric].of_attack and at_least(row, estimate)
    return value(estimate, notes, lower_end=lower_end)


def _defense(entry: HeadlineEntry, notes: Footnotes) -> Value:
    row = entry.row
    return Value(text=row.defense.name, order=f"{row.defense.name} {row.details}".lower())


def _estimate(key: str) -> Callable[[HeadlineEntry, Footnotes], Value]:
    return lambda entry, notes: _number(entry.row, entry.row.estimates[key], notes)


def _picked(entry: HeadlineEntry, notes: Footnotes) -> Value:
    return _number(entry.row, entry.picked, notes)


def _rank(entry: HeadlineEntry, notes: Footnotes) -> Value:
    row = entry.row
    rank, *among = rank_words(row, budgets=True)
    return _noted(rank, row.rank, row.unplaced, notes, " ".join(among))


def _epsilon(entry: HeadlineEntry, notes: Footnotes) -> Value:
    row, claim = entry.row, entry.row.claim
    if claim is None:
        return _noted("n/a", None, "no claim in these records", notes)
    if claim.epsilon is None:
        return _noted("∞", math.inf, claim.reason or "", notes, "nothing proved")
    ends = f"δ {claim.delta:g}".replace("e-0", "e-")
    return _noted(epsilon_words(row), claim.epsilon, claim_remark(claim), notes, ends)


def _proved(entry: HeadlineEntry, notes: Footnotes) -> Value:
    first, *further = entry.proved
    if first.value is None:
        return _noted("n/a", None, first.reason, notes)
    also = [f"{_relation(bound)}: at least {bound_words(bound.value)}" for bound in further if bound.value is not None]
    at_delta = [] if first.delta is None else [f"at δ {first.delta:g}"]
    return Value(
        text=bound_words(first.value),
        ends=_relation(first),
        bound=_claim_beside(first, entry.row),
        reason="; ".join([first.reason, *at_delta, *also]),
        order=first.value,
    )


def _claim_beside(bound: ProvedBound, row: Row) -> str:
    if bound.claimed is not None:
        return f"claim {bound.claimed:.2f}"
    if row.claim is None:
        return "no claim"
    # A finite claim may be of another relation, delta or unit, against which the bound says nothing.
    return "claim ∞" if row.claim.epsilon is None else "no claim for it"


def _relation(bound: ProvedBound) -> str:
    return bound.relation.replace("_", "/") or "relation not stated"


def _psnr(entry: HeadlineEntry, notes: Footnotes) -> Value:
    cell = _number(entry.row, entry.reconstruction, notes)
    if entry.reconstruction.value is None or entry.floor.value is None:
        return cell
    floor = METRICS["psnr_floor"].number(entry.floor.value)
    degraded = _is_degraded(entry.row, entry.reconstruction)
    return Value(
        text=cell.text,
        ends=cell.ends,
        bound=f"mean image {floor}" + (", attack degraded" if degraded else ""),
        note=cell.note,
        reason=cell.reason,
        order=cell.order,
    )


def _is_degraded(row: Row, estimate: Estimate) -> bool:
    """Returns whether the strongest attack on images saw itself that it found no match, so that little is no merit."""
    noiseless = estimate is row.estimates["psnr_free"]
    return any(
        DEGRADED in record.flags
        for cell in row.cells
        if (cell.attack, cell.noise == "none") == (estimate.attack, noiseless)
        for record in cell.records.values()
    )


def _attack(entry: HeadlineEntry, notes: Footnotes) -> Value:
    row = entry.row
    strongest, remark = strongest_words(row)
    if not strongest:
        reasons = dict.fromkeys(estimate.reason for estimate in (row.estimates["auc"], row.estimates["psnr_noisy"]))
        only_here = reasons if NOT_ATTACKED in reasons else {}
        return Value(text="n/a" if only_here else "-", reason=NOT_ATTACKED if only_here else "")
    return _noted(strongest, strongest.lower(), remark, notes, " ".join(looks_words(row)))


def _coverage(entry: HeadlineEntry, notes: Footnotes) -> Value:
    coverage = entry.coverage
    share = coverage.cells / coverage.requested if coverage.requested else None
    ends = f"{coverage.attacks} of {coverage.run} attacks" if coverage.run else ""
    return Value(text=f"{coverage.cells} of {coverage.requested}", ends=ends, order=share)


def _seeds(entry: HeadlineEntry, notes: Footnotes) -> Value:
    seeds = seeds_words(entry.row) if entry.row.cells else "0"
    return _noted(seeds, float(seeds.partition("-")[0]), uneven_words(entry.row), notes)


def _tier(entry: HeadlineEntry, notes: Footnotes) -> Value:
    tier = entry.site_row.tier
    return Value(text=tier.tier, reason=tier.reason, order=str(_TIERS.index(tier.tier)))


_CELLS: dict[str, Callable[[HeadlineEntry, Footnotes], Value]] = {
    "defense": _defense,
    "rank": _rank,
    "accuracy": _estimate("accuracy"),
    "epsilon": _epsilon,
    "proved": _proved,
    "auc": _estimate("auc"),
    "tpr": _estimate("tpr"),
    "psnr": _psnr,
    "picked": _picked,
    "attack": _attack,
    "coverage": _coverage,
    "seeds": _seeds,
    "tier": _tier,
}
"""Column -> its cell; reasons for missing numbers become footnotes."""
