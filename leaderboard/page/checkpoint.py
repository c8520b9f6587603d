"""Report on a model that was trained elsewhere: an HTML page and a Markdown summary, from the audit's files alone.

`audit.json` holds all results and the digests of two Parquet files beside it: scores of all candidates, and images.
Only the ROC curves are computed here, from the scores; every other number is that of `audit.json`.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from ..metrics import METRICS
from ..records.arrays import read_table
from ..records.audit_findings import AuditVerdict, EpsilonBound, NoBound, Strongest
from ..records.audit_report import AuditReport, MembershipResult
from ..records.files import digest_of_bytes, read_bytes, write_bytes
from ..records.record import Metric, RecordError
from ..records.report import LayerRank
from .build import render_page
from .figures import Figure
from .images import png, unit_images
from .plots import PlotLine, marker, styles
from .roc import rates, roc_plot

PAGE, SUMMARY = "index.html", "SUMMARY.md"
SCORES, PICTURES = AuditReport.SCORES, AuditReport.PICTURES

SHOWN = ("auc", "tpr_at_1pct_fpr", "tpr_at_0.1pct_fpr", "advantage")
"""Metrics in the table of attacks."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Image with its title and caption."""

    uri: str
    title: str
    words: str


def build_report(folder: str | os.PathLike[str]) -> Path:
    """Writes the page and the summary of an audit into its folder.

    Args:
        folder: with the audit's files.

    Returns:
        The path of the page.

    Raises:
        RecordError: a file is missing, altered since the audit wrote it, or of another version.
    """
    folder = Path(folder)
    report = AuditReport.read(folder)
    page, words = render(report, folder), summary(report)
    write_bytes(folder / SUMMARY, words.encode())
    # Written last, so that an existing page has its summary beside it.
    return write_bytes(folder / PAGE, page.encode())


def summary(report: AuditReport) -> str:
    """Formats a summary in Markdown, for a comment on a pull request."""
    ran = [attack for attack in report.attacks if attack.metrics]
    heads = [METRICS[name].label for name in SHOWN[:3]]
    lines = [
        f"## leakbench audit: {report.verdict.headline}",
        "",
        in_markdown(report.verdict.sentence),
        "",
        f"{report.groups.members} members, {report.groups.non_members} non-members; accuracy "
        f"{_number(report.accuracy.members)} and {_number(report.accuracy.non_members)}.",
        "",
        "| attack | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
        *(
            f"| {in_markdown(attack.name)} | "
            + " | ".join(_number(attack.metrics.get(name)) for name in SHOWN[:3])
            + " |"
            for attack in ran
        ),
        "",
        f"**epsilon**: {in_markdown(epsilon_words(report.epsilon))}",
        *(f"- {'broken' if rule.broken else 'kept'}: {in_markdown(rule.broken or rule.text)}" for rule in report.rules),
        "",
        f"Not tested: {len(report.not_tested)}; see the report.",
    ]
    return "\n".join(lines) + "\n"


def render(report: AuditReport, folder: Path) -> str:
    """Renders the page as HTML.

    Args:
        report: of the audit.
        folder: with the files that it names.
    """
    scores = _table(folder, report, SCORES, ("member",))
    pictures = _table(folder, report, PICTURES, ("kind", "place", "values"))
    ran = [attack for attack in report.attacks if attack.metrics]
    style = styles({attack.name: attack.name for attack in ran})
    context = {
        "report": report,
        "headline": _sentence(report.verdict.headline),
        "decided": _decided(report.verdict),
        "facts": _facts(report),
        "epsilon": _sentence(epsilon_words(report.epsilon)),
        "claim": claim_words(report),
        "columns": [(METRICS[name].label, name) for name in SHOWN],
        "attacks": [
            {
                "name": attack.name,
                "key": marker(*style[attack.name]),
                "access": attack.requires.words,
                "cells": [_cell(attack.metrics.get(name)) for name in SHOWN],
                "seconds": f"{attack.seconds:.1f}",
            }
            for attack in ran
        ],
        "strongest": [_strongest(best) for best in report.strongest],
        "figure_of_roc": _roc(ran, scores, style),
        "exposed": _exposed(report, pictures),
        "classes": _classes(report),
        "shared": _shared(report, pictures),
        "ranks": rank_words(report.gradients.ranks),
        "command": shlex.join(report.command),
        "versions": ", ".join(f"{name} {version}" for name, version in report.provenance.versions.items()),
    }
    return render_page("checkpoint.html", context, plots=context["figure_of_roc"] is not None)


