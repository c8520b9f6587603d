"""Percentile filter: clients drop the small entries of their update and cut off the large ones; there is no noise.

`PercentilePrivacy` of NVIDIA FLARE (2.9.0), after Shokri & Shmatikov, "Privacy-Preserving Deep Learning", CCS 2015,
whose selection had noise. Per local step, entries below a percentile of the absolute values become 0, others are cut to
[-limit, limit]; the message has all numbers, zeros included.
Deviation: a scalar parameter is filtered as all others.
Guarantee: none: local steps are plain SGD, so epsilon is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .core import Context, Federated, Message, Round, decoded_message, dense_message, refuse_norm
from .sgd import sgd


@dataclass(frozen=True, kw_only=True)
class PercentileMessages:
    """Messages of the filtered displacement.

    Attributes:
        percentile: percentage of the entries to drop, in [0, 100].
        limit: largest absolute value of an entry a local step, in units of the parameters.
    """

    percentile: float
    limit: float

    def __post_init__(self) -> None:
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"percentile must be in [0, 100], got {self.percentile}")
        refuse_norm("limit", self.limit)

    def prepare(self, context: Context) -> None:
        """Returns None: nothing is shared."""

    def check(self, round: Round) -> None:
        """Accepts every round."""

    def encode(self, delta: Tensor, round: Round) -> Message:
        """Returns all numbers of the filtered displacement."""
        a_step = delta / round.local_steps
        cutoff = torch.quantile(a_step.abs().double(), self.percentile / 100)
        kept = torch.where(a_step.abs() < cutoff, 0.0, a_step)
        return dense_message(kept.clamp(-self.limit, self.limit) * round.local_steps)

    def decode(self, message: Message, round: Round) -> Tensor:
        """Returns the numbers."""
        return decoded_message(message, round.context.dim)


def percentile_filter(*, percentile: float = 10.0, limit: float = 0.01) -> Federated:
    """Federated averaging of plain SGD with NVIDIA FLARE's percentile filter; epsilon is infinite.

    Args:
        percentile: percentage of an update's entries that are dropped, the smallest.
        limit: gamma, largest absolute value of an entry a local step, in units of the parameters.
    """
    messages = PercentileMessages(percentile=percentile, limit=limit)
    return Federated(client=sgd(), messages=messages, name="percentile_filter")
