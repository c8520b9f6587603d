"""Tables of the page: cells with their sort key, the position of their interval on a scale, and their footnote.

A number is shown with its interval, as text and as a strip on the scale of its column. A missing measurement is n/a
with a footnote that gives the reason, and is sorted last in either direction.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from markupsafe import Markup

from ..board.aggregate import Estimate
from ..board.content import (
    Footnotes,
    at_least,
    claim_remark,
    halves,
    largest_words,
    looks_words,
    rank_words,
    seeds_words,
    shown_columns,
    strongest_words,
    uneven_words,
)
from ..board.rows import Row, guarantee_words, several_guarantees
from ..kinds import KINDS
from ..metrics import METRICS, KnownMetric, columns
from ..records.left_out import FLAG
from .figures import epsilon_words
from .plots import Style, marker

_NUMBERS = re.compile(r"\d+(\.\d+)?")

# "bad": a number may be wrong or flattering; "warn": it is right but needs care. Flags without a tone are remarks.
TONES = {
    "CLAIM VIOLATED": "bad", "incomplete": "bad", "diverged": "bad", "uneven_seeds": "warn",
    "claims_differ": "warn", "distribution_shift": "warn", "missing_cells": "bad", "uneven_attacks": "bad",
    "control_failed": "bad", "uneven_tasks": "bad", "mixed_code": "bad", "ran_beside_the_data": "warn",
}  # fmt: skip

FLAGS = {
    "claim_violated": "the executed plans spent more than the budget, the noise is less than claimed, or an attack "
    "refuted the claim",
    "participation_known": "an attack knew who took part, so sampling's amplification does not hold against it",
    "deterministic": "updates carry no noise, so membership is read off them",
    "not_most_powerful": "batches were not drawn by independent coins, noise is correlated over steps, steps were on "
    "trial, or messages are of several local steps, so the likelihood ratio is a strong test and not the most "
    "powerful one",
    "one_off_not_attacked": "a release before the first step, as that of a mask or of statistics, is part of the claim "
    "that bounds an attack and was not read by it, so a stronger test exists",
    "ran_beside_the_data": "an attack that is not leakbench's ran in the process of the private data, because what it "
    "attacks could not be sent to a process of its own: its scores are good if its code is trusted",
    "noise_matched": "nothing is proved: the noise is what a bounded method would need",
    "public_in_distribution": "the method, pretraining, or the scale of the inputs, reads public examples of the very "
    "data set that is trained on",
    "pretrained_on_public": "the model was trained on public examples first, without privacy",
    "tuned_on_public": "settings of the training were chosen on public data",
    "non_members_are_test": "membership tests, and candidates of a prior, compare training images with the official "
    "test set",
    "distribution_shift": "non-members differ from members, as a classifier finds that sees no model: scores of "
    "membership attacks may measure that",
    "diverged": "parameters are not finite",
    "control_failed": "a control of its submission failed, so that its attacks or its splits may be at fault",
    FLAG: "arrays of some of its records were left out because of their size: their numbers cannot be computed again "
    "here, and their pictures and curves are n/a",
    "incomplete": "an attack failed, or its scores are gone, so the worst case may be worse",
    "missing_cells": "cells that were asked for have no record, so the worst case may be worse",
    "uneven_attacks": "other defenses were attacked by more, so the worst case may be worse",
    "uneven_seeds": "not everything was measured with the same seeds",
    "uneven_tasks": "rows of this table were not trained on the same examples, with the same model, sampling and "
    "optimizer",
    "mixed_code": "records of its suite are of different code",
    "claims_differ": "seeds or cells claim different epsilons; the largest is shown",
}
"""Flag of a row -> its meaning, for the page."""

NUMBERED_FLAGS = {
    "unverified_": "a part of the run is none of leakbench's: that it does what the claim assumes of it is not checked",
    "rank_lowered_to_": "there were too few public examples for the rank asked for",
    "auxiliary_lowered_to_": "there were fewer public examples for a basis than asked for",
    "dependent_noise": "the noise found in the releases has a mean, repeats, or agrees from one coordinate to the "
    "next: who knows how takes it off",
    "noise_": "the noise found in the releases of the steps, or in the one beside them that is named, as a multiple "
    "of what was claimed",
}
"""Prefix -> meaning, for flags that end in a number or a name."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Range of a column, and the value of chance, or of a guess without any attack."""

    low: float
    high: float
    mark: float | None = None

    def place(self, value: float) -> float:
        """Position of a value between low and high, per cent."""
        share = (value - self.low) / (self.high - self.low)
        # Rounded, so that the page's bytes do not depend on the last digit of a division.
        return round(100 * min(max(share, 0.0), 1.0), 2)


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Positions of value, interval and chance on a column's scale, per cent."""

    value: float
    low: float | None
    high: float | None
    mark: float | None


