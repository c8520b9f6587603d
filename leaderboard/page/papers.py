"""Papers' figures beside ours, in standard deviations over seeds, with a sentence where they differ.

A paper's figure is taken as exact: records have no interval of it. Ours differs if it is more than two standard
deviations of single runs away. With a single seed, or seeds that agree to the last digit, there is no such deviation,
and the interval of the record decides. A claimed epsilon is exact accounting, so it differs if it would not be printed
as the paper's, with a decimal or more. Sentences are the publisher's, in `explanations.toml` beside the records.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..board.aggregate import BoardCell, over_seeds
from ..board.rows import Row
from ..metrics import CLAIM, METRICS, reported
from ..records.files import read_bytes
from ..records.validation import RecordError

FILE = "explanations.toml"
LARGEST = 1024 * 1024
"""Bytes of that file."""
MOST = 2.0
"""Standard deviations up to which figures are said to agree."""
UNKNOWN = "We do not know why."

_Name = Annotated[str, Field(min_length=1, max_length=200)]


class PaperExplanation(BaseModel):
    """Sentence on the cells whose figure differs from a paper's; without a budget, on those of every budget."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    suite: _Name
    defense: _Name
    epsilon: float | None = None
    """Requested epsilon."""
    noise_multiplier: float | None = None
    """Requested noise multiplier."""
    metric: _Name
    sentence: Annotated[str, Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _valid(self) -> "PaperExplanation":
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ValueError("must have epsilon or noise_multiplier, not both: a budget is one of them")
        if self.metric not in reported():
            raise ValueError(f"metric must be one that papers report, {', '.join(reported())}, got {self.metric!r}")
        if not self.sentence.strip() or not self.sentence.isprintable():
            raise ValueError("sentence must be a line of printable text")
        return self

    def explains(self, row: Row, metric: str) -> bool:
        """Returns whether it is about a metric of a row."""
        if (self.suite, self.defense, self.metric) != (row.suite, row.defense.name, metric):
            return False
        budget = row.budget
        return (self.epsilon is None or self.epsilon == budget.epsilon) and (
            self.noise_multiplier is None or self.noise_multiplier == budget.noise_multiplier
        )

    @property
    def words(self) -> str:
        """Name of its cells, for messages."""
        budget = {"epsilon": self.epsilon, "noise_multiplier": self.noise_multiplier}
        chosen = [f"{name} {value:g}" for name, value in budget.items() if value is not None]
        return ", ".join([self.suite, self.defense, *chosen, self.metric])


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """Figure of a paper beside ours.

    Attributes:
        suite: of the row.
        defense: its name.
        details: settings and budget by which rows of the defense differ.
        metric: its name.
        attack: that reached ours; empty for no attack.
        source: place in the paper.
        theirs: the paper's.
        ours: mean over seeds; None if not measured.
        reason: why there is none.
        deviation: standard deviation of single runs over seeds; None for a single seed, or equal values.
        interval: 95 % interval of the mean, if any.
        n: number of seeds.
        decided_by: rule by which the figures were compared; None if nothing decides.
        differs: whether they differ by that rule.
        why: sentence on the difference; empty if they agree, or nothing decides.
    """

    suite: str
    defense: str
    details: str
    metric: str
    attack: str
    source: str
    theirs: float
    ours: float | None
    reason: str
    deviation: float | None
    interval: tuple[float, float] | None
    n: int
    decided_by: Literal["seeds", "the record's interval", "printed digits"] | None
    differs: bool
    why: str = ""

    @property
    def label(self) -> str:
        """Label of the metric."""
        return "claimed ε" if self.metric == "epsilon" else METRICS[self.metric].label

    @property
    def deviations(self) -> float | None:
        """Our figure less the paper's, in standard deviations; None without a deviation."""
        return None if self.ours is None or not self.deviation else (self.ours - self.theirs) / self.deviation

    def number(self, value: float) -> str:
        """Formats a value of the metric; digits beyond three are those of the paper's figure."""
        digits = len(f"{self.theirs:g}".partition(".")[2])
        return f"{value:.{max(digits, 3)}f}"


def read_explanations(results: Iterable[Path]) -> tuple[PaperExplanation, ...]:
    """Reads the explanations beside the records of some results.

    Args:
        results: folders, each with or without the file.

    Raises:
        RecordError: a file is bad; the message names file and entry.
    """
    return tuple(explanation for folder in results for explanation in _of_file(folder / FILE))


def _of_file(path: Path) -> Iterator[PaperExplanation]:
    if not path.exists() and not path.is_symlink():
        return
    content = read_bytes(path, "explanations")
    if len(content) > LARGEST:
        raise RecordError(f"{path.name} must have at most {LARGEST} bytes, got {len(content)}")
    try:
        document = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecordError(f"{path.name} must be TOML in UTF-8: {error}") from None
    entries = document.get("explanation")
    if set(document) != {"explanation"} or not isinstance(entries, list):
        raise RecordError(f"{path.name} must hold tables [[explanation]] and nothing else, got {sorted(document)}")
    for number, entry in enumerate(entries, start=1):
        try:
            # TOML's 3 is an integer, and a budget of 3 is meant.
            floats = {k: float(v) for k, v in entry.items() if k in ("epsilon", "noise_multiplier") and type(v) is int}
            yield PaperExplanation.model_validate(entry | floats)
        except (ValidationError, AttributeError) as error:
            problems = error.errors(include_url=False) if isinstance(error, ValidationError) else []
            words = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}".lstrip(": ") for p in problems)
            raise RecordError(f"{path.name}, explanation {number}: {words or 'must be a table'}") from None


