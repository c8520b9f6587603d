"""Inverting Gradients: search for the images whose update points in the direction of the one that was shared.

Geiping, Bauermeister, Dröge & Moeller, "Inverting Gradients: How easy is it to break privacy in federated
learning?", NeurIPS 2020 (arXiv:2003.14053), Section 5: minimise 1 - cos(update of x, shared update) +
tv_weight * TV(x) by Adam on the sign of the gradient, with x projected to the box of valid inputs and the
step length cut at 3/8, 5/8 and 7/8 of the way.

The directions are compared in the released space, whitened by the noise, so the same lines serve dense,
masked, projected and two-part updates: `residual` is affine, and its linear part is the whitening. Each
simulated example passes the bound of the defense by itself, as each real one did.

Deviation: the unknowns live in units in which the box of valid inputs is [-2, 2], as for images normalised by
their standard deviation. Step length, start and TV weight refer to these units whatever the range of the
inputs is. Of one start the iterate with the smallest objective is kept, where the paper keeps the last; all
is chosen by the attack's own objective.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .core import Access, Box, Knows, Observation, Reconstruction, attack, granted, total_variation

HOPELESS = 0.9
"""A mismatch that stays above this after a tenth of the iterations: nothing was found, `degraded`."""


@attack(access=Access.UPDATE, knows=Knows.LABELS | Knows.BATCH_SIZE)
def inverting_gradients(
    target: Observation,
    coins: torch.Generator,
    *,
    iterations: int = 4800,
    restarts: int = 1,
    tv_weight: float = 1e-3,
    lr: float = 0.1,
) -> Reconstruction:
    """Matches the direction of the shared update under a total variation prior, for known labels.

    Args:
        target: one shared update and the model it was taken at.
        coins: source of the random starts.
        iterations: signed Adam steps of each start; the paper's long runs take 24,000.
        restarts: independent starts, of which the one with the smallest objective is returned.
        tv_weight: weight of the total variation, per box unit; the paper sweeps 1e-1 to 1e-6. No effect on
            inputs that are not images.
        lr: first step length, in box units.

    Returns:
        Inputs in model-input units, the given labels, the objective and the mismatch [restarts, iterations].

    Raises:
        ValueError: a setting out of range.
    """
    for name, value, rule in (
        ("iterations", iterations, 1),
        ("restarts", restarts, 1),
        ("tv_weight", tv_weight, 0),
    ):
        if not (value >= rule and math.isfinite(value)):
            raise ValueError(f"{name} must be at least {rule}, got {value}")
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    labels, batch_size = granted(target.labels), granted(target.batch_size)
    box = Box(target.input_low, target.input_high)
    mismatch = direction_mismatch(target, labels)
    shape = (batch_size, *target.input_shape)
    is_image = len(target.input_shape) >= 2

    def objective(point: Tensor) -> tuple[Tensor, Tensor]:
        distance = mismatch(box.inputs(point))
        if not (is_image and tv_weight > 0):
            return distance, distance
        return distance + tv_weight * total_variation(point), distance

    runs = []
    for _ in range(restarts):
        start = torch.randn(shape, generator=coins, dtype=torch.float64).to(target.released)
        runs.append(_descend(objective, start, box, iterations, lr))
    point, best, _ = min(runs, key=lambda run: run[1])
    history = torch.stack([run[2] for run in runs])
    if not math.isfinite(best):
        status = "failed"
    elif history[:, iterations // 10 :].nan_to_num(nan=math.inf).min() > HOPELESS:
        status = "degraded"
    else:
        status = "ok"
    return Reconstruction(
        inputs=box.clamp(box.inputs(point)),
        labels=labels,
        objective=best,
        restarts=restarts,
        history=history,
        status=status,
    )


def direction_mismatch(target: Observation, labels: Tensor) -> Callable[[Tensor], Tensor]:
    """Function inputs [b, *input_shape] -> 1 - cos(simulated, released), both whitened; differentiable.

    Args:
        target: one shared update; `residual`, `released` and `simulate` are read.
        labels: int64 [b].
    """
    # residual(p) = W (released - p) with W the whitening, so W p = residual(0) - residual(p) for every kind
    # of release.
    shared = target.residual(torch.zeros_like(target.released))
    direction = shared / shared.norm().clamp(min=torch.finfo(shared.dtype).tiny)

    def mismatch(inputs: Tensor) -> Tensor:
        simulated = shared - target.residual(target.simulate(inputs, labels))
        unit = simulated / simulated.norm().clamp(min=torch.finfo(simulated.dtype).tiny)
        # |a - b|^2 / 2 = 1 - cos(a, b) for unit vectors, without the cancellation near 0.
        return (unit - direction).square().sum() / 2

    return mismatch


def _descend(
    objective: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, box: Box, iterations: int, lr: float
) -> tuple[Tensor, float, Tensor]:
    """Signed Adam with projection: the best point seen, its objective, and the mismatch of every iterate."""
    point = box.project_(start).requires_grad_()
    optimizer = torch.optim.Adam([point], lr=lr)
    cuts = [iterations * part // 8 for part in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=cuts, gamma=0.1)
    best, best_point, history = point.new_full((), math.inf), point.detach().clone(), []
    moved = torch.zeros((), dtype=torch.bool, device=point.device)
    for _ in range(iterations):
        value, distance = objective(point)
        (gradient,) = torch.autograd.grad(value, point)
        # Tensors all the way: a comparison on the host would wait for the device in every iteration.
        better = value.detach() < best
        best = torch.where(better, value.detach(), best)
        best_point = torch.where(better, point.detach(), best_point)
        history.append(distance.detach())
        moved = moved | gradient.isfinite().all()
        point.grad = gradient.sign().nan_to_num_()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            box.project_(point)
    # Without one finite gradient the best point is the random start, which must not pass for a
    # reconstruction.
    return best_point, float(best) if moved else math.inf, torch.stack(history)
