"""HTML page of a run: one file that works offline, with the board as CSV and JSON beside it.

All of its content comes from the run's folder (records, arrays, tuning, self-test), and equal folders give equal bytes.
Records may come from third parties, so their text is escaped and none of it enters a script or a link target; a content
security policy forbids the page to load anything.
"""

import base64
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..board.active_server import ABOUT, TITLE
from ..board.content import Footnotes
from ..board.notes import (  # fmt: skip
    alarms,
    and_words,
    degraded_sentences,
    largest_sentence,
    leak_words,
    needs_words,
    powerless,
    ranks_sentence,
    shared_words,
    sizes_words,
)
from ..board.public_only import public_sentences
from ..board.reconstruction_summary import reconstruction_summaries
from ..board.rows import Row
from ..board.table import Board
from ..kinds import attacked
from ..metrics import columns
from ..records.files import write_bytes
from ..records.folder import ArraysFolder, ScoreCheck, read_folder
from ..records.record import Record, RecordError
from . import papers, remarks
from .certificates import Certificate, certificate
from .class_maps import ClassMap, class_maps
from .clients import client_figures
from .drawing import roc_axes
from .figures import Figure, figures
from .matrix import AttackMatrix, matrix
from .picture_grid import PictureGrid, picture_grid
from .plots import Style, breakable, bundle, picture, styles
from .proved import proved_figures
from .reconstructions import Exhibit, PictureAllowance, Shot, exhibits, unmeasured_metrics
from .roc import roc_figures
from .rounds import round_figures
from .tables import FLAGS, Section, sections

PAGE, CSV, JSON = "index.html", "board.csv", "board.json"

MANY = 12
"""Number of rows from which on a filter box is shown."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Site around the page of a run, which is then the page of a suite.

    Attributes:
        root: prefix of links to the root of the site.
        row_page: row -> (its permanent id, path of its page below the root).
        files: names of the tables beside the page, CSV and JSON.
        script: path below the root of the script that draws plots, which all pages of the site share.
        brief: sentence on the parts left out of a page of very many rows; empty to leave out nothing.
    """

    root: str
    row_page: Callable[[Row], tuple[str, str]]
    files: tuple[str, str]
    script: str
    brief: str = ""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """First attacked image of the run, with its reconstruction from each method's release."""

    original: str
    title: str
    attack: str
    shots: tuple[tuple[str, str, Shot], ...]


