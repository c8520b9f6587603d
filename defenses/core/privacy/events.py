"""Gaussian events: what a ledger's entries come to, and what the accountants compose.

Guarantee:
    An event is what one record can have to do with its releases: `count` times a Gaussian mechanism of sensitivity 1,
    on batches that the record joined in the way that the event says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, order=True)
class Gaussian:
    """`count` Gaussian mechanisms with one noise multiplier, each on a random sample.

    Attributes:
        sample_rate: probability of taking part; 1 for no subsampling.
        noise_multiplier: noise standard deviation / sensitivity; positive.
        count: how many.
        most: largest batch, a Poisson sample's surplus being dropped at random; 0 for none.
        examples: number of records that samples are drawn from; needed with `most`.
        allocated: whether one event is an epoch of 1 / sample_rate steps, of which the record is in one, drawn
            uniformly.
        replaced: whether one record is in the place of another (`replace_one`), which doubles the sensitivity; the
            record is then in a step with chance `sample_rate`, in a uniform subset of fixed size or by its own coin.
            Without sampling nothing depends on it.
    """

    sample_rate: float
    noise_multiplier: float
    count: int
    most: int = 0
    examples: int = 0
    allocated: bool = False
    replaced: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.noise_multiplier < math.inf and 0 < self.sample_rate <= 1 and self.count >= 0):
            raise ValueError(
                "a Gaussian event must have a positive finite noise multiplier, a sample rate in (0, 1] and a count of "
                f"at least 0, got {self.noise_multiplier}, {self.sample_rate} and {self.count}"
            )

    @property
    def plain(self) -> bool:
        """Whether a coin of its own decides on each record in each step, and the record is there or not."""
        return not (self.most or self.allocated or self.replaced)

    @property
    def participation(self) -> float:
        """Chance that the record takes part in any of them, rounded up."""
        if self.allocated or self.sample_rate == 1:
            return 1.0
        return min(1.0, -math.expm1(self.count * math.log1p(-self.sample_rate)) * (1 + 1e-12))

    @property
    def unsampled(self) -> Gaussian:
        """The same without amplification, which costs at least as much."""
        return Gaussian(1.0, self.noise_multiplier, self.count)

    @property
    def of_replacement(self) -> Gaussian:
        """The same where one record is in the place of another, which moves a sum by up to twice its bound."""
        if self.replaced:
            return self
        half = self.noise_multiplier / 2
        if self.plain:
            return Gaussian(self.sample_rate, half, self.count, replaced=self.sample_rate < 1)
        return Gaussian(1.0, half, self.count)  # no amplification of these is known here

    @property
    def as_poisson(self) -> Gaussian:
        """The same under Poisson sampling, which costs about as much; a guess to search from, and no bound."""
        if self.replaced:  # has a bound by RDP of its own
            return self
        steps = self.count * round(1 / self.sample_rate) if self.allocated else self.count
        return Gaussian(self.sample_rate, self.noise_multiplier, steps)


def merged(events: Sequence[Gaussian]) -> tuple[Gaussian, ...]:
    """Equal subsampled events counted together, all unsampled ones as one: exact, and fit for caching."""
    precision = math.fsum(e.count / e.noise_multiplier**2 for e in events if e.sample_rate == 1)
    counts: dict[Gaussian, int] = {}
    for e in events:
        # An accountant's cost grows with the number of distinct events; a count is a mere factor or power.
        if e.sample_rate < 1 and e.count:
            one = replace(e, count=1)
            counts[one] = counts.get(one, 0) + e.count
    unsampled = [Gaussian(1.0, precision**-0.5, 1)] if precision else []
    return (*unsampled, *(replace(one, count=n) for one, n in sorted(counts.items())))
