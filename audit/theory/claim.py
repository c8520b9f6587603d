"""A claim, the comparisons that decide it, and the verdict that follows from them.

What is measured comes from executed plans: methods by name, their codecs, the engine's noise. What it is compared with
is computed another way, from formulas and plain linear algebra. Where the measurement is a mean over draws, its
tolerance is five standard errors, which a fresh seed exceeds once in 1.7 million comparisons; elsewhere it is what
rounding leaves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from leakbench.defenses.core import Context, Defense, Noise, keyed, seed_from, seeded

from ..catalog import methods as catalog

STANDARD_ERRORS = 5.0
"""Half width of the interval of a mean, in standard errors."""

Words = Literal["holds", "holds with a caveat", "does not hold"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a claim is measured with.

    Attributes:
        seed: of everything that is drawn.
        device: where rows and models lie.
        data: name of the data set whose gradients are looked at; None for the one that is here.
        draws: releases that a mean is over; sizes of other samples follow from it.
        defense: makes a defense by name, as the catalogue does; tests hand in broken ones.
    """

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data: str | None = None
    draws: int = 800
    defense: Callable[..., Defense] = catalog.defense

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.draws < 2:
            raise ValueError(f"draws must be at least 2, got {self.draws}")

    def coins(self, *what: object) -> torch.Generator:
        """A generator on the CPU of its own for each purpose."""
        return keyed(seed_from("theory", self.seed, *what))

    def noise(self, *what: object) -> Noise:
        """A source of the engine's noise for each purpose."""
        return seeded(seed_from("theory noise", self.seed, *what))

    def context(self, dim: int, step: int = 0, steps: int | None = None) -> Context:
        """The context of a step, each an epoch of its own, so that masks are drawn anew."""
        most = self.draws if steps is None else steps
        return Context(step=step, steps=most, dim=dim, seed=seed_from("theory", self.seed), device=self.device)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measured number beside the one that it should be.

    Attributes:
        what: is measured, with its unit where it has one.
        measured: on our plans.
        closed: computed independently.
        relation: that the claim asserts of the two.
        tolerance: absolute, half the width of the interval where there are draws.
        n: draws; None where nothing is random.
    """

    what: str
    measured: float
    closed: float
    relation: Literal["=", "<=", ">="] = "="
    tolerance: float = 0.0
    n: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the relation is within the tolerance; not of a NaN."""
        if self.relation == "=":
            return abs(self.measured - self.closed) <= self.tolerance
        excess = self.measured - self.closed if self.relation == "<=" else self.closed - self.measured
        return excess <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN and no infinity: None stands for them."""
        numbers = {"measured": self.measured, "closed": self.closed, "tolerance": self.tolerance}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {"what": self.what, "relation": self.relation, **finite, "n": self.n, "holds": self.holds}


def mean_of(
    what: str, values: Float[Tensor, " n"], closed: float, relation: Literal["=", "<=", ">="] = "="
) -> Comparison:
    """Compares the mean of independent draws."""
    n = len(values)
    error = float(values.std()) / math.sqrt(n)
    # Where all draws are alike, rounding is what is left.
    tolerance = STANDARD_ERRORS * error + 1e-9 * abs(closed)
    return Comparison(
        what=what, measured=float(values.mean()), closed=closed, relation=relation, tolerance=tolerance, n=n
    )


def spread_of(what: str, values: Float[Tensor, " n"], closed: float) -> Comparison:
    """Compares the root mean square of independent draws around 0."""
    squares = values.double().square()
    n, mean = len(values), float(squares.mean())
    measured = math.sqrt(mean)
    # By the delta method: d sqrt(m) = dm / (2 sqrt(m)).
    error = float(squares.std()) / math.sqrt(n) / (2 * measured) if measured else 0.0
    return Comparison(what=what, measured=measured, closed=closed, tolerance=STANDARD_ERRORS * error, n=n)


def ratio_of(what: str, above: Float[Tensor, " n"], below: Float[Tensor, " n"], closed: float) -> Comparison:
    """Compares the ratio of two means of independent draws."""
    # By the delta method: its error is that of (above - ratio * below) / E below.
    ratio, scale = float(above.mean() / below.mean()), float(below.mean())
    found = mean_of(what, (above - ratio * below) / scale, 0.0)
    return replace(found, measured=ratio, closed=closed)


class Panel(NamedTuple):
    """A scatter of points in the plane beside their mirror images.

    Attributes:
        title: above it.
        points: [n, 2].
    """

    title: str
    points: Tensor


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a claim's function finds.

    Attributes:
        comparisons: all of which must hold for the claim to hold.
        instead: what is true where the claim is not.
        remark: what is particular to this measurement, a clause of the caveat; empty for nothing.
        panels: for the picture.
    """

    comparisons: tuple[Comparison, ...]
    instead: tuple[Comparison, ...] = ()
    remark: str = ""
    panels: tuple[Panel, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TheoryClaim:
    """A statement and how it is measured.

    Attributes:
        name: of the function that measures it.
        about: the statement, in a sentence.
        section: of the specification of the defenses.
        should_hold: whether it is known to be true; False for what a paper has wrong, None for a question to data.
        caveat: what must be said with it, or why it does not hold, in a sentence.
        measure: the function.
    """

    name: str
    about: str
    section: str
    should_hold: bool | None
    caveat: str
    measure: Callable[[Setup], Measured]

    def examine(self, setup: Setup) -> Examined:
        """Measures the claim."""
        started = time.perf_counter()
        found = self.measure(setup)
        return Examined(claim=self, found=found, seconds=time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A claim with what was measured.

    Attributes:
        claim: the statement.
        found: its comparisons.
        seconds: of the measurement.
    """

    claim: TheoryClaim
    found: Measured
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether every comparison of the statement itself does."""
        return all(comparison.holds for comparison in self.found.comparisons)

    @property
    def caveat(self) -> str:
        """What is to be said with the verdict."""
        return "; ".join(clause for clause in (self.claim.caveat, self.found.remark) if clause)

    @property
    def verdict(self) -> Words:
        """In the words of the table."""
        if not self.holds:
            return "does not hold"
        return "holds with a caveat" if self.caveat else "holds"

    @property
    def expected(self) -> bool:
        """Whether the verdict is the known one, and what is true instead of a wrong statement was found."""
        known = self.claim.should_hold is None or self.claim.should_hold == self.holds
        return known and all(comparison.holds for comparison in self.found.instead)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without the seconds, so that a seed gives one document."""
        return {
            "name": self.claim.name,
            "section": self.claim.section,
            "claim": self.claim.about,
            "verdict": self.verdict,
            "should_hold": self.claim.should_hold,
            "expected": self.expected,
            "caveat": self.caveat or None,
            "comparisons": [comparison.to_dict() for comparison in self.found.comparisons],
            "instead": [comparison.to_dict() for comparison in self.found.instead],
        }


def claim(
    section: str, about: str, *, should_hold: bool | None = True, caveat: str = ""
) -> Callable[[Callable[[Setup], Measured]], TheoryClaim]:
    """Makes a claim of the function that measures it; its name is the claim's.

    Args:
        section: of the specification of the defenses.
        about: the statement, in a sentence.
        should_hold: False for what a paper has wrong, None for a question to data.
        caveat: what must be said with it, or why it does not hold.
    """

    def decorated(measure: Callable[[Setup], Measured]) -> TheoryClaim:
        return TheoryClaim(
            name=measure.__name__,
            about=about,
            section=section,
            should_hold=should_hold,
            caveat=caveat,
            measure=measure,
        )

    return decorated