@dataclass(frozen=True)
class PageNotes:
    """Footnotes of the board, of the matrices and of the pictures, each below what refers to it."""

    board: Footnotes = field(default_factory=Footnotes)
    matrix: Footnotes = field(default_factory=Footnotes)
    pictures: Footnotes = field(default_factory=Footnotes)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Section of the board with its plots and pictures; the last three are of federated trainings."""

    section: Section
    figures: tuple[Figure, ...]
    matrix: AttackMatrix | None
    grid: PictureGrid | None
    exhibits: tuple[Exhibit, ...]
    unpictured: tuple[tuple[str, str], ...]
    federated: tuple[Figure, ...]
    maps: tuple[ClassMap, ...]
    unmapped: tuple[str, ...]


def build(results: str | os.PathLike[str], out: str | os.PathLike[str], verify: ScoreCheck | None = None) -> Path:
    """Builds the page of a run; see `build_with_board`.

    Args:
        results: output of the run.
        out: folder of the page.
        verify: compares a record's numbers with those recomputed from its scores; None to skip that.

    Returns:
        The path of the page.
    """
    return build_with_board(results, out, verify)[0]


def build_with_board(
    results: str | os.PathLike[str], out: str | os.PathLike[str], verify: ScoreCheck | None = None
) -> tuple[Path, Board]:
    """Builds the page of a run, and returns the board on it, for which the records need not be read again.

    Args:
        results: output of the run, with its records in `records/`, or that folder itself.
        out: folder of the page; created if absent, and files of the same names are replaced.
        verify: compares a record's numbers with those recomputed from its scores; None to skip that.

    Returns:
        The path of the page, and its board.

    Raises:
        RecordError: no records, a bad record, a bad file in `tuning/`, or a bad self-test.
        BoardError: the records do not form a board.
    """
    results, out = Path(results), Path(out)
    if out.exists() and not out.is_dir():
        raise RecordError(f"out must be a folder, and {out} is a file; name another place")
    folder = read_folder(results, verify)
    records = folder.records
    board = Board.from_records(records, folder.complete)
    explanations = papers.read_explanations([results])
    papers.refuse_unused(board.rows, explanations)
    tunings = remarks.tunings(results, records)
    text = render(board, records, folder.path, tunings, certificate(results), explanations=explanations)
    write_bytes(out / CSV, board.to_csv().encode())
    write_bytes(out / JSON, (json.dumps(board.to_dict(), indent=1, allow_nan=False) + "\n").encode())
    # Written last, so that an existing page has its files beside it.
    return write_bytes(out / PAGE, text.encode()), board


def render(
    board: Board,
    records: Sequence[Record],
    folder: ArraysFolder,
    tunings: Sequence[remarks.Tuning] = (),
    selftest: Certificate | None = None,
    site: Surroundings | None = None,
    explanations: Sequence[papers.PaperExplanation] = (),
) -> str:
    """Renders the page as HTML.

    Args:
        board: made from the records.
        records: all records.
        folder: of their arrays.
        tunings: searches for settings on public data.
        selftest: results of the tool's self-test; None if the run's output has none.
        site: around the page; None for a page by itself.
        explanations: of differences from papers' figures.

    Returns:
        The document.
    """
    # By id, so that the order of the records does not change the bytes.
    records = sorted(records, key=lambda record: record.id)
    honest = [record for record in records if not record.active_server]
    notes, allowance = PageNotes(), PictureAllowance()
    style = styles({row.method: row.defense.name for row in board.rows})
    part = _part if site is None or not site.brief else _brief_part
    parts = [
        part(section, board.rows, folder, style, notes, allowance)
        for section in sections(board.rows, style, notes.board, None if site is None else site.row_page)
    ]
    flags = {flag for row in board.rows for flag in row.flags}
    context: dict[str, Any] = {
        "suites": list(dict.fromkeys(record.suite for record in records)),
        "about": _about(board.rows, honest, active=bool(board.active)),
        "alarms": alarms(board.controls, board.violations, board.gaps),
        "assumptions": remarks.assumptions(board.rows),
        "controls": board.controls,
        # Rows of a sweep on a site may repeat a sentence hundreds of times.
        "powerless": powerless(board.rows) if site is None else list(dict.fromkeys(powerless(board.rows))),
        "leaks": leak_words(),
        "largest": largest_sentence(board.rows),
        "floors": _floors(),
        "public_only": public_sentences(board.rows),
        "still_leaks": reconstruction_summaries(board.rows),
        "facts": _facts(board, records, honest),
        "opening": _opening(parts),
        "parts": parts,
        "many": len(board.rows) > MANY,
        "flags": {name: meaning for name, meaning in FLAGS.items() if name in flags},
        "notes": notes.board,
        "matrix_notes": notes.matrix,
        "picture_notes": notes.pictures,
        "roc_axes": roc_axes(_decades(parts)),
        "degraded": degraded_sentences(board.rows),
        "ranks": ranks_sentence(board.rows),
        "unmeasured": remarks.unmeasured(board.unranked),
        "needs": needs_words(records),
        "shared": shared_words(honest),
        "active": [result.words | {"suite": result.suite} for result in board.active],
        "active_title": TITLE,
        "active_about": ABOUT,
        "sizes": sizes_words([record for row in board.rows for record in row.records]),
        "seeded": any(record.noise == "seeded" for record in records),
        "comparisons": papers.table(board.rows, explanations),
        "tunings": tunings,
        "selftest": selftest,
        "provenance": remarks.provenance(records),
        "records": records,
        "csv": CSV if site is None else site.files[0],
        "json": JSON if site is None else site.files[1],
        "frame": "page.html" if site is None else "site.html",
        "root": "" if site is None else site.root,
        "brief": "" if site is None else site.brief,
    }
    drawn = (figure for part in parts for figure in (*part.figures, *part.federated))
    plots = any(figure.specification is not None for figure in drawn)
    return render_page("run.html", context, plots=plots, script="" if site is None else site.root + site.script)


def render_page(
    template: str, context: Mapping[str, Any], *, plots: bool = False, script: str = "", own_scripts: Sequence[str] = ()
) -> str:
    """Renders a page with the style sheet and the scripts that all pages share.

    Args:
        template: of its content, which extends `page.html`.
        context: of that template.
        plots: whether it has any, and so needs the script that draws them.
        script: relative path of a file with that script; empty to write it into the page.
        own_scripts: names of further scripts among the templates, which run after the shared ones.
    """
    environment = _template_environment()
    names = ("page.js", *own_scripts)
    scripts = [*([bundle()] if plots and not script else []), *(_file(environment, name) for name in names)]
    # The content security policy allows these scripts alone, by their hashes.
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii") for script in scripts]
    shared = {
        "css": Markup(_file(environment, "page.css")),  # noqa: S704 -- ours, and nothing is filled into it
        "scripts": [Markup(script) for script in scripts],  # noqa: S704 -- the same, and what vl-convert brings
        "digests": digests,
        "script": script if plots else "",
    }
    return environment.get_template(template).render({**context, **shared})


@functools.cache
def _template_environment() -> Any:
    """Environment of the templates beside this file; cached, because compiling takes longer than rendering."""
    # Imported here because nothing else in the leaderboard, the board in a terminal included, needs it.
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(f"leakbench.leaderboard.{part}", "templates") for part in ("page", "site")]),
        autoescape=True,
        # A misspelt name in a template is an error, not a blank on the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"breakable": breakable, "picture": picture}
    return environment


def _file(environment: Any, name: str) -> str:
    return environment.loader.get_source(environment, name)[0]


def _part(
    section: Section,
    rows: Sequence[Row],
    folder: ArraysFolder,
    style: Style,
    notes: PageNotes,
    allowance: PictureAllowance,
) -> Part:
    # A control on public examples alone stands beside the methods of either privacy unit.
    task = section.rows[0].section[:3]
    public_only = [row for row in rows if row.control == "public_only" and row.section[:3] == task]
    maps, unmapped = class_maps(section.rows, folder, style)
    shown = tuple(exhibits(section.rows, folder, style, notes.pictures, allowance))
    return Part(
        section=section,
        figures=(
            *figures(section.rows, style, section.name),
            *proved_figures(section.rows, style, section.name),
            *roc_figures(section.rows, folder, style, section.name),
        ),
        matrix=matrix(section.rows, folder, style, notes.matrix),
        grid=picture_grid(shown, allowance),
        exhibits=shown,
        unpictured=tuple(unmeasured_metrics(section.rows)),
        federated=(
            *round_figures(section.rows, public_only, folder, style, section.name),
            *client_figures(section.rows, folder, style, section.name),
        ),
        maps=tuple(maps),
        unmapped=tuple(unmapped),
    )


def _brief_part(section: Section, *_: Any) -> Part:
    """Returns the table of a section alone."""
    return Part(
        section=section, figures=(), matrix=None, grid=None, exhibits=(), unpictured=(), federated=(), maps=(),
        unmapped=(),
    )  # fmt: skip


def _decades(parts: Iterable[Part]) -> set[int]:
    """Decades of the axes of the ROC plots in the matrices."""
    cells = [cell for part in parts if part.matrix for cell in part.matrix.cells]
    return {cell.decades for cell in cells if cell.decades is not None}


def _about(rows: Sequence[Row], records: Sequence[Record], *, active: bool = False) -> str:
    """Sentences on what was trained and attacked."""
    defenses = len({row.defense.name for row in rows if row.control is None})
    trained = dict.fromkeys(f"{row.task.data or '?'} ({row.task.model or '?'})" for row in rows)
    seeds = sorted({record.seed for record in records})
    words = f"{defenses} defense{'s' if defenses != 1 else ''}"
    if any(row.control == "positive" for row in rows):
        words += " and a baseline that must leak"
    words += f", trained on {and_words(list(trained))}" if trained else ", none of which could be run"
    words += f" with seed{'s' if len(seeds) > 1 else ''} {and_words([str(seed) for seed in seeds])}."
    questions = []
    for kind in attacked():
        done = [record for record in records if record.kind == kind.name and record.status == "ok"]
        names = sorted({record.attack.name for record in done if record.attack})
        if names:
            questions.append(f"{and_words(names)} {kind.question}")
    if not questions and active:
        return f"{words} All attacks are those of an active server, in a table of their own."
    return f"{words} {and_words(questions)}." if questions else f"{words} No attack was carried out."


def _floors() -> str:
    """End of the sentence about chance, for metrics that have a floor instead."""
    known = {metric.name: metric for metric, _ in columns(written=True) if metric.floor is not None}
    return "".join(
        f", or for {metric.name_in_notes} {metric.floor.of}, which needs no update at all"
        for metric in known.values()
        if metric.floor is not None
    )


def _facts(board: Board, records: Sequence[Record], honest: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Figures for a quick look: (number, unit, tone); the tone is empty if the number is no verdict."""
    ok = sum(control.ok for control in board.controls)
    attacks = {record.attack.name for record in honest if record.attack}
    epsilons = (row.claim.epsilon for row in board.rows if row.claim and row.control is None)
    claims = [epsilon for epsilon in epsilons if epsilon is not None]  # 0 is the strongest claim, not a missing one
    failed = sum(record.status == "failed" for record in records)
    facts = [
        (str(len({row.defense.name for row in board.rows if row.control is None})), "defenses", ""),
        (str(len(attacks)), "attacks", ""),
        (str(len({record.seed for record in records})), "seeds", ""),
        (str(len(records)), "records", ""),
        (f"{ok}/{len(board.controls)}", "controls held", "good")
        if board.trustworthy
        else (f"{ok}/{len(board.controls)}", "controls held", "bad")
        if board.controls
        else ("no", "controls", "bad"),
    ]
    if claims:
        low, high = (f"{end:.2g}" for end in (min(claims), max(claims)))
        facts.insert(0, (low if low == high else f"{low} to {high}", "claimed ε, where proved", ""))
    if failed:
        facts.append((str(failed), "records failed", "bad"))
    return facts


