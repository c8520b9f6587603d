"""Report on a model that was trained elsewhere: an HTML page and a Markdown summary, from the audit's files alone.

A folder has `audit.json`, which holds the digests of the two Parquet files beside it: scores of all candidates, and
pictures. Only the ROC curve is computed from the scores; every other number is the document's own.
"""

import io
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import UndefinedError
from numpy import ndarray

from ..metrics import METRICS
from ..records.files import digest_of_bytes, read_bytes, write_bytes
from ..records.record import RecordError
from .build import render_page
from .figures import Figure
from .images import png, unit_images
from .plots import PlotLine, marker, styles
from .roc import rates, roc_plot

SCHEMA = "leakbench-audit/1"
DOCUMENT, PAGE, SUMMARY = "audit.json", "index.html", "SUMMARY.md"
SCORES, PICTURES = "scores.parquet", "pictures.parquet"

SHOWN = ("auc", "tpr_at_1pct_fpr", "tpr_at_0.1pct_fpr", "advantage")
"""Metrics in the table of attacks."""

_OPTIONAL: dict[str, Any] = {
    "model": None, "data": {}, "preflight": None, "claim": None, "transcript": None, "rules": [], "not_tested": [],
    "command": [],
}  # fmt: skip
"""Defaults of the fields that only the command adds, for documents of an audit in memory."""

TONES = {
    "leaks": "bad",
    "within the claim": "good",
    "claim refuted": "bad",
    "no leak found": "good",
    "cannot be told": "warn",
}


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
    told = read_document(folder)
    try:
        page, words = render(told, folder), summary(told)
    except (KeyError, TypeError, AttributeError, IndexError, UndefinedError) as error:
        raise RecordError(
            f"{folder / DOCUMENT} is no whole audit ({error!r} is not as it writes it); run it again"
        ) from None
    write_bytes(folder / SUMMARY, words.encode())
    # Written last, so that an existing page has its summary beside it.
    return write_bytes(folder / PAGE, page.encode())


def read_document(folder: Path, *, name: str = DOCUMENT, schema: str = SCHEMA) -> dict[str, Any]:
    """Reads the document of an audit.

    Args:
        folder: of the report.
        name: of the file.
        schema: expected version.

    Raises:
        RecordError: there is no document, or it has another version.
    """
    content = read_bytes(folder / name, "audit")
    try:
        told = json.loads(content.decode())
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise RecordError(f"{folder / name} is not a whole JSON document; run the audit again") from None
    if not isinstance(told, dict) or told.get("schema") != schema:
        said = told.get("schema") if isinstance(told, dict) else None
        raise RecordError(f"schema of {folder / name} must be {schema}, got {said!r}; run the audit again")
    return told


def summary(told: Mapping[str, Any]) -> str:
    """Formats a summary in Markdown, for a comment on a pull request."""
    ran = [one for one in told["attacks"] if one["metrics"]]
    heads = [METRICS[name].label for name in SHOWN[:3]]
    lines = [
        f"## leakbench audit: {told['verdict'].get('headline', told['verdict']['word'])}",
        "",
        in_markdown(told["verdict"]["sentence"]),
        "",
        f"{told['groups']['members']} members, {told['groups']['non_members']} non-members; accuracy "
        f"{_number(told['accuracy']['members'])} and {_number(told['accuracy']['non_members'])}.",
        "",
        "| attack | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
        *(
            f"| {in_markdown(one['name'])} | "
            + " | ".join(_number(one["metrics"].get(name)) for name in SHOWN[:3])
            + " |"
            for one in ran
        ),
        "",
        f"**epsilon**: {in_markdown(epsilon_words(told['epsilon']))}",
        *(
            f"- {'broken' if rule['broken'] else 'kept'}: {in_markdown(rule['broken'] or rule['text'])}"
            for rule in told.get("rules", ())
        ),
        "",
        f"Not tested: {len(told.get('not_tested', ()))}; see the report.",
    ]
    return "\n".join(lines) + "\n"


