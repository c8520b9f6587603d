"""Inverting Gradients: searches for images whose update points in the direction of the shared update.

Geiping, Bauermeister, Dröge & Moeller, "Inverting Gradients: How easy is it to break privacy in federated learning?",
NeurIPS 2020 (arXiv:2003.14053), Section 5: minimise 1 - cos(update of x, shared update) + tv_weight * TV(x) by Adam on
the sign of the gradient, with x projected to the box of valid inputs and the step length cut at 3/8, 5/8 and 7/8 of the
way.

Deviation: directions are compared in the released space, whitened by the noise, so that the attack also runs on masked,
projected and two-part updates. The unknowns live in units in which the box of valid inputs is [-2, 2], as for images
normalised by their standard deviation: step length, start and TV weight refer to these units for inputs of any range.
Each start keeps its iterate with the smallest objective, while the paper keeps the last.

Deviation: `objective = "likelihood"` takes the whitened squared distance, which under Gaussian noise is the negative
logarithm of the likelihood of the guess, clip factors included, and without noise the objective of Zhu, Liu & Han,
"Deep Leakage from Gradients", NeurIPS 2019. It also compares the length of the update: for one example with an unknown
clip factor the cosine alone is already maximum likelihood. The distance is divided by twice the squared length of the
release: close to a match it then equals 1 - cos, so that `tv_weight` has the same meaning.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from .core import Access, Box, Knows, Observation, Reconstruction, attack, granted, total_variations
from .core.search.gradient_matching import LayerWeights, direction_mismatches, layer_weights, squared_distances
from .core.search.restarts import Descent, best, check_search, normal, side_by_side, signed_adams

HOPELESS = 0.9
"""Mismatch, 1 - cos, that a search must get below; otherwise its result is `degraded`."""


@attack(access=Access.UPDATE, knows=Knows.LABELS | Knows.BATCH_SIZE)
def inverting_gradients(
    target: Observation,
    generator: torch.Generator,
    *,
    iterations: int = 4800,
    restarts: int = 1,
    tv_weight: float = 1e-3,
    lr: float = 0.1,
    weighting: LayerWeights = "equal",
    objective: Literal["cosine", "likelihood"] = "cosine",
    at_once: int | None = None,
) -> Reconstruction:
    """Matches the direction of the shared update under a total variation prior, for known labels.

    Args:
        target: a shared update and the model it was taken at.
        generator: source of the random starts.
        iterations: signed Adam steps of each start; the paper's long runs take 24,000.
        restarts: independent starts; the result has the smallest objective.
        tv_weight: weight of the total variation, per box unit; the paper sweeps 1e-1 to 1e-6. No effect on inputs that
            are not images.
        lr: first step length, in box units.
        weighting: weights of parameter tensors in the cosine, from the input on: all `equal`, or decreasing `linear`ly
            or `exp`onentially; for updates that release coordinates.
        objective: comparison of directions by their `cosine`, or of whole updates by their `likelihood`.
        at_once: starts that descend side by side, which takes less time and more memory than in turn; the result is the
            same, up to rounding. None for 8 on a CPU, and 32 on a CUDA device or as many as its memory takes.

    Returns:
        Inputs in model-input units, the given labels, the objective and the mismatch, 1 - cos, [restarts, iterations].

    Raises:
        ValueError: a setting out of range.
        NotApplicable: weights by layer for an update that is not coordinates of a gradient.
    """
    check_search(iterations, restarts, lr, at_once=at_once)
    if not (tv_weight >= 0 and math.isfinite(tv_weight)):
        raise ValueError(f"tv_weight must be at least 0, got {tv_weight}")
    if objective == "likelihood" and weighting != "equal":
        raise ValueError(f"weighting must be 'equal' where objective is 'likelihood', got {weighting!r}")
    labels, batch_size = granted(target.labels), granted(target.batch_size)
    box = Box(target.input_low, target.input_high)
    if objective == "likelihood":
        compared = squared_distances(target)
    else:
        mismatches = direction_mismatches(target, layer_weights(target, weighting))
        compared = lambda inputs, labels: (mismatches(inputs, labels),) * 2  # noqa: E731
    # Total variation is of neighbouring pixels, which a vector of features does not have.
    prior = total_variations if len(target.input_shape) >= 2 and tv_weight > 0 else None

    def objectives(points: Tensor) -> tuple[Tensor, Tensor]:
        values, distances = compared(box.inputs(points), labels)
        return (values if prior is None else values + tv_weight * prior(points)), distances

    def descend(points: Tensor) -> list[Descent]:
        return signed_adams(objectives, [points], iterations=iterations, lr=lr, project_=box.project_)

    # In turn from the same generator, so that more restarts repeat the first.
    shape = (batch_size, *target.input_shape)
    starts = [normal(shape, generator, target.released) for _ in range(restarts)]
    descents = side_by_side(starts, at_once, descend)
    return best(descents, hopeless=HOPELESS).reconstruction(box, labels)