def _opening(parts: Sequence[Part]) -> Opening | None:
    """First attacked image with its reconstruction from each release, in the variant with noise if there is one."""
    for part in parts:
        shown = sorted(
            (e for e in part.exhibits if e.control != "negative" and e.strips[0].tiles),
            key=lambda exhibit: exhibit.control != "positive",
        )
        if not shown:
            continue
        first = shown[0].strips[0]
        original = first.tiles[0].original
        shots: dict[str, tuple[str, str, Shot]] = {}  # of a method with several settings, the first row is shown
        others: dict[str, str] = {}  # methods to whose release the first attack does not apply
        for exhibit in shown:
            for tile in exhibit.strips[0].tiles:
                # The release with noise, as it is made, is last in the table of variants and is preferred here.
                pictured = [shot for shot in reversed(tile.shots) if shot.uri]
                if tile.original == original and pictured:
                    epsilon = "" if exhibit.epsilon == "n/a" else f"ε {exhibit.epsilon}"
                    if exhibit.name not in shots and exhibit.strips[0].attack != first.attack:
                        others[exhibit.name] = exhibit.strips[0].attack
                    shots.setdefault(exhibit.name, (exhibit.name, epsilon, pictured[0]))
                    break
        # Eight pictures with the original, which fill a line of the grid in print.
        first_shots = tuple(shots.values())[:7]
        other_attacks = "; ".join(
            f"{name}: {attack}" for name, attack in others.items() if name in [shot[0] for shot in first_shots]
        )
        attack = f"{first.attack} ({other_attacks})" if other_attacks else first.attack
        return Opening(original=original, title=first.tiles[0].title, attack=attack, shots=first_shots)
    return None