def epsilon_words(bound: EpsilonBound | NoBound) -> str:
    """Sentence on the bound on epsilon, with its evidence."""
    if isinstance(bound, NoBound):
        return f"no bound, for {bound.why_not}."
    random = bound.split == "random"
    start = "at least" if random else "if members and non-members were exchangeable, at least"
    return (
        f"{start} {bound.value:.2f}, where one record replaces another, at delta {bound.delta:.2g} and "
        f"{bound.percent} confidence in all {bound.looks} attacks together. {bound.attack} answered "
        f"{bound.guessed} of {bound.pairs} pairs of a member and a non-member, and was right in "
        f"{bound.correct}; all of them right would have shown {bound.ceiling:.2f}."
    )


def claim_words(report: AuditReport) -> list[str]:
    """Sentences on the claim, and on whether the measured bound refutes it; if not, on the power of the test."""
    claim, bound = report.claim, report.epsilon
    if claim is None:
        return []
    sentences = [f"Claimed: epsilon {claim.epsilon:g} at delta {claim.delta:g} ({claim.relation})."]
    sentences += [f"Against itself: {error}." for error in claim.errors]
    if isinstance(bound, NoBound) or bound.claimed is None:
        return sentences
    allows = f"Where one record replaces another it allows an epsilon of {bound.claimed:.2f}"
    if bound.refutes:
        return [*sentences, f"{allows}, which the bound refutes."]
    if report.verdict.refuted:  # refuted by other evidence, such as a transcript
        return [*sentences, f"{allows}, which this bound by itself does not refute."]
    if bound.split != "random":
        return [*sentences, f"{allows}; nobody says that members were drawn at random, so the bound judges nothing."]
    if bound.needed is None:
        return [*sentences, f"{allows}, and so many pairs could refute nothing: take more members and non-members."]
    return [
        *sentences,
        f"{allows}; no violation was found. One would have been in four audits of five, had the attack been right in "
        f"{bound.needed:.1%} of its answers; it was in {bound.share:.1%}. That "
        "is no proof of the claim.",
    ]


def _decided(verdict: AuditVerdict) -> str:
    """Sentence on the numbers that decide the verdict."""
    if verdict.how == "pairs":
        return (
            f"The verdict goes by answers of {verdict.by} to pairs, those that it is surest of. The two above are "
            "averages over all examples, and miss what is leaked of few."
        )
    return (
        "The verdict goes by these two. Each was chosen on one half of the examples and measured on the other: the "
        "largest of several numbers on the same examples flatters an attack, so a row above may exclude chance where "
        "the verdict finds no leak."
    )


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _facts(report: AuditReport) -> list[tuple[str, str]]:
    groups = report.groups
    facts = [
        (f"{groups.members:,}", "members"),
        (f"{groups.non_members:,}", "non-members"),
        (_percent(report.accuracy.members), f"accuracy on members{_ends(report.accuracy.members)}"),
        (_percent(report.accuracy.non_members), f"accuracy on non-members{_ends(report.accuracy.non_members)}"),
    ]
    if report.smallest_leak.auc:
        facts.append((f"{report.smallest_leak.auc:.3f}", "AUC that would show in four audits of five"))
    return facts


def _ends(metric: Metric) -> str:
    return "" if metric.low is None else f", {metric.low:.1%} to {metric.high:.1%}"


def _percent(metric: Metric) -> str:
    return "n/a" if metric.value is None else f"{metric.value:.1%}"


def _number(metric: Metric | None) -> str:
    if metric is None or metric.value is None:
        return "n/a"
    ends = "" if metric.low is None else f" [{metric.low:.3f}, {metric.high:.3f}]"
    return f"{metric.value:.3f}{ends}"


def _cell(metric: Metric | None) -> dict[str, str]:
    if metric is None or metric.value is None:
        return {"value": "n/a", "ends": "not measured" if metric is None else str(metric.reason), "n": ""}
    ends = "" if metric.low is None else f"{metric.low:.3f} to {metric.high:.3f}"
    return {"value": f"{metric.value:.3f}", "ends": ends, "n": f"n = {metric.n}"}


def _strongest(best: Strongest) -> str:
    label = METRICS[best.metric].label
    ends = "" if best.low is None else f" [{best.low:.3f}, {best.high:.3f}]"
    how = "of all candidates, for so few have no halves" if best.of_all else "on the half that did not choose it"
    return f"By {label}: {best.attack}, {best.value:.3f}{ends} {how} (n = {best.n}; chance is {best.chance:g})."


def _roc(ran: Sequence[MembershipResult], scores: Mapping[str, ndarray], style: Mapping[str, Any]) -> Figure | None:
    """Log-log ROC curves of the attacks that ran."""
    lines = []
    for attack in ran:
        column = scores.get(f"score_{attack.name}")
        if column is None:
            raise RecordError(f"{SCORES} must have the scores of {attack.name}; run the audit again")
        fprs, tprs = rates(column.astype(float), scores["member"].astype(bool))
        places = list(zip(fprs.tolist(), tprs.tolist(), strict=True))
        lines.append(PlotLine(places=places, series=attack.name, title=attack.name, label=attack.name))
    specification = roc_plot(lines, style)
    if specification is None:
        return None
    title = "ROC curves, both axes logarithmic"
    caption = ("From one false alarm on; the dashed line is chance. Few non-members lie at the left end.",)
    return Figure(name="roc", title=title, specification=specification, caption=caption)


