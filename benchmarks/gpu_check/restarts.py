"""An iteration of Inverting Gradients with 1, 8 and 32 restarts: side by side, and in turn."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator

from .. import models
from ..speed.harness import clock_of, interleaved
from ..speed.inversion import IN_TURN, SIDE_BY_SIDE, both_ways
from ..speed.networks import CLASSES, COLOUR
from .rows import CheckedFigure, CheckedRow, PartSettings

RESTARTS, SMALL_RESTARTS = (1, 8, 32), (1, 2)
NETWORK = "convnet"
_LIMIT = 1e-9  # of the largest derivative, in float64
_ROUNDS = 9


def measure(settings: PartSettings) -> Iterator[CheckedRow]:
    """Yields a row for each number of restarts.

    Args:
        settings: of the part.
    """
    numbers = SMALL_RESTARTS if settings.small else RESTARTS
    model = models.build(NETWORK, input_shape=COLOUR, classes=CLASSES, seed=0).to(settings.device)
    exact = copy.deepcopy(model).double()
    for restarts in numbers:
        in_turn, side_by_side, *_ = both_ways(NETWORK, model, "dense", settings.device, restarts)
        timed = interleaved(
            {SIDE_BY_SIDE: lambda way=side_by_side: way, IN_TURN: lambda way=in_turn: way},
            rounds=_ROUNDS,
            budget=settings.seconds / (2 * len(numbers)),
            clock=clock_of(settings.device),
        )
        figures: dict[str, CheckedFigure] = {
            f"{way}, ms a restart": 1e3 * statistics.median(seconds) / restarts
            for way, seconds in timed.seconds.items()
        }
        exactly_in_turn, exactly_side_by_side, *_ = both_ways(NETWORK, exact, "dense", settings.device, restarts)
        expected = exactly_in_turn()
        error = float((exactly_side_by_side() - expected).abs().max() / expected.abs().max())
        wrong = [f"{way}: {failure}" for way, failure in timed.failed.items()]
        if not error <= _LIMIT:
            wrong.append(f"derivatives in float64 differ by {error:.2g}, and {_LIMIT:g} is allowed")
        yield CheckedRow(
            name=f"{NETWORK}, {restarts} restarts", figures={**figures, "difference": error}, wrong=tuple(wrong)
        )
