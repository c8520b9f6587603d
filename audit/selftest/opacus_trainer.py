"""Opacus's `PrivacyEngine` as somebody would use it, in the form of a foreign trainer.

Two things are said that its documentation says. It divides by an expected batch that follows from the number of records
(its issues 571 and 819): here by the constant that the battery gives, or adding a record would show. Its noise, without
the secure mode that needs another package, is not claimed to stand up in floating-point arithmetic, so the claim is
about real numbers; `train_as_released` drops that sentence.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
) -> dict[str, Any]:
    """DP-SGD by Opacus, with the claim that is about real numbers.

    Args:
        model: trained in place.
        examples: inputs and labels.
        noise_multiplier: noise standard deviation / clip norm.
        clip_norm: L2, in gradient units.
        sample_rate: of Poisson sampling; one over a whole number.
        steps: of SGD.
        lr: learning rate.
        expected_batch: what sums are divided by.
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
    )
    return released | {"claim": {"arithmetic": "real"}}


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
) -> dict[str, Any]:
    """The same, with a claim about the floating-point numbers that are released."""
    from opacus import PrivacyEngine
    from opacus.data_loader import DPDataLoader

    inputs, labels = examples
    # At the rate itself: that of a loader with batches is one over their number, which a record may change.
    loader = DPDataLoader(TensorDataset(inputs, labels), sample_rate=sample_rate)
    if len(loader) != 1 / sample_rate:
        raise ValueError(f"Opacus samples at one over a whole number, got a sample rate of {sample_rate}")
    releases: list[Tensor] = []
    with warnings.catch_warnings(), _quiet(logging.getLogger("opacus")):
        warnings.simplefilter("ignore")  # Opacus's own: that its secure mode is off, and of hooks
        engine: Any = PrivacyEngine()  # its answers are tuples of three or of four, by its arguments
        wrapped, optimizer, drawn = engine.make_private(
            module=model.train(),
            optimizer=torch.optim.SGD(model.parameters(), lr=lr),
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_norm,
        )
        optimizer.expected_batch_size = expected_batch
        optimizer.attach_step_hook(
            lambda made: releases.append(torch.cat([p.grad.detach().flatten() for p in made.params]))
        )
        while len(releases) < steps:
            for batch, targets in drawn:
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(batch), targets).backward()
                optimizer.step()
                if len(releases) == steps:
                    break
    return {"model": wrapped._module, "releases": releases}


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Without a warning for each empty batch, of which Poisson sampling draws some."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
