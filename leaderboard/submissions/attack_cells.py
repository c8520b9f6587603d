"""Numbers of an attack submission on each defense, beside the strongest other attack's on the same cells.

A board shows the strongest attack on a row, so a submitted attack may be on none. The other attack is chosen on the
calibration half of the candidates, and both are measured on the other half, as on the board. Attacks without halves are
compared by the numbers by which the other is chosen, which favours the other attack. Differences are paired over seeds:
both attacks faced the same model and the same candidates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from ..board.aggregate import BoardCell, Estimate, over_seeds, student
from ..board.notes import needs_words
from ..board.rows import Row, rows_from
from ..exports.safe_text import portable
from ..kinds import KINDS
from ..metrics import METRICS, KnownMetric, columns
from ..records.details import CALIBRATION, REPORT, Half
from ..records.labels import key_of, public
from .check import CheckedSubmission


@dataclass(frozen=True, kw_only=True)
class AttackCell:
    """Number of a submitted attack on a defense.

    Attributes:
        suite: of the row.
        defense: label of the row.
        noise: variant of the release in words, as " with noise"; empty without variants.
        metric: its name.
        own: estimate on all candidates; without a value, its reason.
        own_needs: access, knowledge and control of the attack, in words.
        other: estimate of the strongest other attack, on the candidates of the comparison; without a value, its reason.
        other_needs: access, knowledge and control of that attack.
        others: number of attacks among which it was chosen.
        on_fewer_seeds: number of attacks, perhaps stronger, that were measured on fewer seeds and left out.
        own_compared: estimate of the submitted attack on the candidates and seeds of the comparison.
        difference: mean over seeds of own - other, with Student's t interval over seeds.
        chosen_on: scores on which the other attack was chosen; None without a choice.
    """

    suite: str
    defense: str
    noise: str
    metric: str
    own: Estimate
    own_needs: str
    other: Estimate
    other_needs: str
    others: int
    on_fewer_seeds: int = 0
    own_compared: Estimate
    difference: Estimate
    chosen_on: Literal["calibration half", "the same scores"] | None

    @property
    def title(self) -> str:
        """Defense with the release that was attacked."""
        return self.defense + self.noise

    @property
    def left_out_words(self) -> str:
        """Number of attacks on fewer seeds, in words; empty without any."""
        return f"; {self.on_fewer_seeds} on fewer seeds left out" if self.on_fewer_seeds else ""

    @property
    def known(self) -> KnownMetric:
        """Properties of the metric."""
        return METRICS[self.metric]

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self)


def attack_cells(checked: CheckedSubmission) -> tuple[AttackCell, ...]:
    """Returns the numbers of a submission's attack; empty for a submission of anything else.

    Args:
        checked: submission that counts.
    """
    declaration = checked.declaration
    if declaration is None or declaration.kind != "attack" or declaration.method is None:
        return ()
    name = declaration.method.name
    return tuple(cell for row in rows_from(checked.records) for cell in _of_row(row, name))


def attack_table(path: str, cells: Sequence[AttackCell]) -> str:
    """Formats the numbers of an attack for a terminal.

    Args:
        path: of its submission.
        cells: of `attack_cells`.
    """
    headers = ("defense", "metric", "own", "own, compared", "other", "own - other", "strongest other")
    lines = [headers, *(_words(cell) for cell in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    table = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([f"the attack's own numbers, {path}:", *table, comparison_words(cells)])


def comparison_words(cells: Iterable[AttackCell]) -> str:
    """Returns the rule by which the other attack was chosen, and the meaning of the intervals."""
    chosen = {cell.chosen_on for cell in cells}
    words = ["Own is on all candidates."]
    if "calibration half" in chosen:
        words.append("Of several others, the strongest is chosen on one half of the candidates; both are then compared "
                     "on the other half.")  # fmt: skip
    if "the same scores" in chosen:
        words.append("Without halves, it is chosen by the number shown, which favours the other attack.")
    words.append("Intervals are 95 % each, and not simultaneous; differences are paired over seeds.")
    return " ".join(words)


def _words(cell: AttackCell) -> tuple[str, ...]:
    digits, seeds = cell.known.digits, "seed" if cell.own.n == 1 else "seeds"
    own = f"{cell.own.words(digits)}, {cell.own.n} {seeds}" if cell.own.n else f"n/a: {cell.own.reason}"
    if cell.other.value is None:
        return cell.title, cell.known.name_in_notes, own, "", "n/a", "n/a", cell.other.reason or ""
    compared = [number.words(digits) for number in (cell.own_compared, cell.other)]
    rival = f"{cell.other.attack} of {cell.others}" if cell.others > 1 else cell.other.attack or ""
    return cell.title, cell.known.name_in_notes, own, *compared, difference_words(cell), rival + cell.left_out_words


def difference_words(cell: AttackCell) -> str:
    """Formats a difference with its sign and interval, as "+0.012 [-0.030, +0.054]", or n/a with the reason."""
    value, digits = cell.difference.value, cell.known.digits
    if value is None:
        return f"n/a: {cell.difference.reason}"
    ends = cell.difference.ends
    return f"{value:+.{digits}f} " + (
        f"[{ends[0]:+.{digits}f}, {ends[1]:+.{digits}f}]" if ends else f"({cell.difference.reason})"
    )


def _of_row(row: Row, attack: str) -> Iterable[AttackCell]:
    own = [cell for cell in row.cells if _name(cell) == attack]
    for cell in own:
        others = [rival for rival in row.cells if _name(rival) != attack and _target(rival) == _target(cell)]
        for metric in _metrics(cell.kind):
            yield _compared(row, metric.name, cell, others)
    measured = {(cell.kind, cell.noise) for cell in own}
    missing = {}
    for record in row.unranked:
        noise = record.task.noise if KINDS[record.kind].variants else None
        if record.attack is not None and record.attack.name == attack and (record.kind, noise) not in measured:
            missing.setdefault((record.kind, noise), record)
    for (kind, noise), record in missing.items():
        for metric in _metrics(kind):
            none = Estimate(metric=metric.name, value=None, reason=portable(f"{record.status}: {record.reason}"))
            yield AttackCell(
                suite=row.suite, defense=row.label, noise=KINDS[kind].noise_words(noise), metric=metric.name, own=none,
                own_needs="", other=replace(none, reason="not compared"), other_needs="", others=0, own_compared=none,
                difference=replace(none, reason="not compared"), chosen_on=None,
            )  # fmt: skip


def _compared(row: Row, name: str, own: BoardCell, others: Sequence[BoardCell]) -> AttackCell:
    known, estimate = METRICS[name], over_seeds(name, own)
    shared = [(cell, set(over_seeds(name, cell).seeds) & set(estimate.seeds)) for cell in others]
    most = max((len(seeds) for _, seeds in shared), default=0)
    # An attack with fewer seeds is no equal comparison.
    rivals = [_on(cell, seeds) for cell, seeds in shared if most and len(seeds) == most]
    nothing = Estimate(metric=name, value=None, reason="no other attack was measured on this cell")
    chosen_on, half, of_rival, own_half, difference = None, None, nothing, nothing, nothing
    rival = rivals[0] if rivals else None
    if len(rivals) > 1:
        halves = all(_has_halves(name, cell) for cell in (own, *rivals))
        half, chosen_on = (REPORT, "calibration half") if halves else (None, "the same scores")
        by = CALIBRATION if halves else None
        rival = max(rivals, key=lambda cell: known.leak_sign * (over_seeds(name, cell, half=by).value or 0.0))
    if rival is not None:
        own = _on(own, set(rival.records))
        own_half, of_rival = over_seeds(name, own, half=half), over_seeds(name, rival, half=half)
        difference = _paired(name, own, rival, half)
    return AttackCell(
        suite=row.suite, defense=row.label, noise=KINDS[own.kind].noise_words(own.noise), metric=name, own=estimate,
        own_needs=_needs(own), other=of_rival, other_needs="" if rival is None else _needs(rival), others=len(rivals),
        on_fewer_seeds=sum(0 < len(seeds) < most for _, seeds in shared), own_compared=own_half, difference=difference,
        chosen_on=chosen_on,
    )  # fmt: skip


def _paired(name: str, own: BoardCell, other: BoardCell, half: Half | None) -> Estimate:
    """Mean difference over the seeds of both, with Student's t interval."""
    if METRICS[name].proved:
        reason = "lower bounds are not subtracted: how far each lies below the truth is unknown"
        return Estimate(metric=name, value=None, reason=reason)
    values, seeds = [], []
    for seed in own.records:
        pair = [over_seeds(name, _on(cell, {seed}), half=half).value for cell in (own, other)]
        if pair[0] is not None and pair[1] is not None:
            values.append(pair[0] - pair[1])
            seeds.append(seed)
    ends = student(values)
    reason = None if ends else "no interval: one seed" if len(values) < 2 else "no interval: equal over seeds"
    low, high = ends or (None, None)
    return Estimate(
        metric=name, value=fmean(values), low=low, high=high, seeds=tuple(seeds), interval="seeds" if ends else None,
        reason=reason,
    )  # fmt: skip


def _has_halves(name: str, cell: BoardCell) -> bool:
    return all(
        over_seeds(name, cell, half=half).seeds == over_seeds(name, cell).seeds for half in (CALIBRATION, REPORT)
    )


def _on(cell: BoardCell, seeds: set[int]) -> BoardCell:
    return replace(cell, records={seed: record for seed, record in cell.records.items() if seed in seeds})


def _metrics(kind: str) -> list[KnownMetric]:
    """Metrics of a kind with a column in every format, by which attacks are compared."""
    worst = (metric for metric, _ in columns(written=True) if metric.kind == kind and metric.over_attacks == "worst")
    return list(dict.fromkeys(worst))


def _first(cell: BoardCell) -> Any:
    return next(iter(cell.records.values()))


def _name(cell: BoardCell) -> str:
    attack = _first(cell).attack
    return "" if attack is None else attack.name


def _target(cell: BoardCell) -> tuple[str, str | None, str]:
    # Attacks on different shared updates have different images.
    return cell.kind, cell.noise, key_of(public(_first(cell).task)) if KINDS[cell.kind].own_task else ""


def _needs(cell: BoardCell) -> str:
    words = needs_words([_first(cell)])
    return next(iter(words.values()), "").replace("_", " ")
