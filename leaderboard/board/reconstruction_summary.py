"""One sentence a defense on what attacks still find in its updates, and where they found nothing, what they could have.

An attack finds images where its PSNR is above that of the mean public image and above that of the best public match,
each by an interval over paired differences that holds over all attacks compared. Where none does, the sentence says how
large a gain would have been found (its power), for "nothing found" of a few images is no safety; and an attack that
failed, or was not carried out, says nothing of the defense. Attacks that pick the image out of candidates find no
picture, and are told of by themselves, beside chance and what the claim allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from ..kinds import KINDS, NoiseVariant
from ..metrics import METRICS
from ..records.record import Record
from .aggregate import BoardCell, Estimate, over_seeds
from .choices import choices_words, is_choice
from .rows import Row

KIND = KINDS["reconstruction"]
GAINS = METRICS["gain_over_mean"], METRICS["gain_over_match"]
"""Both floors have to be exceeded; each at its own level, which needs no correction for two (intersection-union)."""

POWER = 0.8
"""Chance with which the gain that is called detectable would have been found."""


def still_leaks(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(row, sentence) for each row whose images were sought, negative controls excepted.

    Args:
        rows: of the board.
    """
    said = []
    for row in rows:
        if row.control == "negative":
            continue
        parts = [part for variant in KIND.variants for part in _variant(row, variant)]
        if parts:
            sentence = "; ".join(parts)
            said.append((row.label, f"{sentence[0].upper()}{sentence[1:]}."))
    return said


@dataclass(frozen=True, kw_only=True)
class _Try:
    """One attack with its gains over both floors, simultaneous over the attacks compared."""

    attack: str
    gains: tuple[Estimate, Estimate]
    cell: BoardCell

    @property
    def least(self) -> float:
        """The smaller gain."""
        return min(gain.value or 0.0 for gain in self.gains)

    @property
    def leaks(self) -> bool | None:
        """Whether both intervals are above 0; None without intervals."""
        lows = [gain.low for gain in self.gains]
        return None if None in lows else all(low is not None and low > 0 for low in lows)


def _variant(row: Row, variant: NoiseVariant) -> list[str]:
    """What a row's attacks find, and pick, in one form of its updates; empty where nothing was asked of it."""
    cells = [cell for cell in row.cells if cell.kind == KIND.name and cell.noise == variant.name]
    choices = [cell for cell in cells if is_choice(cell)]
    # A record that failed before its task was resolved has no variant, and counts against both.
    unmeasured = [r for r in row.unranked if r.kind == KIND.name and r.task.get("noise", variant.name) == variant.name]
    said = []
    if len(choices) < len(cells) or unmeasured:
        said.append(_sought([cell for cell in cells if cell not in choices], unmeasured, variant))
    return said + [f"{variant.preposition} noise {words}" for words in choices_words(choices)]


def _sought(cells: Sequence[BoardCell], unmeasured: Sequence[Record], variant: NoiseVariant) -> str:
    """What attacks that look for pictures find, or why that is not known."""
    words = f"{variant.preposition} noise"
    looks = max(1, sum(over_seeds(GAINS[0].name, cell).value is not None for cell in cells))
    tries, silent = [], list(unmeasured_words(unmeasured))
    for cell in cells:
        first, second = (over_seeds(gain.name, cell, looks=looks) for gain in GAINS)
        gap = first if first.value is None else second
        if gap.value is None:
            silent.append(f"{cell.attack} n/a ({gap.reason})")
        else:
            tries.append(_Try(attack=cell.attack or "", gains=(first, second), cell=cell))
    aside = f" ({', '.join(silent)}: no safety)" if silent else ""
    if not tries:
        return f"{words} it is not known what leaks{aside}"
    if found := [one for one in tries if one.leaks]:
        return f"{words} it LEAKS, {_found(max(found, key=lambda one: one.least))}{aside}"
    judged = [one for one in tries if one.leaks is not None]
    if len(judged) < len(tries):
        without = max((one for one in tries if one.leaks is None), key=lambda one: one.least)
        return (
            f"{words} no verdict, for {without.attack} gains {_decibels(without.least)} over public images "
            f"with no interval ({without.gains[0].reason}){aside}"
        )
    # Of the attack that came nearest.
    nearest = max(judged, key=lambda one: one.least)
    # So large a gain is no "nothing found": of a few images it is undecided, and the other words would flatter.
    if (floor := METRICS[KIND.main].floor) is not None and nearest.least > floor.margin:
        return (
            f"{words} it is UNDECIDED: {nearest.attack} gains {_decibels(nearest.least)} over public images, and "
            f"{_counted(nearest)} are too few to tell that from chance{aside}"
        )
    tried = f"{len(judged)} attacks are" if len(judged) > 1 else f"{nearest.attack} is"
    largest = max(detectable(gain, one.cell) for one in judged for gain in one.gains)
    return (
        f"{words} {tried} not shown to find more than public images have (gain measured {_decibels(nearest.least)}, "
        f"{_counted(nearest)}); {_decibels(largest)} would have been found with a chance of {POWER:.0%}{aside}"
    )


def unmeasured_words(records: Sequence[Record]) -> list[str]:
    """Attacks that failed or were skipped, each once."""
    return list(dict.fromkeys(f"{r.attack.name if r.attack else r.kind} {r.status}" for r in records))


def detectable(gain: Estimate, cell: BoardCell) -> float:
    """The smallest mean gain, dB, that would have had an interval above 0 with a chance of `POWER`.

    Args:
        gain: with its interval.
        cell: its records.
    """
    tail = 1 - 0.025 / gain.looks
    if gain.interval == "seeds" and gain.ends is not None:
        free = gain.n - 1
        quantile = float(stats.t.ppf(tail, free))
        error = (gain.ends[1] - gain.ends[0]) / 2 / quantile
        return (quantile + float(stats.t.ppf(POWER, free))) * error
    # Of the records' own intervals, which are averaged and not narrowed: the scorer's figure, widened for the looks.
    own = [record.metrics[gain.metric].detail.get("detectable") for record in cell.records.values()]
    known = [value for value in own if isinstance(value, int | float)]
    more = float(stats.norm.ppf(POWER))
    wider = (float(stats.norm.ppf(tail)) + more) / (float(stats.norm.ppf(0.975)) + more)
    return wider * max(known) if known else float("inf")


def _found(one: _Try) -> str:
    first, second = one.gains
    return (
        f"{one.attack} finds images {GAINS[0].with_unit(first.words(1))} better than the mean public image and "
        f"{GAINS[1].with_unit(second.words(1))} better than the best public match ({_counted(one)})"
    )


def _counted(one: _Try) -> str:
    seeds = one.gains[0].n
    images = sorted({record.metrics[GAINS[0].name].n or 1 for record in one.cell.records.values()})
    count = "-".join(str(n) for n in dict.fromkeys((images[0], images[-1])))
    plural = "" if images == [1] else "s"
    return f"{seeds} seed{'' if seeds == 1 else 's'} of {count} image{plural}"


def _decibels(value: float) -> str:
    return GAINS[0].with_unit(f"{value:.1f}")