def table(rows: Iterable[Row], explanations: Sequence[PaperExplanation] = ()) -> tuple[PaperFigure, ...]:
    """Returns the papers' figures of rows beside ours, in the order of the rows; each figure once per cell.

    Args:
        rows: of a suite's page, or the row of its own page.
        explanations: of the publisher.

    Raises:
        RecordError: two explanations are about the same cell.
    """
    return tuple(
        _compared(row, cell, metric, theirs, source, explanations)
        for row in rows
        for cell in row.cells
        # The record of each seed repeats the figure of its cell.
        for metric, theirs, source in dict.fromkeys(
            (f.metric, f.value, f.source) for record in cell.records.values() for f in record.reported
        )
    )


def refuse_unused(rows: Iterable[Row], explanations: Sequence[PaperExplanation]) -> None:
    """Refuses explanations of no difference, which would outlive the numbers that they are about.

    Args:
        rows: of the whole board.
        explanations: of the publisher.

    Raises:
        RecordError: an explanation is about no cell with a figure, or about figures that agree.
    """
    pairs = [(row, figure) for row in rows for figure in table([row])]
    for explanation in explanations:
        about = [figure for row, figure in pairs if explanation.explains(row, figure.metric)]
        if not any(figure.differs for figure in about):
            problem = "whose figures do not differ" if about else "of which no record has a paper's figure"
            raise RecordError(f"{FILE}: {explanation.words} explains cells {problem}; remove it")


def _compared(
    row: Row, cell: BoardCell, metric: str, theirs: float, source: str, explanations: Sequence[PaperExplanation]
) -> PaperFigure:
    ours, reason, deviation, interval, n = _ours(metric, cell)
    decided_by, differs = None, False
    if ours is None:
        pass
    elif METRICS[metric].kind == CLAIM:
        decided_by, differs = "printed digits", f"{ours:.{_decimals(theirs)}f}" != f"{theirs:.{_decimals(theirs)}f}"
    elif deviation:
        decided_by, differs = "seeds", abs(ours - theirs) > MOST * deviation
    elif interval is not None:
        decided_by, differs = "the record's interval", not interval[0] <= theirs <= interval[1]
    sentences = [explanation for explanation in explanations if explanation.explains(row, metric)]
    if len(sentences) > 1:
        raise RecordError(f"{FILE} must explain each cell once, {sentences[0].words} and {sentences[1].words} overlap")
    return PaperFigure(
        suite=row.suite, defense=row.defense.name, details=row.details, metric=metric, attack=cell.attack or "",
        source=source, theirs=theirs, ours=ours, reason=reason, deviation=deviation, interval=interval, n=n,
        decided_by=decided_by, differs=differs,
        why=(sentences[0].sentence if sentences else UNKNOWN) if differs else "",
    )  # fmt: skip


def _decimals(value: float) -> int:
    """Decimals of a paper's epsilon, no fewer than 1: a number in TOML has lost its last zeros."""
    return max(1, len(f"{value:g}".partition(".")[2]))


def _ours(metric: str, cell: BoardCell) -> tuple[float | None, str, float | None, tuple[float, float] | None, int]:
    """Mean, reason for its absence, deviation of single runs, interval of the mean, number of seeds."""
    if METRICS[metric].kind == CLAIM:
        claims = [record.claim for record in cell.records.values() if record.claim is not None]
        epsilons = [claim.epsilon for claim in claims if claim.epsilon is not None]
        if not claims or len(epsilons) < len(claims):  # an infinite claim makes the largest infinite
            reason = next((claim.reason for claim in claims if claim.epsilon is None), None)
            return None, f"∞: {reason}" if claims else "no claim in these records", None, None, 0
        return max(epsilons), "", None, None, len(epsilons)
    estimate = over_seeds(metric, cell)
    if estimate.value is None:
        return None, estimate.reason or "", None, None, 0
    values = [cell.records[seed].metrics[metric].value for seed in estimate.seeds]
    numbers = [value for value in values if value is not None]
    deviation = stdev(numbers) if len(numbers) > 1 else None
    return fmean(numbers), "", deviation or None, estimate.ends, len(numbers)
