"""What every written form of the board says, before a form is chosen: headers, cells, footnotes, remarks.

A cell is a tuple of parts (value, interval) that a form joins with a space, or with a line break where
columns must be narrow. Reasons become numbered footnotes, each once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..kinds import KINDS, KindOfResult, attacked
from ..metrics import METRICS, BoardColumn, KnownMetric, columns
from ..records.fields import RecordedClaim
from ..records.folder import Completeness
from ..records.record import Record
from .aggregate import Estimate, over_seeds
from .comparable import mixed
from .controls import ControlResult, Violation, leaks
from .rows import Row

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"

CellWords = tuple[str, ...]


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
        headers: column -> parts of its header, in the order of the columns.
        halves: the columns of the two tables that narrow terminals get; a row is recognised by the first of each.
        sections: title and rows of each group of comparable rows; a row is column -> parts.
        footnotes: what the superscripts in the cells stand for, in order from 1.
        notes: how to read the numbers.
        unranked: what failed or was skipped, with its sentence.
    """

    alarms: list[str]
    headers: dict[str, CellWords] = field(default_factory=dict)
    halves: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    sections: list[tuple[str, list[dict[str, CellWords]]]] = field(default_factory=list)
    footnotes: Footnotes = field(default_factory=Footnotes)
    notes: list[str] = field(default_factory=list)
    unranked: list[str] = field(default_factory=list)

    def mark(self, cell: CellWords, reason: str | None) -> CellWords:
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
    page.halves = halves()
    headers: dict[str, CellWords] = {
        "epsilon": ("claimed", f"ε, δ={_short(deltas.copy().pop())}") if len(deltas) == 1 else ("claimed", "ε"),
        "attack": ("strongest", "attack"),
        **{column.key: column.header for _, column in columns(written=True)},
    }
    page.headers = {key: headers.get(key, (key,)) for half in page.halves for key in half}
    for section, group in groupby(rows, key=lambda row: row.section):
        title = " · ".join(filter(None, section))
        page.sections.append((title, [_words(page, row, several=len(deltas) > 1) for row in group]))
    page.notes = _notes(rows, controls)
    page.unranked = _unranked(unranked)
    return page


