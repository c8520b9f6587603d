"""Privacy claim of an owner: epsilon and delta, optionally with the noise, sampling and steps behind them.

The claim is first checked against itself, without an attack: the stated noise, sampling and steps prove some epsilon,
and claiming a smaller epsilon is an error. Then it is compared with empirical bounds under the same neighboring
relation: pairs of a random split replace a record by another, so an add/remove claim is converted by group privacy of
size two (Dwork & Roth, 2014, Theorem 2.2), or by the trade-off curve of the stated noise, whichever allows less.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.core.privacy.tradeoff import TradeOff, of_events, of_pair
from leakbench.leaderboard.records.audit_findings import ClaimReport, ImpliedPrivacy

from ..catalog.messages import no_such
from ..evidence.estimate import of_replacement

KEYS = ("epsilon", "delta", "relation", "sampling", "sample_rate", "noise_multiplier", "steps")

_SAMPLED = ("poisson", "full")
"""Batch samplings for which the stated noise proves an epsilon without further information."""

SAMPLINGS = (*_SAMPLED, "shuffle", "fixed_size", "cyclic", "balls_in_bins", "other")
"""Batch samplings that a claim may state; for those after the first two, the noise alone proves nothing here."""

_SLACK = 1e-3
"""Relative slack of a claimed epsilon below the epsilon that its noise proves: owners round, and accountants differ."""


@dataclass(frozen=True, kw_only=True)
class StatedClaim:
    """Privacy claim as its owner states it.

    Attributes:
        epsilon: nats.
        delta: in (0, 1).
        relation: neighboring relation, add_remove or replace_one.
        sampling: of batches, from `SAMPLINGS`; empty if not stated.
        sample_rate: expected fraction of the examples in a batch; None if not stated.
        noise_multiplier: standard deviation of the noise / clip norm; None if not stated.
        steps: number of steps; None if not stated.
    """

    epsilon: float
    delta: float = 1e-5
    relation: str = "add_remove"
    sampling: str = ""
    sample_rate: float | None = None
    noise_multiplier: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < math.inf:
            raise ValueError(f"epsilon of the claim must be at least 0 and finite, got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta of the claim must be in (0, 1), got {self.delta}")
        if self.relation not in ("add_remove", "replace_one"):
            raise ValueError(f"relation of the claim must be add_remove or replace_one, got {self.relation!r}")
        if self.sampling and self.sampling not in SAMPLINGS:
            # An unknown sampling would silently leave the stated noise unchecked.
            raise ValueError(f"sampling of the claim: {no_such('sampling', self.sampling, SAMPLINGS)}")
        if self.sampling == "full" and self.sample_rate not in (None, 1.0):
            raise ValueError(f"sample_rate of the claim must be 1 with sampling=full, got {self.sample_rate}")
        if self.sample_rate is not None and not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate of the claim must be in (0, 1], got {self.sample_rate}")
        if self.noise_multiplier is not None and not 0 < self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier of the claim must be positive, got {self.noise_multiplier}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps of the claim must be at least 1, got {self.steps}")

    @classmethod
    def parse(cls, text: str) -> StatedClaim:
        """Parses `epsilon=3,delta=1e-5,sampling=poisson,sample_rate=0.01,noise_multiplier=1.1,steps=1000`.

        Raises:
            ValueError: another format, an unknown or repeated key, or a value out of range.
        """
        fields: dict[str, Any] = {}
        for part in text.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            if not equals or not value:
                raise ValueError(
                    f"--claim must be KEY=VALUE with commas between, as epsilon=3,delta=1e-5, got {text!r}"
                )
            if key not in KEYS:
                raise ValueError(f"--claim: {no_such('key', key, KEYS)}")
            if key in fields:
                raise ValueError(f"--claim has {key} twice")
            try:
                fields[key] = (
                    value.lower() if key in ("relation", "sampling") else int(value) if key == "steps" else float(value)
                )
            except ValueError:
                raise ValueError(f"{key} of --claim must be a number, got {value!r}") from None
        if "epsilon" not in fields:
            raise ValueError(f"--claim must say epsilon, got {text!r}")
        return cls(**fields)

    @property
    def complete(self) -> bool:
        """True if noise, sampling and steps are stated, so that the epsilon that they prove can be computed."""
        stated = (self.noise_multiplier, self.steps, self.sample_rate if self.sampling != "full" else 1.0)
        return self.sampling in _SAMPLED and all(value is not None for value in stated)

    @cached_property
    def curve(self) -> TradeOff | None:
        """Trade-off curve of the stated noise; None if the statement is incomplete."""
        if not self.complete or self.noise_multiplier is None or self.steps is None:
            return None
        rate = 1.0 if self.sampling == "full" else float(self.sample_rate or 1.0)
        return of_events([Gaussian(rate, self.noise_multiplier, self.steps)], self.delta)

    @property
    def trade_off(self) -> TradeOff:
        """Trade-off curve of epsilon and delta alone, a limit on any test of a record's membership."""
        return of_pair(self.epsilon, self.delta)

    @property
    def errors(self) -> tuple[str, ...]:
        """Contradictions within the claim, a sentence each."""
        if self.curve is None or self.relation != "add_remove":
            return ()
        proved = self.curve.epsilon_at(self.delta)
        if proved <= self.epsilon * (1 + _SLACK):
            return ()
        return (
            f"its own noise multiplier of {self.noise_multiplier:g} over {self.steps} steps proves an epsilon of "
            f"{proved:.3g} at delta {self.delta:g}, and {self.epsilon:g} is claimed",
        )

    @property
    def of_replacement(self) -> tuple[float, float]:
        """Pair (epsilon, delta) that the claim implies if a record replaces another."""
        if self.relation == "replace_one":
            return self.epsilon, self.delta
        grouped = of_replacement(self.epsilon, self.delta)
        if self.curve is None or grouped[1] >= 1:
            return grouped
        # Both at the same delta, so that a bound is compared with the smaller epsilon.
        return min(grouped[0], self.curve.epsilon_at(grouped[1], replaced=True)), grouped[1]

    @property
    def report(self) -> ClaimReport:
        """The claim's part of a report."""
        epsilon, delta = self.of_replacement
        implied = ImpliedPrivacy(epsilon=epsilon, delta=delta, relation="replace_one")
        return ClaimReport(**asdict(self), implies=implied, errors=self.errors)