@dataclass(frozen=True, kw_only=True)
class Value:
    """Cell of a table.

    Attributes:
        text: its content.
        ends: its interval in words; empty without one.
        note: number of its footnote; None without one.
        reason: text of that footnote.
        order: sort key; None is last in either direction.
        strip: value and interval on the scale of its column; None without a strip.
        bound: largest value that the claim allows, in words; empty without a claim.
        bound_note: number of the bound's footnote; None without one.
        bound_reason: text of that footnote.
    """

    text: str
    ends: str = ""
    bound: str = ""
    bound_note: int | None = None
    bound_reason: str = ""
    note: int | None = None
    reason: str = ""
    order: float | str | None = None
    strip: Strip | None = None


@dataclass(frozen=True, kw_only=True)
class Column:
    """Column of the board; `best` is the direction in which it is sorted first."""

    key: str
    title: str
    unit: str = ""
    hint: str = ""
    number: bool = True
    best: Literal["ascending", "descending"] = "ascending"


@dataclass(frozen=True, kw_only=True)
class Line:
    """Row of the board.

    Attributes:
        name: of the defense.
        details: settings in which it differs from other rows of the same defense.
        control: its role; empty for a contestant.
        key: its mark in the plots.
        guarantee: epsilon, delta and unit of its budget, in words.
        cells: column -> cell.
        flags: (name, tone, meaning) each; the tone is "bad", "warn" or "".
        violated: whether its claim was refuted.
        id: permanent, of the row; empty on a page that is not of a site.
        page: path of the row's page below the root of the site; empty without one.
    """

    name: str
    details: str
    control: str
    key: Markup
    guarantee: str
    cells: Mapping[str, Value]
    flags: tuple[tuple[str, str, str], ...]
    violated: bool
    id: str = ""
    page: str = ""


@dataclass(kw_only=True)
class Section:
    """Rows that can be compared: of the same suite, data set, model and privacy unit.

    Attributes:
        name: unique on the page.
        suite: of all its rows.
        data: data set of the training.
        model: model that was trained, and the privacy unit where it is a client.
        columns: those with a value in some row.
        left_out: (title, reasons) of the columns that are n/a in every row.
        contestants: sorted as on the board.
        controls: rows that must leak, or must not.
        rows: board rows that it was made from.
    """

    name: str
    suite: str
    data: str
    model: str
    columns: list[Column] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    contestants: list[Line] = field(default_factory=list)
    controls: list[Line] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def bodies(self) -> list[tuple[str, str, list[Line]]]:
        """Bodies of the table, (class, heading, lines): contestants by budget, with headings for several; controls."""
        budgets = {line.guarantee: [] for line in self.contestants}
        for line in self.contestants:
            budgets[line.guarantee].append(line)
        several = len(budgets) > 1
        bodies = [("contestants", words if several else "", lines) for words, lines in budgets.items()]
        return [*bodies, *([("controls", "Controls", self.controls)] if self.controls else [])]

    @property
    def lacks(self) -> list[str]:
        """Kinds of attack, in words, that were tried on no row of the section, failures included."""
        kinds = {record.kind for row in self.rows for record in (*row.records, *row.unranked)}
        return [kind.absent for kind in KINDS.values() if kind.absent and kind.name not in kinds]

    @property
    def title(self) -> str:
        """Suite, data set and model, for a heading."""
        return " · ".join(filter(None, (self.suite, self.data, self.model)))


def sections(
    rows: Sequence[Row],
    style: Style,
    notes: Footnotes,
    row_page: Callable[[Row], tuple[str, str]] | None = None,
) -> list[Section]:
    """Builds the tables of the board.

    Args:
        rows: in the order of the board.
        style: method -> (colour, marker).
        notes: footnotes, to which reasons are added.
        row_page: row -> (its permanent id, path of its page below the root of a site); None without a site.

    Returns:
        A section for each group of comparable rows.
    """
    tables = []
    for i, ((suite, data, model, unit), group) in enumerate(groupby(rows, key=lambda row: row.section)):
        model = " · ".join(filter(None, (model, unit)))
        section = Section(name=f"s{i + 1}", suite=suite, data=data, model=model, rows=list(group))
        section.columns, section.left_out = _columns(section.rows)
        shown, budgets = {column.key for column in section.columns}, several_guarantees(section.rows)
        scales = {column.key: _scale(metric, section.rows) for metric, column in shown_columns(section.rows)}
        for row in section.rows:
            # Controls are in a table body of their own, so that sorting never puts one above the contestants.
            into = section.controls if row.control else section.contestants
            line = _line(row, style, scales, notes, shown, budgets=budgets)
            if row_page is not None:
                identifier, page = row_page(row)
                line = replace(line, id=identifier, page=page)
            into.append(line)
        tables.append(section)
    return tables