def _exposed(report: AuditReport, pictures: Mapping[str, ndarray]) -> list[Picture]:
    """Most exposed members, with the false positive rate at which each is found."""
    if report.exposure is None:
        return []
    exposed = []
    for example in report.exposure.examples:
        rate = _rate(example.false_positive_rate, report)
        words = f"class {example.label} · score {example.score:.4g} · found at {rate} false alarms"
        exposed.append(Picture(uri=_uri(report, pictures, "exposed", example.id), title=f"{example.name}", words=words))
    return exposed


def _rate(rate: float, report: AuditReport) -> str:
    # With none among n, only "fewer than 1 in n" is known.
    return f"{rate:.2%}" if rate > 0 else f"less than 1 in {report.groups.non_members:,}"


def _classes(report: AuditReport) -> list[dict[str, str]]:
    if report.exposure is None:
        return []
    classes = sorted(report.exposure.classes.items(), key=lambda pair: int(pair[0]))
    return [{"name": name, **_cell(metric), "n": str(metric.n or 0)} for name, metric in classes]


def _shared(report: AuditReport, pictures: Mapping[str, ndarray]) -> list[dict[str, Any]]:
    """Members whose gradients were shared, each next to every attack's reconstruction."""
    attacks = report.gradients.attacks
    count = max((len(attack.psnr) for attack in attacks), default=0)
    rows = []
    for place in range(count):
        shots = [Picture(uri=_uri(report, pictures, "shared", place), title="original", words="")]
        shots += [
            Picture(
                uri=_uri(report, pictures, f"found {attack.name}", place),
                title=attack.name,
                words=f"{'≥' if attack.psnr[place] >= 120 else ''}{attack.psnr[place]:.1f} dB",
            )
            for attack in attacks
            if attack.psnr
        ]
        rows.append({"place": place, "shots": shots})
    return rows


def rank_words(ranks: str | Sequence[LayerRank]) -> list[str]:
    """Sentences on the ranks of the equations of the gradient."""
    if isinstance(ranks, str):
        return [f"Ranks are not known: {ranks}."]
    stuck = [rank for rank in ranks if rank.deficit > 0]
    if not stuck:
        return ["The gradient of one example determines the input of every layer: the recursion reaches the image."]
    layer = max(stuck, key=lambda rank: rank.layer)
    return [
        f"The recursion from the gradient of one example stops at layer {layer.layer}, whose equations lack "
        f"{layer.deficit} of {layer.unknowns} unknowns; attacks by search are not excluded by that."
    ]


def _uri(report: AuditReport, pictures: Mapping[str, ndarray], kind: str, place: int) -> str:
    """Encodes an image as a PNG data URI; empty if its shape is no image's."""
    shape, (low, high) = report.groups.input_shape, report.groups.input_range
    if len(shape) != 3 or shape[0] not in (1, 3) or not high > low:
        return ""
    where = np.flatnonzero((pictures["kind"] == kind) & (pictures["place"] == place))
    if not len(where):
        return ""
    values = np.asarray(pictures["values"][where[0]], dtype=float)
    if values.size != np.prod(shape) or not np.isfinite(values).all():
        raise RecordError(f"{PICTURES} must hold images of shape {shape}; run the audit again")
    return png(unit_images(values, low, high).reshape(shape))


def _table(folder: Path, report: AuditReport, name: str, columns: Sequence[str]) -> dict[str, ndarray]:
    """Reads a Parquet file of the audit, as column -> values.

    Raises:
        RecordError: it is missing, or altered since the audit wrote it.
    """
    content = read_bytes(folder / name, "audit")
    if digest_of_bytes(content) != (report.files or {}).get(name):
        raise RecordError(f"{folder / name} is not the file that the audit wrote; run the audit again")
    try:
        table = read_table(content)
    except RecordError as error:
        raise RecordError(f"{folder / name} cannot be read: {error}") from None
    if lacking := [column for column in columns if column not in table.column_names]:
        raise RecordError(f"{folder / name} must have the column {lacking[0]}; run the audit again")
    return {column: np.asarray(table[column].to_pandas()) for column in table.column_names}


def in_markdown(text: str) -> str:
    """Escapes Markdown in a text."""
    # A space behind @ and : prevents mentions and automatic links.
    words = " ".join(str(text).split()).replace("@", "@ ").replace("://", ": //")
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>|#" else letter for letter in words)