def render(told: dict[str, Any], folder: Path) -> str:
    """Renders the page as HTML.

    Args:
        told: content of the document.
        folder: with the files that it names.
    """
    scores = _table(folder, told, SCORES)
    pictures = _table(folder, told, PICTURES)
    told = _OPTIONAL | told
    ran = [one for one in told["attacks"] if one["metrics"]]
    style = styles({one["name"]: one["name"] for one in ran})
    context = {
        "told": told,
        "headline": _sentence(told["verdict"].get("headline", told["verdict"]["word"])),
        "tone": told["verdict"].get("tone", TONES.get(told["verdict"]["word"], "warn")),
        "decided": _decided(told["verdict"]),
        "facts": _facts(told),
        "epsilon": _sentence(epsilon_words(told["epsilon"])),
        "claim": claim_words(told),
        "columns": [(METRICS[name].label, name) for name in SHOWN],
        "attacks": [
            {
                "name": one["name"],
                "key": marker(*style[one["name"]]),
                "access": _access(one.get("requires", {})),
                "cells": [_cell(one["metrics"].get(name)) for name in SHOWN],
                "seconds": f"{one['seconds']:.1f}",
            }
            for one in ran
        ],
        "strongest": [_strongest(one) for one in told["strongest"]],
        "figure_of_roc": _roc(ran, scores, style),
        "exposed": _exposed(told, pictures),
        "classes": _classes(told),
        "shared": _shared(told, pictures),
        "ranks": rank_words(told["gradients"]["ranks"]),
        "sources": [
            (name, one) for name, one in told.get("data", {}).items() if isinstance(one, dict) and "sha256" in one
        ],
        "command": shlex.join(told["command"]),
        "versions": ", ".join(f"{name} {version}" for name, version in told["provenance"]["versions"].items()),
    }
    return render_page("checkpoint.html", context, plots=context["figure_of_roc"] is not None)


def epsilon_words(bound: Mapping[str, Any]) -> str:
    """Sentence on the bound on epsilon, with its evidence."""
    if "why_not" in bound:
        return f"no bound, for {bound['why_not']}."
    random = bound["split"] == "random"
    start = "at least" if random else "if members and non-members were exchangeable, at least"
    return (
        f"{start} {bound['value']:.2f}, where one record replaces another, at delta {bound['delta']:.2g} and "
        f"{100 * bound['level']:.10g}% confidence in all {bound['looks']} attacks together. {bound['attack']} answered "
        f"{bound['guessed']} of {bound['pairs']} pairs of a member and a non-member, and was right in "
        f"{bound['correct']}; all of them right would have shown {bound['ceiling']:.2f}."
    )


def claim_words(told: Mapping[str, Any]) -> list[str]:
    """Sentences on the claim's bound, and whether the measured bound refutes it; if not, on the power of the test."""
    claim, bound = told.get("claim"), told["epsilon"]
    if not claim:
        return []
    said = [f"Claimed: epsilon {claim['epsilon']:g} at delta {claim['delta']:g} ({claim['relation']})."]
    said += [f"Against itself: {error}." for error in claim["errors"]]
    if "why_not" in bound or bound["claimed"] is None:
        return said
    allows = f"Where one record replaces another it allows an epsilon of {bound['claimed']:.2f}"
    if bound["refutes"]:
        return [*said, f"{allows}, which the bound refutes."]
    if told["verdict"]["word"] == "claim refuted":  # refuted by other evidence, such as a transcript
        return [*said, f"{allows}, which this bound by itself does not refute."]
    if bound["split"] != "random":
        return [*said, f"{allows}; nobody says that members were drawn at random, so the bound judges nothing."]
    if bound["needed"] is None:
        return [*said, f"{allows}, and so many pairs could refute nothing: take more members and non-members."]
    return [
        *said,
        f"{allows}; no violation was found. One would have been in four audits of five, had the attack been right in "
        f"{bound['needed']:.1%} of its answers; it was in {bound['correct'] / max(1, bound['guessed']):.1%}. That "
        "is no proof of the claim.",
    ]