def value(estimate: Estimate, notes: Footnotes, scale: Scale | None = None, *, lower_end: bool = False) -> Value:
    """Formats an estimate as a cell.

    Args:
        estimate: with its interval, or the reason why there is none.
        notes: collects the reason.
        scale: of its column; None for no strip.
        lower_end: whether it is a worst case without some attacks, and so "at least" the value.

    Returns:
        The cell.
    """
    reason, digits = estimate.reason or "", METRICS[estimate.metric].digits
    if estimate.value is not None and lower_end:
        reason = "; ".join(
            filter(None, ("at least: attacks of this kind failed, are missing or have no such number", reason))
        )
    note = notes.number(reason)
    if estimate.value is None:
        return Value(text="n/a", note=note, reason=reason)
    ends = "" if estimate.ends is None else f"[{estimate.ends[0]:.{digits}f}, {estimate.ends[1]:.{digits}f}]"
    strip = None
    if scale is not None:
        low, high = (None, None) if estimate.ends is None else map(scale.place, estimate.ends)
        mark = None if scale.mark is None else scale.place(scale.mark)
        strip = Strip(value=scale.place(estimate.value), low=low, high=high, mark=mark)
    written = METRICS[estimate.metric].number(estimate.value, digits)
    text = f"≥{written.removeprefix('≥')}" if lower_end else written
    bound = largest_words(estimate, digits)
    bound_reason = estimate.largest_note if bound else ""
    return Value(
        text=text, ends=ends, bound=bound, bound_note=notes.number(bound_reason), bound_reason=bound_reason, note=note,
        reason=reason, order=estimate.value, strip=strip,
    )  # fmt: skip


def _columns(rows: Sequence[Row]) -> tuple[list[Column], list[tuple[str, str]]]:
    """Returns the columns with a value in some row, and (title, reasons) of those that are n/a in every row."""
    deltas = {row.claim.delta for row in rows if row.claim and row.claim.epsilon is not None}
    unit = f"δ = {deltas.copy().pop():g}".replace("e-0", "e-") if len(deltas) == 1 else ""
    left_out = []
    listed = [Column(key="defense", title="Defense", number=False)]
    unplaced = dict.fromkeys(row.unplaced for row in rows if row.control is None)
    if any(row.rank for row in rows):
        hint = "Among the contestants of this table with the same ε, δ and unit of which every cell is there."
        listed.append(Column(key="rank", title="Rank", hint=hint))
    elif unplaced:
        left_out.append(("Rank", in_short(unplaced)))
    if any(row.claim for row in rows):
        hint = "What the accountant proves; lower is more private."
        listed.append(Column(key="epsilon", title="Claimed ε", unit=unit, hint=hint))
    else:
        left_out.append(("Claimed ε", "no claim in these records"))
    # If all rows share a budget, a column of nearly equal multipliers says nothing.
    if len({row.noise_multiplier for row in rows if row.control is None} - {None, 0.0}) > 1:
        hint = "Noise standard deviation / sensitivity."
        listed.append(Column(key="noise", title="Noise", unit="multiplier", hint=hint))
    strongest = Column(key="attack", title="Strongest attack", number=False)
    first, second = (_measured(half, rows) for half in halves(rows))
    # Behind the first kind of attack, as in text, or at the end if a section has none of that kind.
    attack_first = any(column.key in first for metric, column in columns(written=True) if metric.of_attack)
    listed += [*first.values(), *([strongest] if attack_first else []), *second.values()]
    if not attack_first and any(strongest_words(row)[0] for row in rows):
        listed.append(strongest)
    for metric, column in shown_columns(rows):
        tried = not metric.of_attack or any(
            r.kind == metric.kind for row in rows for r in (*row.records, *row.unranked)
        )
        if column.key not in (*first, *second) and tried:
            reasons = dict.fromkeys(row.estimates[column.key].reason or "" for row in rows)
            title = " ".join(filter(None, (column.title or " ".join(column.header), column.unit)))
            left_out.append((title, in_short(reasons)))
    return [
        *listed,
        Column(key="seeds", title="Seeds", hint="How many runs a mean is over.", best="descending"),
    ], left_out


def in_short(reasons: Iterable[str | None]) -> str:
    """Returns reasons in a phrase; of those that differ in numbers alone, the first and the number of the others."""
    alike: dict[str, list[str]] = {}
    for reason in filter(None, reasons):
        alike.setdefault(_NUMBERS.sub("#", reason), []).append(reason)
    more = [f", and {len(group) - 1} more with other numbers" if len(group) > 1 else "" for group in alike.values()]
    return "; ".join(group[0] + words for group, words in zip(alike.values(), more, strict=True))


