"""Claim of a paper, the comparisons that decide it, and the resulting verdict.

Measurements come from executed plans: methods by name, their codecs, the engine's noise. The closed forms are computed
independently, from formulas and plain linear algebra. If the measurement is a mean over draws, its tolerance is five
standard errors, which a fresh seed exceeds once in 1.7 million comparisons; otherwise the tolerance covers rounding.
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
    """Settings of the measurement of a claim.

    Attributes:
        seed: of all random draws.
        device: of rows and models.
        data: name of the data set whose gradients are examined; None for `symmetry.default_data`.
        draws: number of releases in a mean; sizes of other samples follow from it.
        defense: builds a defense by name, as the catalogue does; tests pass broken defenses.
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

    def generator(self, *name: object) -> torch.Generator:
        """Returns a CPU generator of its own for each purpose."""
        return keyed(seed_from("theory", self.seed, *name))

    def noise(self, *name: object) -> Noise:
        """Returns a source of the engine's noise for each purpose."""
        return seeded(seed_from("theory noise", self.seed, *name))

    def context(self, dim: int, step: int = 0, steps: int | None = None) -> Context:
        """Returns the context of a step; each step is an epoch, so that masks are drawn anew."""
        most = self.draws if steps is None else steps
        return Context(step=step, steps=most, dim=dim, seed=seed_from("theory", self.seed), device=self.device)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a measured number with its closed form.

    Attributes:
        what: measured quantity, with its unit if it has one.
        measured: value on our plans.
        closed: value computed independently.
        relation: between the two, as claimed.
        tolerance: absolute; half the width of the interval if there are draws.
        n: number of draws; None if nothing is random.
    """

    what: str
    measured: float
    closed: float
    relation: Literal["=", "<=", ">="] = "="
    tolerance: float = 0.0
    n: int | None = None

    @property
    def holds(self) -> bool:
        """True if the relation holds within the tolerance; False for NaN."""
        if self.relation == "=":
            return abs(self.measured - self.closed) <= self.tolerance
        excess = self.measured - self.closed if self.relation == "<=" else self.closed - self.measured
        return excess <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Converts it for JSON, with None for NaN and infinity."""
        numbers = {"measured": self.measured, "closed": self.closed, "tolerance": self.tolerance}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {"what": self.what, "relation": self.relation, **finite, "n": self.n, "holds": self.holds}


def mean_of(
    quantity: str, values: Float[Tensor, " n"], closed: float, relation: Literal["=", "<=", ">="] = "="
) -> Comparison:
    """Compares the mean of independent draws with its closed form, to within five standard errors."""
    n = len(values)
    error = float(values.std()) / math.sqrt(n)
    # For equal draws the tolerance covers rounding alone.
    tolerance = STANDARD_ERRORS * error + 1e-9 * abs(closed)
    return Comparison(
        what=quantity, measured=float(values.mean()), closed=closed, relation=relation, tolerance=tolerance, n=n
    )


def spread_of(quantity: str, values: Float[Tensor, " n"], closed: float) -> Comparison:
    """Compares the root mean square of independent draws around 0 with its closed form."""
    squares = values.double().square()
    n, mean = len(values), float(squares.mean())
    measured = math.sqrt(mean)
    # By the delta method: d sqrt(m) = dm / (2 sqrt(m)).
    error = float(squares.std()) / math.sqrt(n) / (2 * measured) if measured else 0.0
    return Comparison(what=quantity, measured=measured, closed=closed, tolerance=STANDARD_ERRORS * error, n=n)


def ratio_of(quantity: str, above: Float[Tensor, " n"], below: Float[Tensor, " n"], closed: float) -> Comparison:
    """Compares the ratio of two means of independent draws with its closed form."""
    # By the delta method: the error is that of (above - ratio * below) / E below.
    ratio, scale = float(above.mean() / below.mean()), float(below.mean())
    comparison = mean_of(quantity, (above - ratio * below) / scale, 0.0)
    return replace(comparison, measured=ratio, closed=closed)


class Panel(NamedTuple):
    """Scatter plot of points in the plane with their mirror images.

    Attributes:
        title: of the plot.
        points: [n, 2].
    """

    title: str
    points: Tensor


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Comparisons that the function of a claim returns.

    Attributes:
        comparisons: they must all hold for the claim to hold.
        instead: true statements in place of a false claim.
        remark: circumstances of this measurement, a clause of the caveat; empty for none.
        panels: scatter plots for the figure; empty for most claims.
    """

    comparisons: tuple[Comparison, ...]
    instead: tuple[Comparison, ...] = ()
    remark: str = ""
    panels: tuple[Panel, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TheoryClaim:
    """Statement of a paper and the function that measures it.

    Attributes:
        name: of the function that measures it.
        about: statement, in a sentence.
        section: number of its topic, such as 3.4, under which the tables list it.
        should_hold: whether it is known to be true; False for an error in a paper, None for a question to data.
        caveat: qualification, or reason why it does not hold, in a sentence.
        measure: function that measures it.
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
        measured = self.measure(setup)
        return Examined(claim=self, measured=measured, seconds=time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class Examined:
    """Claim with its measurement.

    Attributes:
        claim: statement.
        measured: comparisons.
        seconds: of the measurement.
    """

    claim: TheoryClaim
    measured: Measured
    seconds: float

    @property
    def holds(self) -> bool:
        """True if every comparison of the statement itself holds."""
        return all(comparison.holds for comparison in self.measured.comparisons)

    @property
    def caveat(self) -> str:
        """Caveat of the verdict."""
        return "; ".join(clause for clause in (self.claim.caveat, self.measured.remark) if clause)

    @property
    def verdict(self) -> Words:
        """Verdict in the words of the table."""
        if not self.holds:
            return "does not hold"
        return "holds with a caveat" if self.caveat else "holds"

    @property
    def expected(self) -> bool:
        """True if the verdict is the known one, and the corrected form of a false statement was confirmed."""
        known = self.claim.should_hold is None or self.claim.should_hold == self.holds
        return known and all(comparison.holds for comparison in self.measured.instead)

    def to_dict(self) -> dict[str, Any]:
        """Converts it for JSON; without the seconds, so that a seed determines the document."""
        return {
            "name": self.claim.name,
            "section": self.claim.section,
            "claim": self.claim.about,
            "verdict": self.verdict,
            "should_hold": self.claim.should_hold,
            "expected": self.expected,
            "caveat": self.caveat or None,
            "comparisons": [comparison.to_dict() for comparison in self.measured.comparisons],
            "instead": [comparison.to_dict() for comparison in self.measured.instead],
        }


def claim(
    section: str, about: str, *, should_hold: bool | None = True, caveat: str = ""
) -> Callable[[Callable[[Setup], Measured]], TheoryClaim]:
    """Decorator that makes a claim of the function that measures it; the claim has the function's name.

    Args:
        section: number of its topic, such as 3.4, under which the tables list it.
        about: statement, in a sentence.
        should_hold: False for an error in a paper, None for a question to data.
        caveat: qualification, or reason why it does not hold.
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
