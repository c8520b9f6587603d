"""Report on a shared update: an HTML page and a Markdown summary, from the files of `leakbench audit update`.

`update.json` holds all results and the digests of the files beside it: reconstructions, and the candidates' p-values.
Nothing is computed here. The files do not hold the ground truth, so a reconstruction is shown with the evidence of its
attack instead of its error.
"""

import io
import os
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from ..records.files import digest_of_bytes, read_bytes, write_bytes
from ..records.record import RecordError
from ..records.update_report import JudgedCandidates, ReconstructedInputs, RecoveredLabels, UpdateAttack, UpdateReport
from .build import render_page
from .checkpoint import PAGE, SUMMARY, Picture, in_markdown, rank_words
from .images import png, unit_images

ARRAYS = UpdateReport.ARRAYS

MOST_SHOWN = 32
"""Largest number of images per attack, and of candidates, on the page; the files have all."""


def build_update_report(folder: str | os.PathLike[str]) -> Path:
    """Writes the page and the summary of an attacked update into its folder.

    Args:
        folder: with the files of `leakbench audit update`.

    Returns:
        The path of the page.

    Raises:
        RecordError: a file is missing, altered since it was written, or of another version.
    """
    folder = Path(folder)
    report = UpdateReport.read(folder)
    page, words = render_update(report, folder), summary_of_update(report)
    write_bytes(folder / SUMMARY, words.encode())
    # Written last, so that an existing page has its summary beside it.
    return write_bytes(folder / PAGE, page.encode())


def summary_of_update(report: UpdateReport) -> str:
    """Formats a summary in Markdown, for a comment on a pull request."""
    rows = [(attack.name, _outcome(attack)) for attack in report.attacks if not attack.why_not]
    lines = [
        f"## leakbench audit of an update: {report.verdict.word}",
        "",
        in_markdown(report.verdict.sentence),
        "",
        *(f"- {in_markdown(note)}" for note in report.notes),
        *([""] if report.notes else []),
        "| attack | found |",
        "|---|---|",
        *(f"| {in_markdown(name)} | {in_markdown(words)} |" for name, words in rows),
        "",
        f"Not tested: {len(report.not_tested)}; see the report.",
    ]
    return "\n".join(lines) + "\n"


def render_update(report: UpdateReport, folder: Path) -> str:
    """Renders the page as HTML.

    Args:
        report: of the audit.
        folder: with the files that it names.
    """
    arrays = _arrays(folder, report)
    attacks = report.attacks
    context = {
        "report": report,
        "facts": _facts(report),
        "pictures": [
            _pictures(attack, report, arrays) for attack in attacks if isinstance(attack, ReconstructedInputs)
        ],
        "labels": [
            (attack.name, _outcome(attack), attack.status) for attack in attacks if isinstance(attack, RecoveredLabels)
        ],
        "candidates": [_candidates(attack) for attack in attacks if isinstance(attack, JudgedCandidates)],
        "ranks": rank_words(report.ranks),
        "command": shlex.join(report.command),
        "versions": ", ".join(f"{name} {version}" for name, version in report.provenance.versions.items()),
    }
    return render_page("shared_update.html", context)


def _facts(report: UpdateReport) -> list[tuple[str, str]]:
    update = report.update
    noise = f"noise multiplier {update.noise_multiplier:g}" if update.noise_multiplier else "no noise"
    clipped = "nothing clipped" if update.clip_norm is None else f"clipped at {update.clip_norm:g}"
    return [
        (f"{update.batch_size:,}", "examples in the batch"),
        (f"{report.parameters:,}", "parameters"),
        (update.convention.words, f"{clipped}, {noise}"),
    ]


def _outcome(attack: UpdateAttack) -> str:
    """Result of an attack in words."""
    match attack:
        case RecoveredLabels():
            counts = attack.labels.items()
            labels = ", ".join(f"{label} ({count})" if count > 1 else label for label, count in counts)
            return f"labels {labels}" if labels else "no labels"
        case ReconstructedInputs():
            proved = "nothing can be proved" if attack.certified is None else f"{attack.certified} of them proved"
            return f"{attack.images} reconstructed, {proved} ({attack.status})"
        case JudgedCandidates():
            rate = 100 * attack.false_discovery_rate
            return (
                f"{len(attack.shown)} of {len(attack.candidates)} candidates shown, at a false discovery rate of "
                f"{rate:.3g} %"
            )
        case _:
            return attack.why_not


def _pictures(attack: ReconstructedInputs, report: UpdateReport, arrays: Mapping[str, ndarray]) -> dict[str, Any]:
    """Reconstructions of an attack, with the evidence that it has for them."""
    values = arrays.get(attack.name)
    shape, (low, high) = report.input_shape, report.input_range
    if values is None or values.shape[1:] != shape or len(values) != attack.images:
        raise RecordError(f"{ARRAYS} must hold what {attack.name} found; run the audit again")
    drawn = len(shape) == 3 and shape[0] in (1, 3) and high > low
    shots = []
    for place, (value, label) in enumerate(zip(values[:MOST_SHOWN], attack.labels, strict=False)):
        proved = attack.proved[place] if attack.proved else None
        words = f"class {label}" + ("" if proved is None else " · proved" if proved else " · not proved")
        uri = png(unit_images(value, low, high).reshape(shape)) if drawn and np.isfinite(value).all() else ""
        shots.append(Picture(uri=uri, title=f"{place + 1}", words=words))
    beyond = attack.images - len(shots)
    evidence = [f"status {attack.status}"]
    if attack.residual_ratio is not None:
        evidence.append(f"what is left unexplained is {attack.residual_ratio:.3g} times what the noise would leave")
    if (guesses := attack.beside_guesses) is not None:
        kind = "public guesses" if guesses.public else "guesses without public examples"
        evidence.append(
            f"{guesses.unexplained:.2g} of the update is unexplained, and {guesses.guessed:.2g} by the best of "
            f"{guesses.guesses} {kind}"
        )
    if beyond > 0:
        evidence.append(f"{beyond} more are in {ARRAYS}")
    return {"name": attack.name, "shots": shots, "drawn": drawn, "words": "; ".join(evidence)}


def _candidates(attack: JudgedCandidates) -> dict[str, Any]:
    rows = sorted(attack.candidates, key=lambda row: (row.q_value, row.p_value))
    shown = [
        {"name": row.name, "p": f"{row.p_value:.2g}", "q": f"{row.q_value:.2g}", "in": row.shown}
        for row in rows[:MOST_SHOWN]
    ]
    return {"name": attack.name, "words": _outcome(attack), "rows": shown, "beyond": len(rows) - len(shown)}


def _arrays(folder: Path, report: UpdateReport) -> dict[str, ndarray]:
    """Reads the reconstructions by attack, without unpickling.

    Raises:
        RecordError: the file is missing, or altered since it was written.
    """
    content = read_bytes(folder / ARRAYS, "audit")
    if digest_of_bytes(content) != report.files.get(ARRAYS):
        raise RecordError(f"{folder / ARRAYS} is not the file that the audit wrote; run it again")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise RecordError(f"{folder / ARRAYS} cannot be read: {' '.join(str(error).split())}") from None
