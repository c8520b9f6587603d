"""Opacus's `PrivacyEngine` in ordinary use, as a foreign trainer.

Opacus divides by an expected batch computed from the number of records (its issues 571 and 819); here the divisor is
the battery's constant, because adding a record would otherwise be detected. Opacus claims noise that is secure in
floating-point arithmetic only in its secure mode, which needs another package. The mode is off here, as by default, so
the claim is about real numbers; `train_as_released` omits that restriction, and `train_ghost` uses ghost clipping.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def train(
    model: nn.Module,
    examples: tuple[Tensor, Tensor],
    *,
    noise_multiplier: float,
    clip_norm: float,
    sample_rate: float,
    steps: int,
    lr: float,
    expected_batch: float,
    ghost: bool = False,
) -> dict[str, Any]:
    """Trains by DP-SGD with Opacus, under a claim about real numbers.

    Args:
        model: trained in place.
        examples: inputs and labels.
        noise_multiplier: noise standard deviation / clip norm.
        clip_norm: L2, in gradient units.
        sample_rate: of Poisson sampling; 1 / integer.
        steps: of SGD.
        lr: learning rate.
        expected_batch: divisor of sums.
        ghost: whether norms come from inner products between positions, without per-example gradients.
    """
    released = train_as_released(
        model,
        examples,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        sample_rate=sample_rate,
        steps=steps,
        lr=lr,
        expected_batch=expected_batch,
        ghost=ghost,
    )
    return released | {"claim": {"arithmetic": "real"}}


train_ghost = partial(train, ghost=True)
"""Trains as `train`, by ghost clipping."""


def train_as_released(
    model: nn.Module,
    examples: tuple[Tensor, Tensor],
    *,
    noise_multiplier: float,
    clip_norm: float,
    sample_rate: float,
    steps: int,
    lr: float,
    expected_batch: float,
    ghost: bool = False,
) -> dict[str, Any]:
    """Trains likewise, under a claim about the released floating-point numbers."""
    from opacus import PrivacyEngine
    from opacus.data_loader import DPDataLoader

    inputs, labels = examples
    # The rate is passed on: for a loader with batches Opacus takes 1 / their number, which a record may change.
    loader = DPDataLoader(TensorDataset(inputs, labels), sample_rate=sample_rate)
    if len(loader) != 1 / sample_rate:
        raise ValueError(f"Opacus samples at one over a whole number, got a sample rate of {sample_rate}")
    releases: list[Tensor] = []
    with warnings.catch_warnings(), _quiet(logging.getLogger("opacus")):
        warnings.simplefilter("ignore")  # Opacus's own, about its secure mode being off and about hooks
        engine: Any = PrivacyEngine()  # returns tuples of three or of four, depending on its arguments
        wrapped, optimizer, *criterion, drawn = engine.make_private(
            module=model.train(),
            optimizer=torch.optim.SGD(model.parameters(), lr=lr),
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_norm,
            **({"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss()} if ghost else {}),
        )
        loss = criterion[0] if ghost else nn.functional.cross_entropy
        optimizer.expected_batch_size = expected_batch
        optimizer.attach_step_hook(
            lambda dp_optimizer: releases.append(torch.cat([p.grad.detach().flatten() for p in dp_optimizer.params]))
        )
        while len(releases) < steps:
            for batch, targets in drawn:
                optimizer.zero_grad()
                loss(wrapped(batch), targets).backward()
                optimizer.step()
                if len(releases) == steps:
                    break
    return {"model": wrapped._module, "releases": releases}


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Suppresses a warning for each empty batch, which Poisson sampling sometimes draws."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
