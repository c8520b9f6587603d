"""What every written form of the board says, before a form is chosen: headers, cells, footnotes, remarks.

A cell is a tuple of parts (value, interval) that a form joins with a space, or with a line break where
columns must be narrow. Reasons become numbered footnotes, each once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..metrics import METRICS
from ..records.fields import Claim
from ..records.folder import Completeness
from ..records.record import Record
from .aggregate import Estimate, over_seeds
from .comparable import mixed
from .controls import ControlResult, Violation
from .rows import Row

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"

# Half a table each, for narrow terminals; a row is recognised by its first column.
MEMBERSHIP = ("defense", "epsilon", "accuracy", "auc", "tpr", "attack")
RECONSTRUCTION = ("defense", "psnr_free", "psnr_noisy", "rank", "seeds", "flags")
NOISE = {"none": " without noise", "calibrated": " with noise"}
COLUMNS = (*MEMBERSHIP, *RECONSTRUCTION[1:])

Cell = tuple[str, ...]


class Footnotes(list[str]):
    """Sentences in the order of their numbers, from 1; the same sentence has the same number."""

    def number(self, reason: str | None) -> int | None:
        """The number of a sentence, which is added at its first use; None for no sentence."""
        if not reason:
            return None
        if reason not in self:
            self.append(reason)
        return self.index(reason) + 1


@dataclass
class Sheet:
    """The board in words.

    Attributes:
        alarms: sentences that must be read first: failed controls, violated claims, absent controls.
        headers: column -> parts of its header.
        sections: title and rows of each group of comparable rows; a row is column -> parts.
        footnotes: what the superscripts in the cells stand for, in order from 1.
        notes: how to read the numbers.
        unranked: what failed or was skipped, with its sentence.
    """

    alarms: list[str]
    headers: dict[str, Cell] = field(default_factory=dict)
    sections: list[tuple[str, list[dict[str, Cell]]]] = field(default_factory=list)
    footnotes: Footnotes = field(default_factory=Footnotes)
    notes: list[str] = field(default_factory=list)
    unranked: list[str] = field(default_factory=list)

    def mark(self, cell: Cell, reason: str | None) -> Cell:
        """Adds a footnote's number to a cell; the same reason has the same number."""
        number = self.footnotes.number(reason)
        return cell if number is None else (*cell[:-1], cell[-1] + superscript(number))


def superscript(number: int) -> str:
    """A footnote's number, raised."""
    return "".join(SUPERSCRIPTS[int(digit)] for digit in str(number))


def alarms(controls: Sequence[ControlResult], violations: Sequence[Violation], gaps: Sequence[str] = ()) -> list[str]:
    """The sentences of the banner; empty when controls were there and all held, and nothing is missing.

    Args:
        controls: all results.
        violations: all refuted claims.
        gaps: what is missing, a sentence each.

    Returns:
        One sentence each.
    """
    failed = [f"{c.name}: expected {c.expected}, measured {c.measured}" for c in controls if not c.ok]
    said = []
    if failed:
        said.append("CONTROLS FAILED, do not trust this board. " + "; ".join(failed) + ".")
    said += [f"CLAIM VIOLATED: {violation.sentence}." for violation in violations]
    said += gaps
    if not controls:
        said.append("There are no controls in these records: nothing shows that these attacks can find a leak.")
    return said


def gaps(records: Sequence[Record], complete: Completeness) -> list[str]:
    """What a folder lacks, and the command that computes it.

    Args:
        records: all of the board.
        complete: what they are held against.

    Returns:
        One sentence for each request that lacks cells; one where nothing says what ought to be there; one for each
        suite whose numbers are of different code.
    """
    said = [
        f"MIXED: records of {suite} are of different code ({'; '.join(words)}), so none of its rows is ranked: "
        "compute them again with --recompute, or take the others out of the folder."
        for suite, words in mixed(records).items()
    ]
    for manifest, cells in complete.missing(records):
        names = list(dict.fromkeys(cell.words for cell in cells))
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        said.append(
            f"INCOMPLETE: {len(cells)} of the {len(manifest.cells)} cells asked for have no record ({some}). "
            f"Compute them with: {manifest.command_for(complete.results)}"
        )
    if spoiled := [record for record in records if record.status == "failed"]:
        said.append(
            f"INCOMPLETE: {len(spoiled)} of {len(records)} records failed or are not their scores', "
            "so worst cases are at least what is shown; run the same command again."
        )
    loose = len(complete.uncovered(records))
    if loose == len(records):
        said.append("Whether these records are complete is unknown: no manifest of a run lies beside them.")
    elif loose:
        said.append(
            f"{loose} of {len(records)} records are in no manifest: whether their rows are complete is unknown."
        )
    return said


