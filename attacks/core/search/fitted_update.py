"""Least-squares fit of the shared update: over inputs, and over labels if none are given.

Under Gaussian noise the whitened squared distance is twice the negative log-likelihood of the guess, so its minimum is
the maximum likelihood estimate. At the private inputs it is chi-square distributed, with a degree of freedom per noisy
number: a search that gets below the expectation is fitting the noise, and ends.
"""

import math

import torch
from torch import Tensor

from ..closed_form.recursion.operations import KINKED
from ..targets.observation import Observation
from ..targets.results import Reconstruction
from ..threat_model.requires import granted
from .gradient_matching import expected_distance, squared_distance
from .image_priors import Box
from .quasi_newton import quasi_newton
from .restarts import Descent, best_of, normal

HOPELESS = 0.5
"""Largest squared residual, relative to the update's squared norm, of a result that is not `degraded`."""

SPREAD = 0.1
"""Standard deviation of a start around the middle of the box of valid inputs, in units in which the box is [-2, 2]."""


def fitted_update(
    target: Observation,
    generator: torch.Generator,
    *,
    labels: Tensor | None,
    iterations: int,
    restarts: int,
    lr: float,
) -> Reconstruction:
    """Minimises the squared distance from the released update by L-BFGS.

    Args:
        target: a shared update; its batch size and noise are read.
        generator: source of the starts.
        labels: labels of the batch, int64 [b], kept fixed; None to search for class probabilities, too.
        iterations: L-BFGS steps of each start.
        restarts: independent starts; the result has the smallest distance.
        lr: first length along each direction, in steps of Newton's method.

    Returns:
        The last iterate of the best start, moved into the box; the distance there, and its ratio to the expectation
        under noise if there is any. `degraded` if most of the update is left unexplained, if a random start already
        explains it up to noise, and for networks with ReLUs; `failed` if no start improved.
    """
    batch_size, noise_std = granted(target.batch_size), granted(target.noise_std)
    box, distance = Box(target.input_low, target.input_high), squared_distance(target)
    with torch.no_grad():
        # Distances are relative to that of an update of zeros, because line searches use absolute tolerances and
        # updates have all sizes.
        unit = distance_of_nothing(target)
        expected = expected_distance(target, noise_std)

    def guess(point: Tensor, *logits: Tensor) -> tuple[Tensor, Tensor]:
        return box.inputs(point), labels if labels is not None else logits[0].softmax(dim=1)

    def objective(*unknowns: Tensor) -> tuple[Tensor, Tensor]:
        value = distance(*guess(*unknowns)) / unit
        return value, value

    def start() -> list[Tensor]:
        point = SPREAD * normal((batch_size, *target.input_shape), generator, target.released)
        return (
            [point] if labels is not None else [point, normal((batch_size, target.classes), generator, target.released)]
        )

    enough = expected / unit if expected > 0 else 0.0

    def descend() -> Descent:
        return quasi_newton(objective, start, iterations=iterations, lr=lr, enough=enough)

    best_descent = best_of(restarts, descend, hopeless=HOPELESS)
    inputs, probabilities = guess(*best_descent.unknowns)
    inputs = box.clamp(inputs)
    with torch.no_grad():
        reached = float(distance(inputs, probabilities))
    status = best_descent.status
    if not math.isfinite(reached):
        status = "failed"
    elif status == "ok" and (best_descent.history[:, 0].min() <= enough or _is_kinked(target)):
        status = "degraded"
    return Reconstruction(
        inputs=inputs,
        labels=labels if labels is not None else probabilities.argmax(dim=1),
        objective=reached,
        restarts=restarts,
        history=best_descent.history,
        status=status,
        residual_ratio=reached / expected if expected > 0 and status != "failed" else None,
    )


def distance_of_nothing(target: Observation) -> float:
    """Returns the squared distance of an update of zeros from the release; 1 if the release is zero, too."""
    return float(target.residual(torch.zeros_like(target.released)).square().sum()) or 1.0


def _is_kinked(target: Observation) -> bool:
    """Returns whether the network is known to have an activation without a second derivative."""
    network = None if target.structure is None else target.structure().network
    return network is not None and any(operation.kind in KINKED for operation in network.operations)
