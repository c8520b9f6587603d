"""Sentence per row of the board on the images that attacks reconstruct, or on the power of attacks that find none.

An attack finds images if its PSNR exceeds that of the mean public image and that of the best public match, each by an
interval over paired differences that holds over all attacks compared. If no attack does, the sentence states the gain
that would have been detected (its power), because "nothing found" in a few images is no evidence of safety. A failed or
skipped attack is no evidence either. Attacks that identify the image among candidates are reported separately, with
chance and the claim's bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from ..kinds import KINDS, NoiseVariant
from ..metrics import METRICS
from ..records.details import GainDetail
from ..records.record import Record
from .aggregate import BoardCell, Estimate, over_seeds
from .choices import choices_words, is_choice
from .rows import Row

KIND = KINDS["reconstruction"]
GAINS = METRICS["gain_over_mean"], METRICS["gain_over_match"]
"""Both floors have to be exceeded, each at its own level: no correction for two tests is needed
(intersection-union)."""

POWER = 0.8
"""Probability with which a gain called detectable would have been found."""


def reconstruction_summaries(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns (row, sentence) for each row whose images were attacked, except negative controls.

    Args:
        rows: of the board.
    """
    summaries = []
    for row in rows:
        if row.control == "negative":
            continue
        parts = [part for variant in KIND.variants for part in _variant(row, variant)]
        if parts:
            sentence = "; ".join(parts)
            summaries.append((row.label, f"{sentence[0].upper()}{sentence[1:]}."))
    return summaries


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """Attack with its gains over both floors, simultaneous over the attacks compared."""

    attack: str
    gains: tuple[Estimate, Estimate]
    cell: BoardCell

    @property
    def least(self) -> float:
        """Smaller of the two gains, dB."""
        return min(gain.value or 0.0 for gain in self.gains)

    @property
    def leaks(self) -> bool | None:
        """True if both intervals are above 0; None without intervals."""
        lows = [gain.low for gain in self.gains]
        return None if None in lows else all(low is not None and low > 0 for low in lows)


def _variant(row: Row, variant: NoiseVariant) -> list[str]:
    """Clauses on the images found and picked in a variant of a row's updates; empty if it was not attacked."""
    cells = [cell for cell in row.cells if cell.kind == KIND.name and cell.noise == variant.name]
    choices = [cell for cell in cells if is_choice(cell)]
    # A record that failed before its task was resolved has no variant, and counts against both.
    unmeasured = [r for r in row.unranked if r.kind == KIND.name and r.task.noise in (None, variant.name)]
    clauses = []
    if len(choices) < len(cells) or unmeasured:
        clauses.append(_attack_clause([cell for cell in cells if cell not in choices], unmeasured, variant))
    return clauses + [f"{variant.preposition} noise {words}" for words in choices_words(choices)]


def _attack_clause(cells: Sequence[BoardCell], unmeasured: Sequence[Record], variant: NoiseVariant) -> str:
    """Clause on the result of attacks that reconstruct pictures, or on why it is unknown."""
    words = f"{variant.preposition} noise"
    looks = max(1, sum(over_seeds(GAINS[0].name, cell).value is not None for cell in cells))
    tries, silent = [], list(unmeasured_words(unmeasured))
    for cell in cells:
        first, second = (over_seeds(gain.name, cell, looks=looks) for gain in GAINS)
        gap = first if first.value is None else second
        if gap.value is None:
            silent.append(f"{cell.attack} n/a ({gap.reason})")
        else:
            tries.append(_Attempt(attack=cell.attack or "", gains=(first, second), cell=cell))
    aside = f" ({', '.join(silent)}: no safety)" if silent else ""
    if not tries:
        return f"{words} it is not known what leaks{aside}"
    if leaking := [attempt for attempt in tries if attempt.leaks]:
        return f"{words} it LEAKS, {_success_words(max(leaking, key=lambda attempt: attempt.least))}{aside}"
    judged = [attempt for attempt in tries if attempt.leaks is not None]
    if len(judged) < len(tries):
        without = max((attempt for attempt in tries if attempt.leaks is None), key=lambda attempt: attempt.least)
        return (
            f"{words} no verdict, for {without.attack} gains {_decibels(without.least)} over public images "
            f"with no interval ({without.gains[0].reason}){aside}"
        )
    # The attack that came nearest to a leak.
    nearest = max(judged, key=lambda attempt: attempt.least)
    # A gain above the floor's margin that is not significant leaves the question open; "not shown to find more" would
    # flatter the defense.
    if (floor := METRICS[KIND.main].floor) is not None and nearest.least > floor.margin:
        return (
            f"{words} it is UNDECIDED: {nearest.attack} gains {_decibels(nearest.least)} over public images, and "
            f"{_image_count(nearest)} are too few to tell that from chance{aside}"
        )
    tried = f"{len(judged)} attacks are" if len(judged) > 1 else f"{nearest.attack} is"
    largest = max(detectable(gain, attempt.cell) for attempt in judged for gain in attempt.gains)
    return (
        f"{words} {tried} not shown to find more than public images have (gain measured {_decibels(nearest.least)}, "
        f"{_image_count(nearest)}); {_decibels(largest)} would have been found with a chance of {POWER:.0%}{aside}"
    )


def unmeasured_words(records: Sequence[Record]) -> list[str]:
    """Lists the attacks that failed or were skipped, each once."""
    return list(dict.fromkeys(f"{r.attack.name if r.attack else r.kind} {r.status}" for r in records))


def detectable(gain: Estimate, cell: BoardCell) -> float:
    """Smallest mean gain, dB, whose interval would have been above 0 with probability `POWER`.

    Args:
        gain: with its interval.
        cell: its records.
    """
    tail = 1 - 0.025 / gain.looks
    if gain.interval == "seeds" and gain.ends is not None:
        free = gain.n - 1
        quantile = float(special.stdtrit(free, tail))
        error = (gain.ends[1] - gain.ends[0]) / 2 / quantile
        return (quantile + float(special.stdtrit(free, POWER))) * error
    # With the records' own intervals, averaged and not narrowed, it is the scorer's value, widened for `looks`.
    own = [GainDetail.of(record.metrics[gain.metric].detail).detectable for record in cell.records.values()]
    known = [value for value in own if value is not None]
    more = float(special.ndtri(POWER))
    wider = (float(special.ndtri(tail)) + more) / (float(special.ndtri(0.975)) + more)
    return wider * max(known) if known else float("inf")


def _success_words(attempt: _Attempt) -> str:
    first, second = attempt.gains
    return (
        f"{attempt.attack} finds images {GAINS[0].with_unit(first.words(1))} better than the mean public image and "
        f"{GAINS[1].with_unit(second.words(1))} better than the best public match ({_image_count(attempt)})"
    )


def _image_count(attempt: _Attempt) -> str:
    seeds = attempt.gains[0].n
    images = sorted({record.metrics[GAINS[0].name].n or 1 for record in attempt.cell.records.values()})
    count = "-".join(str(n) for n in dict.fromkeys((images[0], images[-1])))
    plural = "" if images == [1] else "s"
    return f"{seeds} seed{'' if seeds == 1 else 's'} of {count} image{plural}"


def _decibels(value: float) -> str:
    return GAINS[0].with_unit(f"{value:.1f}")