def _decided(verdict: Mapping[str, Any]) -> str:
    """Sentence on the numbers that decide the verdict."""
    if verdict.get("how") == "pairs":
        return (
            f"The verdict goes by answers of {verdict['by']} to pairs, those that it is surest of. The two above are "
            "averages over all examples, and miss what is leaked of few."
        )
    return (
        "The verdict goes by these two. Each was chosen on one half of the examples and measured on the other: the "
        "largest of several numbers on the same examples flatters an attack, so a row above may exclude chance where "
        "the verdict finds no leak."
    )


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _facts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    groups, sizes = told["groups"], told.get("smallest_leak") or {}
    facts = [
        (f"{groups['members']:,}", "members"),
        (f"{groups['non_members']:,}", "non-members"),
        (_percent(told["accuracy"]["members"]), f"accuracy on members{_ends(told['accuracy']['members'])}"),
        (_percent(told["accuracy"]["non_members"]), f"accuracy on non-members{_ends(told['accuracy']['non_members'])}"),
    ]
    if sizes.get("auc"):
        facts.append((f"{sizes['auc']:.3f}", "AUC that would show in four audits of five"))
    return facts


def _ends(metric: Mapping[str, Any]) -> str:
    return "" if metric["low"] is None else f", {metric['low']:.1%} to {metric['high']:.1%}"


def _percent(metric: Mapping[str, Any]) -> str:
    return "n/a" if metric["value"] is None else f"{metric['value']:.1%}"


def _number(metric: Mapping[str, Any] | None) -> str:
    if metric is None or metric["value"] is None:
        return "n/a"
    ends = "" if metric["low"] is None else f" [{metric['low']:.3f}, {metric['high']:.3f}]"
    return f"{metric['value']:.3f}{ends}"


def _cell(metric: Mapping[str, Any] | None) -> dict[str, str]:
    if metric is None or metric["value"] is None:
        return {"value": "n/a", "ends": "not measured" if metric is None else str(metric["reason"]), "n": ""}
    ends = "" if metric["low"] is None else f"{metric['low']:.3f} to {metric['high']:.3f}"
    return {"value": f"{metric['value']:.3f}", "ends": ends, "n": f"n = {metric['n']}"}


def _strongest(one: Mapping[str, Any]) -> str:
    label = METRICS[one["metric"]].label
    ends = "" if one["low"] is None else f" [{one['low']:.3f}, {one['high']:.3f}]"
    how = "of all candidates, for so few have no halves" if one["of_all"] else "on the half that did not choose it"
    return f"By {label}: {one['attack']}, {one['value']:.3f}{ends} {how} (n = {one['n']}; chance is {one['chance']:g})."


def _access(requires: Mapping[str, Any]) -> str:
    knows = ", ".join(word.lower() for word in requires.get("knows", ()))
    return str(requires.get("access", "")).lower().replace("_", " ") + (f", knows {knows}" if knows else "")


def _roc(ran: Sequence[Mapping[str, Any]], scores: Mapping[str, ndarray], style: Mapping[str, Any]) -> Figure | None:
    """Log-log ROC curves of the attacks that ran."""
    lines = []
    for one in ran:
        column = scores.get(f"score_{one['name']}")
        if column is None:
            raise RecordError(f"{SCORES} must have the scores of {one['name']}; run the audit again")
        fprs, tprs = rates(column.astype(float), scores["member"].astype(bool))
        places = list(zip(fprs.tolist(), tprs.tolist(), strict=True))
        lines.append(PlotLine(places=places, series=one["name"], title=one["name"]))
    specification = roc_plot(lines, style)
    if specification is None:
        return None
    title = "ROC curves, both axes logarithmic"
    caption = ("From one false alarm on; the dashed line is chance. Few non-members lie at the left end.",)
    return Figure(name="roc", title=title, specification=specification, caption=caption)


def _exposed(told: Mapping[str, Any], pictures: Mapping[str, ndarray]) -> list[Picture]:
    """Most exposed members, with the false positive rate at which each is found."""
    if told["exposure"] is None:
        return []
    found = []
    for one in told["exposure"]["examples"]:
        rate = _rate(one["false_positive_rate"], told)
        words = f"class {one['label']} · score {one['score']:.4g} · found at {rate} false alarms"
        found.append(Picture(uri=_uri(told, pictures, "exposed", one["id"]), title=f"{one['name']}", words=words))
    return found