def halves() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of the board, in two halves that each begin with the defense.

    The first ends with the strongest attack, which stands behind the first kind that has attacks.
    """
    names = list(KINDS)
    before = names[: names.index(attacked()[0].name) + 1] if attacked() else names
    first = [column.key for metric, column in columns(written=True) if metric.kind in before]
    second = [column.key for metric, column in columns(written=True) if metric.kind not in before]
    return ("defense", "epsilon", *first, "attack"), ("defense", *second, "rank", "seeds", "flags")


def _words(page: Sheet, row: Row, *, several: bool) -> dict[str, CellWords]:
    details = (f"({row.details})",) if row.details else ()
    control = (f"({row.control} control)",) if row.control else ()
    flags = tuple("CLAIM VIOLATED" if flag == "claim_violated" else flag for flag in row.flags)
    strongest, other = strongest_words(row)
    # Footnotes are numbered as they are met: the rank's before the numbers', although it stands behind them.
    cells: dict[str, CellWords] = {
        "defense": (row.defense.name, *details, *control),
        "rank": page.mark(("n/a",), row.unplaced) if row.unplaced else (str(row.rank or "-"),),
        "epsilon": _epsilon(page, row, several=several),
    }
    shown = {column.key: (metric, column) for metric, column in columns(written=True)}
    for key in page.headers:
        if key in shown:
            cells[key] = _number(page, row, *shown[key])
        elif key == "attack":
            cells[key] = page.mark((strongest,), other) if strongest else ("-",)
    return cells | {"seeds": page.mark((seeds_words(row),), uneven_words(row)), "flags": (", ".join(flags),)}


def strongest_words(row: Row) -> tuple[str, str]:
    """The strongest attack on a row, empty when there was none, and a remark where it depends on the measure."""
    leads = {kind.name: next((e.attack for e in row.main(kind) if e.attack), "") for kind in attacked()}
    others = [
        f"by {column.header[-1]} the strongest is {by_it}"
        for metric, column in columns(written=True)
        if metric.name != KINDS[metric.kind].main and (by_it := row.estimates[column.key].attack)
        if metric.of_attack and by_it != leads[metric.kind]
    ]
    return next(filter(None, leads.values()), "") or "", "; ".join(others)


def seeds_words(row: Row) -> str:
    """How many seeds a row was measured with, as "3" or "2-3"."""
    counts = sorted({len(cell.records) for cell in row.cells})
    return "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


def uneven_words(row: Row) -> str:
    """Which seeds each number of a row is over, where they differ; empty where they do not."""
    if "uneven_seeds" not in row.flags:
        return ""
    return "seeds measured: " + "; ".join(
        f"{cell.attack or cell.kind}{KINDS[cell.kind].noise_words(cell.noise)}: {_list(cell.records)}"
        for cell in row.cells
    )


def _epsilon(page: Sheet, row: Row, *, several: bool) -> CellWords:
    claim = row.claim
    if claim is None:
        return page.mark(("n/a",), "no claim in these records")
    if claim.epsilon is None:
        return page.mark(("∞",), claim.reason)
    words = page.mark((f"{claim.epsilon:.2f}",), claim_remark(claim))
    words += (f"δ={_short(claim.delta)}",) if several else ()
    return (*words, "VIOLATED") if "claim_violated" in row.flags else words


def claim_remark(claim: RecordedClaim) -> str:
    """What must be read beside a finite epsilon: the figure that papers print, and what nobody checked."""
    said = []
    if claim.as_if_poisson is not None:
        said.append(f"sampling is {claim.sampling}; were it Poisson, epsilon would be {claim.as_if_poisson:.2f}")
    return "; ".join([*said, *(f"unverified: {sentence}" for sentence in claim.unverified)])


def at_least(row: Row, estimate: Estimate) -> bool:
    """Whether a worst case may be worse: attacks of its kind failed or are missing."""
    return METRICS[estimate.metric].kind in row.lacks


def _number(page: Sheet, row: Row, metric: KnownMetric, column: BoardColumn) -> CellWords:
    """A number with its interval; that of a row whose attacks are not all there is a lower end."""
    estimate, digits = row.estimates[column.key], column.digits
    if estimate.value is None:
        return page.mark(("n/a",), estimate.reason)
    value = f"{estimate.value:.{digits}f}"
    if metric.of_attack and at_least(row, estimate):
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
        f"{' '.join(filter(None, (_chance_words(), leak_words())))}",
    ]
    records = [record for row in rows for record in row.records]
    notes += filter(None, (_target_words(kind, rows, records) for kind in attacked()))
    if sizes := sizes_words(records):
        notes.append(f"Per seed: {sizes}.")
    notes += powerless(rows)
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


def _chance_words() -> str:
    """What an attack that knows nothing has, in the columns of the board; empty where no metric has such a value."""
    known = {m.name: f"{m.name_in_notes} {m.chance:g}" for m, _ in columns(written=True) if m.chance is not None}
    return f"Chance: {', '.join(known.values())}." if known else ""


def leak_words() -> str:
    """Which way the columns of attacks are read, as "Higher AUC and PSNR leak more."; empty without such columns."""
    said = []
    for better, word in (("lower", "Higher"), ("higher", "Lower")):
        names = {m.name: m.name_in_notes for m, _ in columns(written=True) if m.of_attack and m.better == better}
        if names:
            said.append(f"{word} {and_words(list(names.values()))} leak{'s' if len(names) == 1 else ''} more.")
    return " ".join(said)


def and_words(words: Sequence[str]) -> str:
    """A list in a sentence, as "a, b and c"; empty for none."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def _target_words(kind: KindOfResult, rows: Sequence[Row], records: Sequence[Record]) -> str:
    """What a kind's attacks are about and what its floor is; empty where they are about the trained model."""
    shared, metric = shared_words(records, kind), METRICS[kind.main]
    if not shared:
        return ""
    variants = and_words([variant.preposition for variant in kind.variants])
    said = f"{metric.name_in_notes}: {kind.target} ({shared}){f', {variants} its noise' if variants else ''}."
    if metric.floor is None:
        return said
    floors = [row.estimates[c.key].value for row in rows for c in METRICS[metric.floor.metric].columns]
    if not (there := [value for value in floors if value is not None]):
        return said
    least, most = (f"{end:.{metric.digits}f}" for end in (min(there), max(there)))
    span = metric.with_unit(least if least == most else f"{least} to {most}")
    return f"{said} {metric.floor.of[0].upper()}{metric.floor.of[1:]} alone has {span}."


def shared_words(records: Sequence[Record], kind: KindOfResult | None = None) -> str:
    """Which targets other than the trained model were attacked, as "photos, convnet, batch 1, step 2"; empty for none.

    Args:
        records: of any kind.
        kind: whose targets; None for those of every kind.
    """
    kinds = [one for one in (KINDS.values() if kind is None else [kind]) if one.own_task]
    shared = dict.fromkeys(
        ", ".join(f"{prefix}{r.task[key]}" for key, prefix in _SHOWN.items() if key in r.task)
        for r in records
        if any(r.kind == one.name for one in kinds)
    )
    return "; ".join(shared)


def sizes_words(records: Sequence[Record]) -> str:
    """On how many examples, candidates and images one record's number rests."""
    words = []
    for kind in KINDS.values():
        found = {r.metrics[kind.main].n for r in records if r.kind == kind.name and kind.main in r.metrics} - {None}
        if found:
            counts = sorted(n for n in found if n is not None)
            said = " or ".join(map(str, counts)) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
            words.append(f"{said} {kind.counts.removesuffix('s') if counts == [1] else kind.counts}")
    return ", ".join(words)


def powerless(rows: Sequence[Row]) -> list[str]:
    """A sentence for each attack that the positive controls do not show to work: its interval reaches chance."""
    said = []
    for row in rows:
        for cell in row.cells if row.control == "positive" else ():
            kind = KINDS[cell.kind]
            estimate, metric = over_seeds(kind.main, cell), METRICS[kind.main]
            if kind.powerless and leaks(metric, estimate) is False:
                said.append(
                    f"{cell.attack} {kind.powerless.format(row.defense.name)} ({metric.label} {estimate.words(2)}): "
                    "near chance, its numbers say nothing about a defense."
                )
    return said


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
        cell = f"{record.defense.name} x {what}{KINDS[record.kind].noise_words(record.task.get('noise'))}"
        lines.setdefault((record.status, cell, record.reason or ""), []).append(record.seed)
    return [f"{status}: {cell}, {_seeds(seeds)}: {reason}" for (status, cell, reason), seeds in sorted(lines.items())]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {_list(seeds)}"


def _list(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))
