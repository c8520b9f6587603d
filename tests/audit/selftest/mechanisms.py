"""Trainers without a network: the Gaussian mechanism on a `LinearLogit`, by its formula."""

from __future__ import annotations

from dataclasses import replace

import torch

from leakbench.audit.plan.gradient_canaries import LinearLogit
from leakbench.audit.selftest.protocol import TrainerAnswer, TrainerClaim
from leakbench.defenses.core.privacy.events import Gaussian


def gaussian_mechanism(seed, *, scale=1.0, rate=None, answers=lambda answer: answer):
    """A trainer that is the mechanism itself, with noise of `scale` times what is claimed, or at another rate."""
    coins = torch.Generator().manual_seed(seed)

    def train(model, examples, task):
        if not isinstance(model, LinearLogit):
            raise ValueError("model must be a LinearLogit")
        rows = -examples[0].flatten(1) / 2  # the gradient of class 0 at zero, where the model stays by and large
        norms = rows.norm(dim=1, keepdim=True)
        rows = rows * (task.clip_norm / norms.clamp(min=task.clip_norm))
        releases = []
        for _ in range(task.steps):
            drawn = torch.rand(len(rows), 1, generator=coins) < (rate or task.sample_rate)
            noise = torch.randn(rows.shape[1], generator=coins, dtype=torch.float64) * task.noise_multiplier * scale
            total = (rows * drawn).double().sum(dim=0) + noise * task.clip_norm
            releases.append((total * 2**20).round() / 2**20 / task.expected_batch)
        events = (Gaussian(task.sample_rate, task.noise_multiplier, task.steps),)
        claim = TrainerClaim(events=events)
        return answers(TrainerAnswer(releases=tuple(releases), buffers={}, claim=claim))

    return train


def claiming(**changes):
    """An answer whose claim is changed."""
    return lambda answer: replace(answer, claim=replace(answer.claim, **changes))
