"""Comparison of reconstructions with guesses made without the update.

The batch is unknown here, so a reconstruction is compared in the space of the update, by the squared whitened distance
that it leaves, relative to that of an update of zeros. A guess is a batch of the same size and labels, drawn from the
public examples, or without any uniformly from the valid inputs. A search over inputs also fits the noise: k free
numbers reduce the distance by about k units of noise variance (chi-square with k degrees of freedom). A reconstruction
is better than a guess only if it is nearer by more than that. Source: likelihood ratio test of nested models (Wilks
1938).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leakbench.attacks.core import Observation, Reconstruction
from leakbench.attacks.core.closed_form.acceptance import ReleaseMatch
from leakbench.defenses.core import keyed
from leakbench.leaderboard.records.update_report import GuessComparison

from ...plan.request import seed_of

GUESSES = 99
"""Number of guessed batches."""

NEARER = 0.9
"""Without noise, the largest ratio of distances at which a reconstruction counts as nearer than the best guess."""

DEVIATIONS = 4.0
"""Standard deviations of chi-square by which a reconstruction must be nearer than the fit of noise alone makes it."""


def compared_with_guesses(target: Observation, reconstruction: Reconstruction, *, seed: int) -> GuessComparison | None:
    """Compares a reconstruction with guesses.

    Args:
        target: the update, with public examples if there are any.
        reconstruction: result of an attack.
        seed: of the guesses.

    Returns:
        The comparison; None if the attack failed or returned no input, or the noise is unknown.
    """
    if reconstruction.status == "failed" or not len(reconstruction.inputs) or target.noise_std is None:
        return None
    match = ReleaseMatch.of(target, target.noise_std)
    if not match.scale > 0:
        return None
    labels = reconstruction.labels.to(target.released.device)
    generator = keyed(seed_of({"seed": seed}, "guesses"))
    residual = match.squared_residual(reconstruction.inputs.to(target.released), labels)
    guessed = min(match.squared_residual(_guess(target, labels, generator), labels) for _ in range(GUESSES))
    return GuessComparison(
        unexplained=residual / match.scale,
        guessed=guessed / match.scale,
        guesses=GUESSES,
        public=target.population is not None,
        better=_nearer(residual, guessed, noise=match.expected, free=reconstruction.inputs.numel()),
    )


def _nearer(residual: float, guessed: float, *, noise: float, free: int) -> bool:
    """Returns whether a distance is below a guess's by more than `free` numbers can gain on `noise` units of noise."""
    if noise <= 0:
        return residual < NEARER * guessed
    fitted = min(float(free), noise)
    return guessed - residual > fitted + DEVIATIONS * math.sqrt(2 * noise)


def _guess(target: Observation, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draws inputs [b, *input_shape]: public examples of each label, or of any label if it has none."""
    population = target.population
    if population is None:
        low, high = target.input_low, target.input_high
        drawn = torch.rand(len(labels), *target.input_shape, generator=generator, dtype=torch.float64)
        return (low + (high - low) * drawn).to(target.released)
    own = (population.labels[None] == labels.to(population.labels)[:, None]).double()
    weights = torch.where(own.any(dim=1, keepdim=True), own, torch.ones_like(own))
    chosen = torch.multinomial(weights.cpu(), 1, generator=generator)[:, 0]
    return population.inputs[chosen.to(population.inputs.device)].to(target.released)
