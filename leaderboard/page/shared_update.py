"""Report on a shared update: an HTML page and a Markdown summary, from the files of `leakbench audit --update`.

A folder has `update.json`, which holds the digests of the arrays beside it: reconstructions, and the candidates'
p-values. Nothing is computed here. The files do not hold the ground truth: a picture is shown with the evidence that
its attack has.
"""

import io
import os
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import UndefinedError
from numpy import ndarray

from ..records.files import digest_of_bytes, read_bytes, write_bytes
from ..records.record import RecordError
from .build import render_page
from .checkpoint import Picture, in_markdown, rank_words, read_document
from .images import png, unit_images

SCHEMA = "leakbench-update/4"
DOCUMENT, PAGE, SUMMARY, ARRAYS = "update.json", "index.html", "SUMMARY.md", "reconstructions.npz"

MOST_SHOWN = 32
"""Largest number of pictures per attack, and of candidates, on the page; the files have all."""


def build_update_report(folder: str | os.PathLike[str]) -> Path:
    """Writes the page and the summary of an attacked update into its folder.

    Args:
        folder: with the files of `leakbench audit --update`.

    Returns:
        The path of the page.

    Raises:
        RecordError: a file is missing, altered since it was written, or of another version.
    """
    folder = Path(folder)
    told = read_document(folder, name=DOCUMENT, schema=SCHEMA)
    try:
        page, words = render_update(told, folder), summary_of_update(told)
    except (KeyError, TypeError, AttributeError, IndexError, UndefinedError) as error:
        raise RecordError(
            f"{folder / DOCUMENT} is no whole report ({error!r} is not as it is written); run the audit again"
        ) from None
    write_bytes(folder / SUMMARY, words.encode())
    # Written last, so that an existing page has its summary beside it.
    return write_bytes(folder / PAGE, page.encode())


def summary_of_update(told: Mapping[str, Any]) -> str:
    """Formats a summary in Markdown, for a comment on a pull request."""
    rows = [(one["name"], _outcome(one)) for one in told["attacks"] if not one["why_not"]]
    lines = [
        f"## leakbench audit of an update: {told['verdict']['word']}",
        "",
        in_markdown(told["verdict"]["sentence"]),
        "",
        *(f"- {in_markdown(note)}" for note in told["notes"]),
        *([""] if told["notes"] else []),
        "| attack | found |",
        "|---|---|",
        *(f"| {in_markdown(name)} | {in_markdown(words)} |" for name, words in rows),
        "",
        f"Not tested: {len(told['not_tested'])}; see the report.",
    ]
    return "\n".join(lines) + "\n"


def render_update(told: dict[str, Any], folder: Path) -> str:
    """Renders the page as HTML.

    Args:
        told: content of the document.
        folder: with the files that it names.
    """
    arrays = _arrays(folder, told)
    ran = [one for one in told["attacks"] if not one["why_not"]]
    context = {
        "told": told,
        "tone": told["verdict"]["tone"],
        "facts": _facts(told),
        "pictures": [_pictures(one, told, arrays) for one in ran if one["kind"] == "reconstruction"],
        "labels": [(one["name"], _outcome(one), one["status"]) for one in ran if one["kind"] == "labels"],
        "candidates": [_candidates(one) for one in ran if one["kind"] == "membership"],
        "ranks": rank_words(told["ranks"]),
        "command": shlex.join(told["command"]),
        "versions": ", ".join(f"{name} {version}" for name, version in told["provenance"]["versions"].items()),
    }
    return render_page("shared_update.html", context)


def _facts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    update = told["update"]
    noise = f"noise multiplier {update['noise_multiplier']:g}" if update["noise_multiplier"] else "no noise"
    clipped = "nothing clipped" if update["clip_norm"] is None else f"clipped at {update['clip_norm']:g}"
    form = update["convention"]["words"]
    return [
        (f"{update['batch_size']:,}", "examples in the batch"),
        (f"{told['parameters']:,}", "parameters"),
        (form, f"{clipped}, {noise}"),
    ]


def _outcome(one: Mapping[str, Any]) -> str:
    """Result of an attack in words."""
    if one["kind"] == "labels":
        found = ", ".join(f"{label} ({count})" if count > 1 else label for label, count in one["labels"].items())
        return f"labels {found}" if found else "no labels"
    if one["kind"] == "reconstruction":
        proved = "nothing can be proved" if one["certified"] is None else f"{one['certified']} of them proved"
        return f"{one['images']} reconstructed, {proved} ({one['status']})"
    sure = sum(row["shown"] for row in one["candidates"])
    rate = 100 * one["false_discovery_rate"]
    return f"{sure} of {len(one['candidates'])} candidates shown, at a false discovery rate of {rate:.3g} %"


def _pictures(one: Mapping[str, Any], told: Mapping[str, Any], arrays: Mapping[str, ndarray]) -> dict[str, Any]:
    """Reconstructions of an attack, with the evidence that it has for them."""
    values = arrays.get(one["name"])
    shape, (low, high) = told["input_shape"], told["input_range"]
    if values is None or list(values.shape[1:]) != shape or len(values) != one["images"]:
        raise RecordError(f"{ARRAYS} must hold what {one['name']} found; run the audit again")
    drawn = len(shape) == 3 and shape[0] in (1, 3) and high > low
    shots = []
    for place, (value, label) in enumerate(zip(values[:MOST_SHOWN], one["labels"], strict=False)):
        proved = one["proved"][place] if one["proved"] else None
        words = f"class {label}" + ("" if proved is None else " · proved" if proved else " · not proved")
        uri = png(unit_images(value, low, high).reshape(shape)) if drawn and np.isfinite(value).all() else ""
        shots.append(Picture(uri=uri, title=f"{place + 1}", words=words))
    beyond = one["images"] - len(shots)
    ratio = one["residual_ratio"]
    told_by = [f"status {one['status']}"]
    if ratio is not None:
        told_by.append(f"what is left unexplained is {ratio:.3g} times what the noise would leave")
    if (guesses := one["beside_guesses"]) is not None:
        kind = "public guesses" if guesses["public"] else "guesses without public examples"
        told_by.append(
            f"{guesses['unexplained']:.2g} of the update is unexplained, and {guesses['guessed']:.2g} by the best of "
            f"{guesses['guesses']} {kind}"
        )
    if beyond > 0:
        told_by.append(f"{beyond} more are in {ARRAYS}")
    return {"name": one["name"], "shots": shots, "drawn": drawn, "words": "; ".join(told_by)}


def _candidates(one: Mapping[str, Any]) -> dict[str, Any]:
    rows = sorted(one["candidates"], key=lambda row: (row["q_value"], row["p_value"]))
    shown = [
        {"name": row["name"], "p": f"{row['p_value']:.2g}", "q": f"{row['q_value']:.2g}", "in": row["shown"]}
        for row in rows[:MOST_SHOWN]
    ]
    return {"name": one["name"], "words": _outcome(one), "rows": shown, "beyond": len(rows) - len(shown)}


def _arrays(folder: Path, told: Mapping[str, Any]) -> dict[str, ndarray]:
    """Reads the reconstructions by attack, without unpickling.

    Raises:
        RecordError: the file is missing, or altered since it was written.
    """
    content = read_bytes(folder / ARRAYS, "audit")
    if digest_of_bytes(content) != told["files"].get(ARRAYS):
        raise RecordError(f"{folder / ARRAYS} is not the file that the audit wrote; run it again")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise RecordError(f"{folder / ARRAYS} cannot be read: {' '.join(str(error).split())}") from None
