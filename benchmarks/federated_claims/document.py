"""Verdicts and measurements as plain data, JSON and Markdown, with reported figures and `public_only` beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from .cells import MethodCells, SuiteResults
from .claims import CLAIMS, ClaimResult
from .comparisons import SPECIFIED_SEEDS, PairedDifference, holm


def document(results: Sequence[ClaimResult], settings: Sequence[SuiteResults]) -> dict[str, Any]:
    """Returns verdicts and cells as plain data.

    Args:
        results: of all claims.
        settings: of the records.
    """
    return {
        "benchmark": "federated_claims",
        "claims": [
            {
                "claim": result.claim,
                "sentence": CLAIMS[result.claim],
                "setting": result.setting,
                "verdict": result.verdict,
                "partial": result.partial,
                "comparisons": _compared(result.comparisons),
                "remarks": [*result.remarks],
                "facts": [*result.facts],
            }
            for result in results
        ],
        "settings": [
            {
                "suite": setting.suite,
                "task": setting.task,
                "public_only": setting.public_only,
                "missing": setting.missing,
                "cells": [
                    {
                        "method": name,
                        "noise_multiplier": noise,
                        "values": cells.values,
                        "settings": cells.settings,
                        "tuned": cells.tuned,
                        "reported": cells.reported,
                    }
                    for (noise, name), cells in sorted(setting.methods.items())
                ],
            }
            for setting in settings
        ],
    }


def _compared(comparisons: Sequence[PairedDifference]) -> list[dict[str, Any]]:
    adjusted = holm([comparison.p for comparison in comparisons])
    return [
        {
            "name": comparison.name,
            "differences": dict(comparison.differences),
            "mean": comparison.mean,
            "interval": [end if math.isfinite(end) else None for end in comparison.interval],
            "p": comparison.p,
            "p_holm": p,
        }
        for comparison, p in zip(comparisons, adjusted, strict=True)
    ]


def markdown(results: Sequence[ClaimResult], settings: Sequence[SuiteResults]) -> str:
    """Formats verdicts, their comparisons, and the cells behind them as Markdown.

    Args:
        results: of all claims.
        settings: of the records.
    """
    return "\n".join([*_verdicts(results), *_details(results), *chain(*map(_cells, settings))]).rstrip() + "\n"


def _verdicts(results: Sequence[ClaimResult]) -> list[str]:
    lines = ["| | claim | setting | verdict | seeds | differences |", "|---|---|---|---|--:|---|"]
    for result in sorted(results, key=lambda result: [*CLAIMS].index(result.claim)):
        words = _summary(result.comparisons) or "; ".join(result.facts or result.remarks[-1:])
        sentence = CLAIMS[result.claim]
        lines.append(
            f"| {result.claim} | {sentence} | {result.setting} | {_verdict(result)} | {_seeds(result)} | {words} |"
        )
    return [*lines, ""]


def _verdict(result: ClaimResult) -> str:
    return f"{result.verdict} (of what was measured)" if result.partial else result.verdict


def _seeds(result: ClaimResult) -> str:
    if not result.comparisons:
        return "-"
    fewest = min(comparison.n for comparison in result.comparisons)
    return f"{fewest}{'' if fewest >= SPECIFIED_SEEDS else '*'}"


def _summary(comparisons: Sequence[PairedDifference]) -> str:
    """Returns the number of differences on each side of 0 and the least favourable difference."""
    if not comparisons:
        return ""
    worst = min(comparisons, key=lambda comparison: comparison.mean)
    if len(comparisons) == 1:
        return f"{worst.name}: {_difference(worst)}"
    adjusted = holm([comparison.p for comparison in comparisons])
    sure = [c for c, p in zip(comparisons, adjusted, strict=True) if p <= 0.05]
    right, wrong = sum(c.mean > 0 for c in sure), sum(c.mean < 0 for c in sure)
    return (
        f"of {len(comparisons)}, {right} exclude 0 the claim's way, {wrong} the other; "
        f"least: {worst.name}: {_difference(worst)}"
    )


def _difference(comparison: PairedDifference) -> str:
    low, high = comparison.interval
    return f"{comparison.mean:.3f} [{low:.3f}, {high:.3f}]"


def _details(results: Sequence[ClaimResult]) -> list[str]:
    lines = ["| | setting | difference | seeds | mean [95 %] | p, Holm |", "|---|---|---|--:|--:|--:|"]
    for result in results:
        adjusted = holm([comparison.p for comparison in result.comparisons])
        lines += [
            f"| {result.claim} | {result.setting} | {comparison.name} | {comparison.n} | {_difference(comparison)} | "
            f"{_probability(p)} |"
            for comparison, p in zip(result.comparisons, adjusted, strict=True)
        ]
    remarks = dict.fromkeys(
        f"- {result.claim}, {result.setting}: {words}."
        for result in results
        for words in (*result.remarks, *(result.facts if result.comparisons else ()))
    )
    fewer = any(0 < c.n < SPECIFIED_SEEDS for result in results for c in result.comparisons)
    star = [f"- \\* fewer than the {SPECIFIED_SEEDS} seeds of the specification."] if fewer else []
    return [*lines, "", *star, *remarks, ""]


def _probability(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _cells(setting: SuiteResults) -> list[str]:
    lines = [
        f"{setting.words}:",
        "",
        "| noise | method | accuracy [95 %] | reported | seeds | lr | clip norm | drift | bytes up | epsilon |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (noise, name), cells in sorted(setting.methods.items()):
        accuracy = cells.of("accuracy")
        figures = (
            _mean(accuracy, 3),
            "" if cells.reported is None else f"{cells.reported:.3f}",
            str(len(accuracy)),
            _chosen(cells, "lr"),
            _chosen(cells, "clip_norm"),
            _mean(cells.of("relative_drift"), 2),
            _plain(cells.of("bytes_up"), ",.0f"),
            _plain(cells.of("epsilon_worst"), ".2f") if cells.proves else "∞",
        )
        lines.append(f"| {noise:g} | {name}{'' if cells.tuned else ' (not tuned)'} | {' | '.join(figures)} |")
    if setting.public_only:
        accuracy = setting.public_only
        lines.append(f"| - | public_only | {_mean(accuracy, 3)} | | {len(accuracy)} | | | | | 0 |")
    return [*lines, "", *(f"- not measured: {reason}" for reason in setting.missing), ""]


def _mean(values: Mapping[int, float], digits: int) -> str:
    if not values:
        return "n/a"
    comparison = PairedDifference(name="", differences=values)
    if comparison.n < 2:
        return f"{comparison.mean:.{digits}f}"
    low, high = comparison.interval
    return f"{comparison.mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _plain(values: Mapping[int, float], form: str) -> str:
    return format(sum(values.values()) / len(values), form) if values else ""


def _chosen(cells: MethodCells, key: str) -> str:
    """Returns the values of a setting over seeds, each once."""
    return ", ".join(f"{value:g}" for value in sorted({own[key] for own in cells.settings.values() if key in own}))
