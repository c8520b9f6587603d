"""Gaussian events: the charges of a ledger in the form that accountants compose.

Guarantee:
    An event bounds the influence of a record on its releases: they reveal at most as much as `count` Gaussian
    mechanisms of sensitivity 1, on batches that the record joins as the event states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, order=True)
class Gaussian:
    """`count` Gaussian mechanisms with the same noise multiplier, each on a random sample.

    Attributes:
        sample_rate: probability that the record is in a sample; 1 for no subsampling.
        noise_multiplier: noise standard deviation / sensitivity; positive.
        count: number of mechanisms.
        most: largest batch of truncated Poisson sampling, whose surplus is dropped at random; 0 for none.
        examples: number of records that samples are drawn from; needed with `most`.
        allocated: whether each of the `count` mechanisms is an epoch of 1 / sample_rate steps, with the record in a
            single, uniformly drawn step (random allocation).
        replaced: whether neighbours differ by a replaced record (`replace_one`) under sampling without replacement or
            Poisson sampling; `noise_multiplier` is then relative to twice the bound. Irrelevant without sampling.
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
        """True for Poisson sampling or no sampling, under add/remove or zero-out."""
        return not (self.most or self.allocated or self.replaced)

    @property
    def participation(self) -> float:
        """Probability that the record takes part in at least a single mechanism, rounded up."""
        if self.allocated or self.sample_rate == 1:
            return 1.0
        return min(1.0, -math.expm1(self.count * math.log1p(-self.sample_rate)) * (1 + 1e-12))

    @property
    def of_replacement(self) -> Gaussian:
        """The event under replace-one: half the multiplier, because a sum moves by up to twice the bound."""
        if self.replaced:
            return self
        half = self.noise_multiplier / 2
        if self.plain:
            return Gaussian(self.sample_rate, half, self.count, replaced=self.sample_rate < 1)
        return Gaussian(1.0, half, self.count)  # no bound with amplification is implemented for replace-one

    @property
    def as_poisson(self) -> Gaussian:
        """The event under Poisson sampling, at about the same cost: an order of magnitude, not a bound."""
        if self.replaced:  # it has its own bound by RDP
            return self
        steps = self.count * round(1 / self.sample_rate) if self.allocated else self.count
        return Gaussian(self.sample_rate, self.noise_multiplier, steps)


def merged(events: Sequence[Gaussian]) -> tuple[Gaussian, ...]:
    """Merges equal subsampled events by their counts, and all unsampled events into a Gaussian; both are exact."""
    precision = math.fsum(e.count / e.noise_multiplier**2 for e in events if e.sample_rate == 1)
    counts: dict[Gaussian, int] = {}
    for e in events:
        # An accountant's cost grows with the number of distinct events; a count is only a factor or a power.
        if e.sample_rate < 1 and e.count:
            event = replace(e, count=1)
            counts[event] = counts.get(event, 0) + e.count
    unsampled = [Gaussian(1.0, precision**-0.5, 1)] if precision else []
    return (*unsampled, *(replace(event, count=n) for event, n in sorted(counts.items())))