def sheet(
    rows: Sequence[Row],
    *,
    controls: Sequence[ControlResult],
    violations: Sequence[Violation],
    unranked: Sequence[Record],
    gaps: Sequence[str] = (),
) -> Sheet:
    """Words the whole board.

    Args:
        rows: in the order of the board.
        controls: all results.
        violations: all refuted claims.
        unranked: records that failed or were skipped.
        gaps: what is missing, a sentence each.

    Returns:
        The sheet, ready for any form.
    """
    page = Sheet(alarms=alarms(controls, violations, gaps))
    deltas = {row.claim.delta for row in rows if row.claim and row.claim.epsilon is not None}
    page.headers = {
        "defense": ("defense",),
        "rank": ("rank",),
        "epsilon": ("claimed", f"ε, δ={_short(deltas.copy().pop())}") if len(deltas) == 1 else ("claimed", "ε"),
        "accuracy": ("accuracy",),
        "auc": ("worst", "AUC"),
        "tpr": ("worst", "TPR@1%FPR"),
        "attack": ("strongest", "attack"),
        "psnr_free": ("PSNR, dB,", "no noise"),
        "psnr_noisy": ("PSNR, dB,", "with noise"),
        "seeds": ("seeds",),
        "flags": ("flags",),
    }
    for section, group in groupby(rows, key=lambda row: row.section):
        title = " · ".join(filter(None, section))
        page.sections.append((title, [_words(page, row, several=len(deltas) > 1) for row in group]))
    page.notes = _notes(rows, controls)
    page.unranked = _unranked(unranked)
    return page


def _words(page: Sheet, row: Row, *, several: bool) -> dict[str, Cell]:
    details = (f"({row.details})",) if row.details else ()
    control = (f"({row.control} control)",) if row.control else ()
    flags = tuple("CLAIM VIOLATED" if flag == "claim_violated" else flag for flag in row.flags)
    strongest, other = strongest_words(row)
    return {
        "defense": (row.defense.name, *details, *control),
        "rank": page.mark(("n/a",), row.unplaced) if row.unplaced else (str(row.rank or "-"),),
        "epsilon": _epsilon(page, row, several=several),
        "accuracy": _number(page, row.accuracy),
        "auc": _number(page, row.auc, row),
        "tpr": _number(page, row.tpr, row),
        "attack": page.mark((strongest,), other) if strongest else ("-",),
        "psnr_free": _number(page, row.psnr_free, row),
        "psnr_noisy": _number(page, row.psnr_noisy, row),
        "seeds": page.mark((seeds_words(row),), uneven_words(row)),
        "flags": (", ".join(flags),),
    }


def strongest_words(row: Row) -> tuple[str, str]:
    """The strongest attack on a row, empty when there was none, and a remark where it depends on the measure."""
    by_tpr = row.tpr.attack
    other = f"by TPR@1%FPR the strongest is {by_tpr}" if by_tpr and by_tpr != row.auc.attack else ""
    return row.auc.attack or row.psnr_free.attack or row.psnr_noisy.attack or "", other


def seeds_words(row: Row) -> str:
    """How many seeds a row was measured with, as "3" or "2-3"."""
    counts = sorted({len(cell.records) for cell in row.cells})
    return "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


def uneven_words(row: Row) -> str:
    """Which seeds each number of a row is over, where they differ; empty where they do not."""
    if "uneven_seeds" not in row.flags:
        return ""
    return "seeds measured: " + "; ".join(
        f"{cell.attack or cell.kind}{NOISE.get(cell.noise or '', '')}: {_list(cell.records)}" for cell in row.cells
    )


def _epsilon(page: Sheet, row: Row, *, several: bool) -> Cell:
    claim = row.claim
    if claim is None:
        return page.mark(("n/a",), "no claim in these records")
    if claim.epsilon is None:
        return page.mark(("∞",), claim.reason)
    words = page.mark((f"{claim.epsilon:.2f}",), claim_remark(claim))
    words += (f"δ={_short(claim.delta)}",) if several else ()
    return (*words, "VIOLATED") if "claim_violated" in row.flags else words


def claim_remark(claim: Claim) -> str:
    """What must be read beside a finite epsilon: the figure that papers print, and what nobody checked."""
    said = []
    if claim.as_if_poisson is not None:
        said.append(f"sampling is {claim.sampling}; were it Poisson, epsilon would be {claim.as_if_poisson:.2f}")
    return "; ".join([*said, *(f"unverified: {sentence}" for sentence in claim.unverified)])


DIGITS = {"accuracy": 2, "auc": 2, "tpr_at_1pct_fpr": 3, "psnr": 1}
"""Behind the point, in a table that has to fit a terminal."""


def at_least(row: Row, estimate: Estimate) -> bool:
    """Whether a worst case may be worse: attacks of its kind failed or are missing."""
    return METRICS[estimate.metric].kind in row.lacks


def _number(page: Sheet, estimate: Estimate, row: Row | None = None) -> Cell:
    """A number with its interval; that of a row whose attacks are not all there is a lower end."""
    if estimate.value is None:
        return page.mark(("n/a",), estimate.reason)
    digits = DIGITS[estimate.metric]
    value = f"{estimate.value:.{digits}f}"
    if row is not None and at_least(row, estimate):
        value = f"≥{value}"
    if estimate.low is None or estimate.high is None:
        return page.mark((value,), estimate.reason)
    return page.mark((value, f"[{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"), estimate.reason)


