"""Lanes of proved lower bounds on epsilon: a line each, whose bar is the claim, all on one scale.

Bounds of one budget have one claim and are often 0, so as marks of a scatter plot they would cover one another. A lane
has its numbers in words, and is laid out by the style sheet, so that it fits a phone and paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..board.proved_bound import bound_words
from .plots import breakable, marker

EDGE = 92.0
"""End of the finite values in a track with a strip for infinity, per cent of its width."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Proved bound beside the claim for the same relation of neighbours.

    Attributes:
        label: of the row of the board.
        by: attack, and the trials of its proof.
        proved: lower bound on epsilon.
        claimed: epsilon; infinite without a finite claim.
        colour: number of the mark's colour.
        shape: of the mark, in `SHAPES`.
        hollow: whether only its outline is drawn.
        words: all of that in a sentence, for a tooltip.
    """

    label: str
    by: str
    proved: float
    claimed: float
    colour: int
    shape: str
    hollow: bool
    words: str


def lanes(drawn: Sequence[Lane], *, words: str) -> Markup:
    """Draws lanes below a common scale from 0, with a strip for claims that are not finite, if there are any.

    Args:
        drawn: from top to bottom.
        words: content, for screen readers.
    """
    finite = [value for lane in drawn for value in (lane.proved, lane.claimed) if math.isfinite(value)]
    high = 1.06 * max(0.5, *finite)
    end = EDGE if any(math.isinf(lane.claimed) for lane in drawn) else 100.0
    ticks = _linear_ticks(high)
    labels = [(end * tick / high, f"{tick:g}") for tick in ticks]
    if end < 100:
        labels.append(((end + 100) / 2, "∞"))
    scale = Markup("").join(Markup('<i style="left:{:.2f}%">{}</i>').format(*label) for label in labels)
    head = Markup('<div class="lane scale" aria-hidden="true"><span>ε</span><span class="track">{}</span></div>')
    body = Markup("").join(_lane(lane, high, end) for lane in drawn)
    return Markup('<div class="lanes" role="group" aria-label="{}" style="--step:{:.3f}%">{}{}</div>').format(
        words, end * ticks[1] / high, head.format(scale), body
    )


def _lane(lane: Lane, high: float, end: float) -> Markup:
    above, infinite = lane.proved > lane.claimed, math.isinf(lane.claimed)
    key = marker(lane.colour, lane.shape, hollow=lane.hollow)
    whom = Markup('<span class="whom">{} <b>{}</b> <small>{}</small></span>').format(
        key, breakable(lane.label), breakable(lane.by)
    )
    bar = Markup('<i class="held{}" style="width:{:.2f}%"></i>').format(
        " open" if infinite else "", 100 if infinite else end * lane.claimed / high
    )
    mark = Markup('<i class="at" style="left:{:.2f}%">{}</i>').format(end * lane.proved / high, key)
    numbers = Markup('<span class="said"><b>≥ {}</b> of {}{}</span>').format(
        bound_words(lane.proved),
        "∞" if infinite else f"{lane.claimed:.2f}",
        Markup(" <strong>above its claim</strong>") if above else "",
    )
    return Markup('<div class="lane{}" title="{}">{}<span class="track" aria-hidden="true">{}{}</span>{}</div>').format(
        " above" if above else "", lane.words, whom, bar, mark, numbers
    )


def _linear_ticks(high: float) -> list[float]:
    """Round values from 0 to `high`, about five."""
    step = 10.0 ** math.floor(math.log10(high))
    step = next(size for size in (step / 5, step / 2, step, 2 * step) if high / size <= 6)
    return [i * step for i in range(int(high / step + 1e-9) + 1)]