def _measured(half: Sequence[str], rows: Sequence[Row]) -> dict[str, Column]:
    """Returns the metrics' columns among these keys that have a value in some row."""
    columns = {}
    for metric, column in shown_columns(rows):
        if column.key in half and any(row.estimates[column.key].value is not None for row in rows):
            title = column.title or " ".join(column.header)
            best = "descending" if metric.better == "higher" else "ascending"
            columns[column.key] = Column(key=column.key, title=title, unit=column.unit, hint=column.hint, best=best)
    return columns


def _scale(metric: KnownMetric, rows: Sequence[Row]) -> Scale:
    """Scale of a metric, shared by all of its columns, that holds every value, interval and floor."""
    estimates = [row.estimates[column.key] for row in rows for column in metric.columns]
    values = [v for e in estimates for v in (e.value, *(e.ends or ())) if v is not None]
    mark = metric.chance
    if metric.floor is not None:
        known = [row.estimates[column.key].value for row in rows for column in METRICS[metric.floor.metric].columns]
        floors = [floor for floor in known if floor is not None]
        # Floors differ between rows, and a scale has a single mark: their mean.
        mark = sum(floors) / len(floors) if floors else None
        values += floors
    return Scale(low=min([metric.scale[0], *values]), high=max([metric.scale[1], *values]), mark=mark)


def _line(
    row: Row, style: Style, scales: Mapping[str, Scale], notes: Footnotes, shown: set[str], *, budgets: bool
) -> Line:
    strongest, reason = strongest_words(row)
    counts = sorted({len(cell.records) for cell in row.cells})
    # Shown columns only: others would add footnotes that no cell refers to.
    numbers = {key: estimate for key, estimate in row.estimates.items() if key in shown}
    cells = {
        key: value(estimate, notes, scales[key], lower_end=at_least(row, estimate)) for key, estimate in numbers.items()
    }
    noise = row.noise_multiplier
    why = "its noise multiplier is not recorded, or not one number" if noise is None and "noise" in shown else ""
    cells |= {
        "defense": Value(text=row.defense.name, order=f"{row.defense.name} {row.details}".lower()),
        "rank": Value(
            text=rank_words(row, budgets=budgets)[0],
            ends=" ".join(rank_words(row, budgets=budgets)[1:]),
            order=row.rank,
            reason=row.unplaced,
            note=notes.number(row.unplaced) if "rank" in shown else None,
        ),
        "epsilon": _epsilon(row, notes if "epsilon" in shown else Footnotes()),
        "noise": Value(
            text="n/a" if noise is None else f"{noise:.3g}", order=noise, reason=why, note=notes.number(why)
        ),
        "attack": Value(
            text=strongest or "-",
            ends=" ".join(looks_words(row)) if strongest else "",
            order=strongest.lower() or None,
            reason=reason,
            note=notes.number(reason) if "attack" in shown else None,
        ),
        # Last of the cells: it rebinds `why`, which `noise` above has read.
        "seeds": Value(
            text=seeds_words(row), order=float(counts[0]), reason=(why := uneven_words(row)), note=notes.number(why)
        ),
    }
    return Line(
        name=row.defense.name,
        details=row.details,
        control=row.control or "",
        key=marker(*style[row.method], hollow=row.claim is None or row.claim.epsilon is None),
        guarantee=guarantee_words(row.guarantee),
        cells=cells,
        flags=flags_of(row),
        violated="claim_violated" in row.flags,
    )


def flags_of(row: Row) -> tuple[tuple[str, str, str], ...]:
    """Returns the flags of a row as (name, tone, meaning).

    Args:
        row: of the board.
    """
    names = ("CLAIM VIOLATED" if flag == "claim_violated" else flag for flag in row.flags)
    return tuple((name, TONES.get(name, ""), flag_meaning(name)) for name in names)


def flag_meaning(flag: str) -> str:
    """Returns the meaning of a flag, as a record or as a board writes it; empty if it is not known."""
    # Inverts the display form of `claim_violated`.
    key = flag.lower().replace(" ", "_")
    return FLAGS.get(key) or next((words for start, words in NUMBERED_FLAGS.items() if key.startswith(start)), "")


def _epsilon(row: Row, notes: Footnotes) -> Value:
    claim = row.claim
    if claim is None:
        reason = "no claim in these records"
        return Value(text="n/a", reason=reason, note=notes.number(reason))
    if claim.epsilon is None:
        reason = claim.reason or ""
        return Value(text="∞", order=math.inf, reason=reason, note=notes.number(reason))
    reason = claim_remark(claim)
    return Value(text=epsilon_words(row), order=claim.epsilon, reason=reason, note=notes.number(reason))
