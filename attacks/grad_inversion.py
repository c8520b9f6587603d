"""GradInversion: searches for images that match the shared update and the batch norms' running statistics.

Yin, Mallya, Vahdat, Alvarez, Kautz & Molchanov, "See through Gradients: Image Batch Recovery via GradInversion", CVPR
2021, Algorithm 1: Adam with a warm-up and a cosine decay, noise after every step, from several starts at once. In
addition to the distance of gradients it minimises total variation, the norm of images, the mismatch of batch norm
statistics, and the distance from the consensus of all starts after registration.

Deviation: gradients are compared in the released space, whitened by the noise, as a share of the norm of the released
update, so that weights mean the same for releases of all sizes. Labels are given instead of read off the last layer,
which `label_recovery` does for any batch. Registration is by whole pixels and not by optical flow, whose code was not
published. The unknowns live in units in which the box of valid inputs is [-2, 2], and are kept in it; noise is added to
them in step lengths, because noise added before Adam would be scaled up wherever gradients are small. The result is the
best iterate of the start with the smallest objective.
"""

import math

import torch
from torch import Tensor

from .core import Access, Box, Knows, NotApplicable, Observation, Reconstruction, attack, granted, total_variations
from .core.search.batch_statistics import statistics_mismatches
from .core.search.consensus import consensus
from .core.search.gradient_matching import relative_distances
from .core.search.restarts import best, check_search, jittered_adams, normal

HOPELESS = 0.9
"""Residual, relative to the update's norm, that a search must get below; otherwise its result is `degraded`."""


@attack(access=Access.UPDATE, knows=Knows.LABELS | Knows.BATCH_SIZE)
def grad_inversion(
    target: Observation,
    generator: torch.Generator,
    *,
    iterations: int = 4800,
    restarts: int = 4,
    lr: float = 0.1,
    statistics_weight: float = 0.1,
    tv_weight: float = 1e-4,
    l2_weight: float = 1e-6,
    group_weight: float = 0.01,
    largest_shift: int = 4,
    register_every: int = 50,
    jitter: float = 0.01,
) -> Reconstruction:
    """Matches the shared update and the statistics of batch norms, from several starts with a common consensus.

    Args:
        target: a shared update and the model it was taken at, which has batch norms.
        generator: source of the random starts, and of the noise between steps.
        iterations: Adam steps of all starts side by side; the paper takes 20,000.
        restarts: number of starts; the result has the smallest objective.
        lr: largest step length, in box units.
        statistics_weight: weight of the mismatch of batch norm statistics, in units of activations.
        tv_weight: weight of the total variation, per box unit; no effect on inputs that are not images.
        l2_weight: weight of the mean square, in box units.
        group_weight: weight of the root mean square distance from the consensus, in box units; no effect on a single
            start.
        largest_shift: largest shift of an image in registration, in pixels along an axis.
        register_every: steps between two registrations.
        jitter: standard deviation of the noise between steps, in step lengths.

    Returns:
        Inputs in model-input units, the given labels, the objective without the pull to the consensus, and the
        mismatch, a share of the update's norm [restarts, iterations].

    Raises:
        ValueError: a setting out of range.
        NotApplicable: the network has no batch norm.
    """
    check_search(iterations, restarts, lr, register_every=register_every)
    weights = {"statistics_weight": statistics_weight, "tv_weight": tv_weight, "l2_weight": l2_weight}
    weights |= {"group_weight": group_weight, "jitter": jitter, "largest_shift": largest_shift}
    for name, value in weights.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be at least 0 and finite, got {value}")
    labels, batch_size = granted(target.labels), granted(target.batch_size)
    if target.structure is None:
        raise NotApplicable("the network must be known for its batch norms to be read, and it is not")
    statistics = statistics_mismatches(target.structure().known_network(), target.released)
    box, distances = Box(target.input_low, target.input_high), relative_distances(target)
    is_image = len(target.input_shape) >= 2
    agreed: list[Tensor] = []
    calls = 0

    def objectives(points: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        inputs = box.inputs(points)
        mismatch = distances(inputs, labels)
        value = mismatch + l2_weight * points.square().flatten(1).mean(dim=1)
        if tv_weight > 0 and is_image:
            value = value + tv_weight * total_variations(points)
        if statistics_weight > 0:
            value = value + statistics_weight * statistics(inputs)
        if group_weight > 0 and restarts > 1:
            if calls % register_every == 0:
                agreed[:] = [consensus(points.detach(), largest_shift)]
            pull = (points - agreed[0]).square().flatten(1).mean(dim=1).clamp(min=1e-20).sqrt()
            # The pull contributes its gradient and no value: objectives of a start would not be comparable if the other
            # starts changed them.
            value = value + group_weight * (pull - pull.detach())
        calls += 1
        return value, mismatch

    starts = normal((restarts, batch_size, *target.input_shape), generator, target.released)
    descents = jittered_adams(
        objectives, [starts], generator, iterations=iterations, lr=lr, jitter=jitter, project_=box.project_
    )
    return best(descents, hopeless=HOPELESS).reconstruction(box, labels)
