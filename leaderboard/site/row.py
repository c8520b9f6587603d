"""Page of a row: every number of a defense at a budget and task, the claim, each cell, and their provenance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..board.aggregate import Estimate
from ..board.content import Footnotes, at_least, largest_words, seeds_words, shown_columns
from ..board.identity import board_version
from ..board.notes import needs_words
from ..board.proved_bound import ProvedBound, bound_words, proved_bounds
from ..board.rows import DEGRADED, Row, guarantee_words
from ..kinds import KINDS
from ..metrics import METRICS
from ..page import papers, remarks
from ..page.build import render_page
from ..page.figures import epsilon_words
from ..page.tables import Value, flags_of, value
from ..records.details import LARGEST_UNDER_CLAIM
from ..records.labels import word
from . import links
from .site import Site, SiteRow

JSON = "row.json"
"""Name of the file beside the page with its numbers."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """Number of the board on the page of its row.

    Attributes:
        title: of its column.
        value: with its interval and the most that the claim allows.
        better: direction that is good for the defender.
        n: number of seeds behind it.
        attack: label of the attack that reached it; empty for none.
        page: path of the attack's page; empty for none.
        chosen: how many attacks were compared, in words; empty without a choice.
    """

    title: str
    value: Value
    better: str
    n: int
    attack: str
    page: str
    chosen: str


@dataclass(frozen=True, kw_only=True)
class CellLine:
    """Cell of a row: an attack, or a measurement without any, over seeds.

    Attributes:
        title: of the attack, or of the kind of result.
        kind: of result, in words.
        page: path of the attack's page; empty without an attack.
        settings: (name, value) of the attack's settings.
        needs: threat model in words; empty without an attack.
        metrics: (name, number with its interval, the most that the claim allows, reason) of each metric.
        flags: of its records.
        seeds: seeds that were measured.
        records: ids, in the order of the seeds.
    """

    title: str
    kind: str
    page: str
    settings: Sequence[tuple[str, str]]
    needs: str
    metrics: Sequence[tuple[str, str, str, str]]
    flags: Sequence[str]
    seeds: str
    records: Sequence[str]


def row_page(
    site: Site,
    row: SiteRow,
    tree: Mapping[str, Any],
    cite: str = "",
) -> str:
    """Renders the page of a row.

    Args:
        site: the row's.
        row: to show.
        tree: of the row in `Board.to_dict`.
        cite: how to cite it, as BibTeX; empty to leave that out.
    """
    board_row, notes = row.row, Footnotes()
    page = links.row_page(row.id)
    task = {key: item for key, item in board_row.task.items() if key not in ("data", "model")}
    return render_page(
        "row.html",
        {
            "root": links.root_of(page),
            "row": row,
            "board_row": board_row,
            "details": board_row.details,
            "title": board_row.label,
            "facts": _facts(board_row),
            "suite_page": links.suite_page(board_row.suite),
            "suite_about": site.guide.suites.get(board_row.suite, ""),
            "defense_page": links.defense_page(board_row.defense.name),
            "submission_page": row.submission and links.submission_page(row.submission.handle, row.submission.digest),
            "rank": rank_sentence(board_row),
            "numbers": _numbers(board_row, notes),
            "notes": notes,
            "claim": _claim(board_row) + [("proved lower bound", _bound(bound)) for bound in proved_bounds(board_row)],
            "defense": pairs(board_row.defense.settings),
            "budget": pairs(board_row.budget),
            "task": pairs(task),
            "cells": [_cell(*cells) for cells in zip(board_row.cells, tree["attacks"], strict=True)],
            "flags": flags_of(board_row),
            "unmeasured": remarks.unmeasured(board_row.unranked),
            "missing": list(dict.fromkeys(f"{cell.words}, seed {cell.seed}" for cell in board_row.missing)),
            "comparisons": papers.table([board_row], site.explanations),
            "provenance": remarks.provenance([*board_row.records, *board_row.unranked]),
            "version": board_version(),
            "publication": site.publication,
            "json": JSON,
            "cite": cite,
        },
    )


def rank_sentence(row: Row) -> str:
    """Place of a row in its table, or the reason why it has none."""
    if row.control is not None:
        return f"It is a {row.control.replace('_', ' ')} control, which is not ranked."
    if not row.rank:
        return f"It has no rank: {row.unplaced}."
    among = "row" if row.ranked_of == 1 else "rows"
    return f"Rank {row.rank} of {row.ranked_of} {among} of its table with {guarantee_words(row.guarantee)}."


def pairs(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns settings as (name, value) in words.

    Args:
        settings: of a method, a budget or a task.
    """
    return [(key, "none" if item is None else word(_plain(item))) for key, item in settings.items()]


def _plain(item: Any) -> Any:
    """Value as JSON writes it: tables and lists of a task have types of their own."""
    if isinstance(item, Mapping):
        return {key: _plain(inner) for key, inner in item.items()}
    return [_plain(inner) for inner in item] if isinstance(item, list | tuple) else item