def _rate(rate: float, told: Mapping[str, Any]) -> str:
    # With none among n, only "fewer than 1 in n" is known.
    return f"{rate:.2%}" if rate > 0 else f"less than 1 in {told['groups']['non_members']:,}"


def _classes(told: Mapping[str, Any]) -> list[dict[str, str]]:
    if told["exposure"] is None:
        return []
    classes = sorted(told["exposure"]["classes"].items(), key=lambda pair: int(pair[0]))
    return [{"name": name, **_cell(metric), "n": str(metric["n"] or 0)} for name, metric in classes]


def _shared(told: Mapping[str, Any], pictures: Mapping[str, ndarray]) -> list[dict[str, Any]]:
    """Members whose gradients were shared, each next to every attack's reconstruction."""
    attacks = told["gradients"]["attacks"]
    count = max((len(one["psnr"]) for one in attacks), default=0)
    rows = []
    for place in range(count):
        shots = [Picture(uri=_uri(told, pictures, "shared", place), title="original", words="")]
        shots += [
            Picture(
                uri=_uri(told, pictures, f"found {one['name']}", place),
                title=one["name"],
                words=f"{'≥' if one['psnr'][place] >= 120 else ''}{one['psnr'][place]:.1f} dB",
            )
            for one in attacks
            if one["psnr"]
        ]
        rows.append({"place": place, "shots": shots})
    return rows


def rank_words(found: Any) -> list[str]:
    """Sentences on the ranks of the equations of the gradient."""
    if isinstance(found, str):
        return [f"Ranks are not known: {found}."]
    stuck = [one for one in found if one["deficit"] > 0]
    if not stuck:
        return ["The gradient of one example determines the input of every layer: the recursion reaches the image."]
    layer = max(stuck, key=lambda one: one["layer"])
    return [
        f"The recursion from the gradient of one example stops at layer {layer['layer']}, whose equations lack "
        f"{layer['deficit']} of {layer['unknowns']} unknowns; attacks by search are not excluded by that."
    ]


def _uri(told: Mapping[str, Any], pictures: Mapping[str, ndarray], kind: str, place: int) -> str:
    """Encodes an image as a PNG data URI; empty if its shape is no image's."""
    shape, (low, high) = told["groups"]["input_shape"], told["groups"]["input_range"]
    if len(shape) != 3 or shape[0] not in (1, 3) or not high > low:
        return ""
    where = np.flatnonzero((pictures["kind"] == kind) & (pictures["place"] == place))
    if not len(where):
        return ""
    values = np.asarray(pictures["values"][where[0]], dtype=float)
    if values.size != np.prod(shape) or not np.isfinite(values).all():
        raise RecordError(f"{PICTURES} must hold images of shape {shape}; run the audit again")
    return png(unit_images(values, low, high).reshape(shape))


def _table(folder: Path, told: Mapping[str, Any], name: str) -> dict[str, ndarray]:
    """Reads a Parquet file of the audit, as column -> values.

    Raises:
        RecordError: it is missing, or altered since the audit wrote it.
    """
    import pyarrow
    import pyarrow.parquet

    content = read_bytes(folder / name, "audit")
    if digest_of_bytes(content) != told.get("files", {}).get(name):
        raise RecordError(f"{folder / name} is not the file that the audit wrote; run the audit again")
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(content))
    except (pyarrow.ArrowException, OSError) as error:
        raise RecordError(f"{folder / name} cannot be read: {' '.join(str(error).split())}") from None
    return {column: np.asarray(table[column].to_pandas()) for column in table.column_names}


def in_markdown(text: str) -> str:
    """Escapes Markdown in a text."""
    # A space behind @ and : prevents mentions and automatic links.
    words = " ".join(str(text).split()).replace("@", "@ ").replace("://", ": //")
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>|#" else letter for letter in words)
