"""SME: inverts the sum of several local steps by a single gradient, at a point between the weights before and after.

Zhu, Yao & Blaschko, "Surrogate model extension (SME): A fast and accurate weight update attack on federated learning",
ICML 2023 (arXiv:2306.00127). A client that takes many steps shares theta_0 - theta_E, which is no gradient at theta_0.
Somewhere on the way from theta_0 to theta_E the gradient of all its examples has nearly the direction of the whole
update. Minimise 1 - cos(gradient of x at (1 - share) theta_0 + share theta_E, update) + tv_weight * TV(x) over x and
share. The cost does not grow with the local steps, as that of unrolling them does.

Deviation: steps go by the sign of the gradient, in box units, as those of `inverting_gradients`, with its step length;
the authors' code takes steps of 1. Directions are compared in the released space, whitened by the (approximate) noise;
each example's gradient at the surrogate is masked, projected and bounded as the client's defense does. Each start keeps
its iterate with the smallest objective. An update of a single step is a gradient at theta_0: there is no share to
search for, and the attack is `inverting_gradients`.
"""

import math

import torch
from torch import Tensor

from .core import Access, Box, Knows, Observation, Reconstruction, attack, granted, total_variations
from .core.search.gradient_matching import direction_mismatches, surrogate_mismatches
from .core.search.restarts import Descent, best, check_search, normal, side_by_side, signed_adams

HOPELESS = 0.9
"""Mismatch, 1 - cos, that a search must get below; otherwise its result is `degraded`."""


@attack(access=Access.UPDATE, knows=Knows.LABELS | Knows.BATCH_SIZE)
def sme(
    target: Observation,
    generator: torch.Generator,
    *,
    iterations: int = 4800,
    restarts: int = 1,
    tv_weight: float = 1e-3,
    lr: float = 0.1,
    share_start: float = 0.5,
    share_lr: float = 0.001,
    at_once: int | None = None,
) -> Reconstruction:
    """Matches the direction of a client's whole update at a surrogate between its first and last weights.

    Args:
        target: the sum of a client's local steps, or a single step, and the model that they start from.
        generator: source of the random starts.
        iterations: signed Adam steps of each start; the paper takes 1,000.
        restarts: independent starts; the result has the smallest objective.
        tv_weight: weight of the total variation, per box unit. No effect on inputs that are not images.
        lr: first step length of the inputs, in box units.
        share_start: start of the search between the first (0) and the last (1) weights.
        share_lr: first step length of the share; 0 keeps it at its start.
        at_once: starts that descend side by side; the result is the same as in turn, up to rounding. None for 8 on a
            CPU, and 32 on a CUDA device or as many as its memory takes.

    Returns:
        Inputs in model-input units, the given labels, the objective and the mismatch [restarts, iterations].

    Raises:
        ValueError: a setting out of range.
    """
    check_search(iterations, restarts, lr, at_once=at_once)
    for name, value in (("tv_weight", tv_weight), ("share_lr", share_lr)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be at least 0, got {value}")
    if not 0 <= share_start <= 1:
        raise ValueError(f"share_start must be in [0, 1], got {share_start}")
    labels, batch_size = granted(target.labels), granted(target.batch_size)
    box = Box(target.input_low, target.input_high)
    prior = total_variations if len(target.input_shape) >= 2 and tv_weight > 0 else None
    several = target.surrogate is not None
    mismatches = surrogate_mismatches(target) if several else direction_mismatches(target)

    def objectives(points: Tensor, *offsets: Tensor) -> tuple[Tensor, Tensor]:
        # In units in which a step of length `lr` moves the share by `share_lr`.
        shares = [share_start + offset[:, 0] * (share_lr / lr) for offset in offsets]
        distances = mismatches(box.inputs(points), labels, *shares)
        return (distances if prior is None else distances + tv_weight * prior(points)), distances

    def project_(points: Tensor, *offsets: Tensor) -> None:
        box.project_(points)
        for offset in offsets if share_lr > 0 else ():
            offset.clamp_(-share_start * lr / share_lr, (1 - share_start) * lr / share_lr)

    def descend(points: Tensor) -> list[Descent]:
        starts = [points, points.new_zeros(len(points), 1)] if several else [points]
        return signed_adams(objectives, starts, iterations=iterations, lr=lr, project_=project_)

    shape = (batch_size, *target.input_shape)
    starts = [normal(shape, generator, target.released) for _ in range(restarts)]
    descents = side_by_side(starts, at_once, descend)
    return best(descents, hopeless=HOPELESS).reconstruction(box, labels)
