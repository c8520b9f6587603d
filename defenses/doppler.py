"""DOPPLER: a low-pass filter of the noisy updates, which keeps the gradients and attenuates the noise.

Zhang, Bu, Hong & Razaviyayn, "DOPPLER: Differentially Private Optimizers with Low-pass Filter for Privacy Noise
Reduction", NeurIPS 2024, arXiv:2408.13460: m_t = -sum_j a_j m_(t-j) + sum_j b_j g_(t-j), divided by the filter's step
response c_t, so that the first steps are not too short. Gradients change slowly from step to step, noise does not.
Guarantee: each step is a Gaussian mechanism, as in DP-SGD: the filter reads releases alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .core import Block, Bound, BoundKind, Context, Defense, Everything, Offset, StepPlan, bounded

Seen = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Doppler:
    """DP-SGD's block; state: last updates, last filtered updates, and the filter's step response."""

    bound: Bound
    feedback: tuple[float, ...]
    forward: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.forward or not self.forward[0] > 0 or not all(map(math.isfinite, self.forward + self.feedback)):
            raise ValueError(f"forward must begin with a positive number, and all be finite, got {self.forward}")
        poles = np.abs(np.roots([1.0, *self.feedback]))
        if len(poles) and not poles.max() < 1:
            raise ValueError(f"feedback must be that of a filter that forgets, got {self.feedback}, whose memory grows")
        if not all(value > 0 for value in self._answers(200)):
            raise ValueError(f"the filter must answer ones by positive numbers, got {self.feedback} and {self.forward}")
        gain = sum(self.forward) / (1 + sum(self.feedback)) if 1 + sum(self.feedback) else math.inf
        if not 0 < gain < math.inf:
            raise ValueError(f"the filter must let a constant through, and not grow, got a gain of {gain}")

    def start(self, context: Context) -> Seen:
        """Returns an empty memory."""
        return {"updates": [], "filtered": [], "ones": []}

    def plan(self, state: Seen, context: Context) -> tuple[Seen, StepPlan]:
        """Plans DP-SGD's block, filtered after the noise."""
        zero = torch.zeros(context.dim, device=context.device)
        memory = sum((b * u for b, u in zip(self.forward[1:], state["updates"], strict=False)), start=zero)
        memory = memory - sum((a * m for a, m in zip(self.feedback, state["filtered"], strict=False)), start=zero)
        ones = self._ones(state)
        post = Offset(memory / ones, self.forward[0] / ones)
        return state, StepPlan(Block(codec=Everything(context.dim), bound=self.bound), post=post)

    def observe(self, state: Seen, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Seen:
        """Returns the last few updates, filtered updates and step responses, newest first."""
        ones, back = self._ones(state), len(self.feedback)
        return {
            "updates": [noisy[0] / context.expected_batch, *state["updates"]][: len(self.forward) - 1],
            "filtered": [update * ones, *state["filtered"]][:back],
            "ones": [ones, *state["ones"]][:back],
        }

    def _answers(self, steps: int) -> list[float]:
        """First values of the filter's step response."""
        response: list[float] = []
        for _ in range(steps):
            response.append(self._ones({"ones": response[::-1]}))
        return response

    def _ones(self, state: Seen) -> float:
        """Step response of the filter, the divisor of an update."""
        # The paper's c_t: the input is 1 in all earlier steps too, and outputs before the first step are 0.
        return sum(self.forward) - sum(a * c for a, c in zip(self.feedback, state["ones"], strict=False))


def doppler(
    *,
    clip_norm: float = 1.0,
    feedback: list[float] | None = None,
    forward: list[float] | None = None,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD with its updates low-pass filtered.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        feedback: coefficients a_1, a_2, ... of the last filtered updates; [-0.9] if None.
        forward: coefficients b_0, b_1, ... of this update and the last updates; [0.05, 0.05] if None.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = Doppler(
        bound=bounded(clip_norm, bound, regulariser),
        feedback=tuple([-0.9] if feedback is None else feedback),
        forward=tuple([0.05, 0.05] if forward is None else forward),
    )
    return Defense(method, noise_multiplier)