def _facts(row: Row) -> list[tuple[str, str, str]]:
    facts = [(epsilon_words(row), "claimed ε", "bad" if "claim_violated" in row.flags else "")]
    for metric, column in shown_columns([row]):
        estimate = row.estimates[column.key]
        if estimate.value is not None and not column.optional:
            digits = metric.number(estimate.value, metric.digits).removeprefix("≥")
            saturated = metric.number(estimate.value, metric.digits) != digits
            sign = "≥" if saturated or (metric.of_attack and at_least(row, estimate)) else ""
            title = " ".join(filter(None, (column.title or " ".join(column.header), column.unit)))
            facts.append((f"{sign}{digits}", title, ""))
    # Four numbers besides epsilon and seeds fill a line.
    return [*facts[:5], (seeds_words(row), "seeds", "")]


def _numbers(row: Row, notes: Footnotes) -> list[Number]:
    pages = {cell.attack: _attack_page(cell.records) for cell in row.cells}
    numbers = []
    for metric, column in shown_columns([row]):
        estimate = row.estimates[column.key]
        cell = value(estimate, notes, lower_end=metric.of_attack and at_least(row, estimate))
        chosen = f"of {estimate.looks}" if estimate.looks > 1 else ""
        if estimate.chosen_on == "calibration half":
            chosen += ", chosen on the other half of the candidates"
        title = " ".join(filter(None, (column.title or " ".join(column.header), column.unit)))
        numbers.append(
            Number(
                title=title, value=cell, better=metric.better, n=estimate.n, attack=estimate.attack or "",
                page=pages.get(estimate.attack, ""), chosen=chosen,
            )
        )  # fmt: skip
    return numbers


def _attack_page(records: Mapping[int, Any]) -> str:
    """Path of the page of the attack of some records; empty without an attack."""
    attack = next(iter(records.values())).attack
    return "" if attack is None else links.attack_page(attack.name)


def _claim(row: Row) -> list[tuple[str, str]]:
    """Claim as (term, words)."""
    claim = row.claim
    if claim is None:
        return [("epsilon", "n/a: no claim in these records")]
    epsilon = f"∞: {claim.reason}" if claim.epsilon is None else f"{claim.epsilon:.4g}"
    terms: list[tuple[str, str]] = [
        ("epsilon", epsilon),
        ("delta", f"{claim.delta:g}"),
        ("relation", claim.relation.replace("_", " ")),
        ("privacy unit", claim.unit),
        ("sampling", claim.sampling + ("" if claim.sample_rate is None else f", rate {claim.sample_rate:.4g}")),
        ("accountant", claim.accountant),
        ("by Rényi accounting", "" if claim.epsilon_rdp is None else f"{claim.epsilon_rdp:.4g}"),
        ("as if sampling were Poisson", "" if claim.as_if_poisson is None else f"{claim.as_if_poisson:.4g}"),
        ("noise multiplier", "" if row.noise_multiplier is None else f"{row.noise_multiplier:.4g}"),
        ("remark", claim.reason or "" if claim.epsilon is not None else ""),
    ]
    terms += [("event", event) for event in claim.events]
    terms += [("assumes", sentence) for sentence in claim.assumes]
    terms += [("unverified", sentence) for sentence in claim.unverified]
    return [(term, words) for term, words in terms if words]


def _bound(bound: ProvedBound) -> str:
    """Proved bound in words, with the claim for its relation, its attack, seeds and confidence."""
    if bound.value is None:
        return f"n/a: {bound.reason}"
    relation = bound.relation.replace("_", " ") or "a relation not stated"
    delta = "" if bound.delta is None else f" at delta {bound.delta:g}"
    claimed = "no finite claim" if bound.claimed is None else f"claim {bound.claimed:.4g}"
    seeds = f"{len(bound.seeds)} seed{'' if len(bound.seeds) == 1 else 's'}"
    number = f"{bound_words(bound.value)} for {relation}{delta} ({claimed})"
    return f"{number}, by {bound.attack}, {seeds}; {bound.reason}"


def _cell(cell: Any, tree: Mapping[str, Any]) -> CellLine:
    records = list(cell.records.values())
    first, kind = records[0], KINDS[cell.kind]
    flags = dict.fromkeys(flag for record in records for flag in record.flags)
    needs = needs_words(records)
    return CellLine(
        title=(cell.attack or cell.kind.replace("_", " ")) + kind.noise_words(cell.noise),
        kind=cell.kind.replace("_", " "),
        page=_attack_page(cell.records),
        settings=pairs(first.attack.settings) if first.attack else (),
        needs=next(iter(needs.values()), "").replace("_", " "),
        metrics=[_metric(name, numbers) for name, numbers in tree["metrics"].items()],
        flags=sorted(flags, key=lambda flag: flag != DEGRADED),
        seeds=", ".join(map(str, cell.records)),
        records=[record.id for record in records],
    )


def _metric(name: str, numbers: Mapping[str, Any]) -> tuple[str, str, str, str]:
    metric = METRICS.get(name)
    fields = {key: item for key, item in numbers.items() if key not in ("n", "gap", LARGEST_UNDER_CLAIM)}
    estimate = Estimate(**fields, largest=numbers[LARGEST_UNDER_CLAIM])
    digits = 3 if metric is None else metric.digits
    title = name.replace("_", " ") if metric is None else metric.label
    return title, estimate.words(digits), largest_words(estimate, digits), estimate.reason or ""