def _short(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def _notes(rows: Sequence[Row], controls: Sequence[ControlResult]) -> list[str]:
    notes = [
        "Means over seeds, with 95 % intervals (Student's t; the record's own for a single seed). Worst is "
        "the strongest attack's mean; its interval is simultaneous over the attacks compared; "
        "≥ marks one of attacks that are not all there. "
        "Chance: AUC 0.5, TPR 0.01. Higher AUC, TPR and PSNR leak more.",
    ]
    records = [record for row in rows for record in row.records]
    if shared := shared_words(records):
        floors = [row.floor.value for row in rows if row.floor.value is not None]
        floor = ""
        if floors:
            least, most = f"{min(floors):.1f}", f"{max(floors):.1f}"
            floor = f" The mean public image alone has {least if least == most else f'{least} to {most}'} dB."
        notes.append(f"PSNR: one shared update ({shared}), without and with its noise.{floor}")
    if sizes := sizes_words(records):
        notes.append(f"Per seed: {sizes}.")
    notes += [
        f"{attack} does not tell the members of {row.defense.name} itself (AUC {auc.value:.2f} "
        f"[{auc.low:.2f}, {auc.high:.2f}]): near chance, its numbers say nothing about a defense."
        for row in rows
        if row.control == "positive"
        for attack, auc in powerless(row)
    ]
    if passed := [f"{c.name}: {c.measured}" for c in controls if c.ok]:
        notes.append(f"Controls that held: {'; '.join(passed)}.")
    if roles := {row.control for row in rows} - {None}:
        absent = {"positive", "negative"} - roles
        notes += [f"There is no {role} control in these records." for role in sorted(absent)]
    if any(record.noise == "seeded" for record in records):
        notes.append("Noise comes from seeds, for repeatable experiments; a release needs secret noise.")
    notes += [f"Attack {name}: {needs}." for name, needs in needs_words(records).items()]
    papers = [f"{r.defense.name}, {p.metric} {p.value:g} in {p.source}" for r in records for p in r.reported]
    return notes + [f"Reported by others: {words}." for words in dict.fromkeys(papers)]


def shared_words(records: Sequence[Record]) -> str:
    """Which updates reconstruction is about, as "photos, convnet, batch 1, step 2"; empty for none."""
    shared = dict.fromkeys(
        ", ".join(f"{prefix}{r.task[key]}" for key, prefix in _SHOWN.items() if key in r.task)
        for r in records
        if r.kind == "reconstruction"
    )
    return "; ".join(shared)


def sizes_words(records: Sequence[Record]) -> str:
    """On how many examples, candidates and images one record's number rests."""
    places = {
        "utility": ("accuracy", "test examples"),
        "membership": ("auc", "candidates"),
        "reconstruction": ("psnr", "images"),
    }
    words = []
    for kind, (metric, what) in places.items():
        found = {r.metrics[metric].n for r in records if r.kind == kind and metric in r.metrics} - {None}
        if found:
            counts = sorted(n for n in found if n is not None)
            said = " or ".join(map(str, counts)) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
            words.append(f"{said} {what.removesuffix('s') if counts == [1] else what}")
    return ", ".join(words)


def powerless(row: Row) -> list[tuple[str, Estimate]]:
    """Membership attacks that the positive control does not show to work."""
    found = [(cell.attack or "", over_seeds("auc", cell)) for cell in row.cells if cell.kind == "membership"]
    return [(name, auc) for name, auc in found if auc.value is not None and auc.low is not None and auc.low <= 0.5]


_SHOWN = {"data": "", "model": "", "batch": "batch ", "step": "step "}


def needs_words(records: Sequence[Record]) -> dict[str, str]:
    """What each attack is given, because a worst case is only as realistic as that."""
    found = {}
    for record in records:
        if record.attack is not None and record.requires:
            words = []
            for name, value in record.requires.items():
                if value:
                    items = value if isinstance(value, list) else [value]
                    words.append(f"{name} {', '.join(str(item).lower() for item in items)}")
            found[record.attack.name] = "; ".join(words)
    return {name: found[name] for name in sorted(found) if found[name]}


def _unranked(records: Sequence[Record]) -> list[str]:
    """One line for each sentence, with all the cells and seeds it concerns."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for record in records:
        what = record.attack.name if record.attack else record.kind
        noise = str(record.task.get("noise")) if record.kind == "reconstruction" else ""
        cell = f"{record.defense.name} x {what}{NOISE.get(noise, '')}"
        lines.setdefault((record.status, cell, record.reason or ""), []).append(record.seed)
    return [f"{status}: {cell}, {_seeds(seeds)}: {reason}" for (status, cell, reason), seeds in sorted(lines.items())]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {_list(seeds)}"


def _list(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))
