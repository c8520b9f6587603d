"""Search for unknowns that minimise an objective: descent from a start, and the best of several starts.

The unknowns of an attack are tensors: inputs, and labels if they are not known. An objective maps them to the minimised
value, priors included, and the mismatch alone, which shows whether the release was explained. Only the attacker's own
objective selects the iterate and the start, because the attacker has no other criterion.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..targets.results import Reconstruction, Status
from .image_priors import Box

Objective = Callable[..., tuple[Tensor, Tensor]]
"""(*unknowns) -> the minimised value, and the mismatch in it; scalars, the first differentiable."""

SETTLED = 10
"""The first 1 / SETTLED of the iterations does not count for the status: early mismatches carry no information."""

WARM_UP = 50
"""Largest number of steps of a warm-up."""


def check_search(iterations: int, restarts: int, lr: float, **counts: int | None) -> None:
    """Refuses settings of a search out of range, before anything is computed; `counts` are others that count."""
    for name, value in {"iterations": iterations, "restarts": restarts, **counts}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be positive and finite, got {lr}")


def normal(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """Returns standard normal numbers, on the device and in the dtype of a tensor."""
    # Drawn on the CPU in float64: a seed gives the same search on every device and in every dtype.
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(like)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Result of the descent from a start.

    Attributes:
        unknowns: the iterate with the smallest objective.
        objective: its value; infinite if no iterate had a finite value, or nothing ever moved.
        history: [iterations], the mismatch of every iterate.
    """

    unknowns: tuple[Tensor, ...]
    objective: float
    history: Tensor


def side_by_side(
    starts: Sequence[Tensor], at_once: int | None, descend: Callable[[Tensor], list[Descent]]
) -> list[Descent]:
    """Descends from all starts, some of them side by side; fewer if a device's memory does not suffice.

    Args:
        starts: points of the search, of one shape.
        at_once: number of starts side by side; None for 8 on a CPU and 32 on a CUDA device, where a step of one start
            takes as long as that of many.
        descend: descends from the starts that are stacked in a tensor.
    """
    points = torch.stack(list(starts))
    size = at_once or (32 if points.is_cuda else 8)
    while True:
        try:
            return [descent for part in points.split(size) for descent in descend(part)]
        except torch.OutOfMemoryError:
            if size == 1 or at_once is not None:
                raise
        size //= 2


@dataclass(frozen=True, kw_only=True)
class Search:
    """Result of the best of several starts.

    Attributes:
        unknowns: best iterate of the start with the smallest objective.
        objective: its value.
        history: [restarts, iterations], the mismatch of every iterate.
        status: as in `Reconstruction`.
    """

    unknowns: tuple[Tensor, ...]
    objective: float
    history: Tensor
    status: Status

    def reconstruction(self, box: Box, labels: Tensor) -> Reconstruction:
        """Returns the inputs of the best start, whose first unknowns are inputs in box units."""
        return Reconstruction(
            # Projected in box units already, whose rounding may leave the range of inputs by a last digit.
            inputs=box.clamp(box.inputs(self.unknowns[0])),
            labels=labels,
            objective=self.objective,
            restarts=len(self.history),
            history=self.history,
            status=self.status,
        )


def best_of(restarts: int, descend: Callable[[], Descent], *, hopeless: float = math.inf) -> Search:
    """Descends from several starts in turn, and keeps the start with the smallest objective.

    Args:
        restarts: number of starts, at least 1.
        descend: draws a start and descends from it; all descents take as many iterations.
        hopeless: as for `best`.
    """
    # In turn from the same generator, so that more restarts repeat the first.
    return best([descend() for _ in range(restarts)], hopeless=hopeless)


def best(descents: Sequence[Descent], *, hopeless: float = math.inf) -> Search:
    """Returns the descent with the smallest objective.

    Args:
        descents: descents of as many iterations each; at least 1.
        hopeless: mismatch that shows that nothing was found: if none is at most this after the first tenth of the
            iterations, the status is `degraded`.

    Returns:
        The best start, with status `failed` if no start gave a finite objective, and `degraded` if the mismatch never
        got below `hopeless` or never changed.
    """
    best = min(descents, key=lambda descent: descent.objective)
    history = torch.stack([descent.history for descent in descents])
    later = history[:, history.shape[1] // SETTLED :]
    if not math.isfinite(best.objective):
        status: Status = "failed"
    # The smallest mismatch of all restarts counts: a single match is enough. A constant mismatch does not depend on the
    # unknowns, so a prior alone moved them.
    elif (history.numel() > 1 and bool((history == history[0, 0]).all())) or later.nan_to_num(
        nan=math.inf
    ).min() > hopeless:
        status = "degraded"
    else:
        status = "ok"
    return Search(unknowns=best.unknowns, objective=best.objective, history=history, status=status)


def signed_adam(
    objective: Objective,
    start: Sequence[Tensor],
    *,
    iterations: int,
    lr: float,
    project_: Callable[..., object] | None = None,
) -> Descent:
    """Runs `signed_adams` from a single start, by an objective of that start."""

    def of_one(*unknowns: Tensor) -> tuple[Tensor, Tensor]:
        value, mismatch = objective(*(unknown[0] for unknown in unknowns))
        return value.unsqueeze(0), mismatch.unsqueeze(0)

    starts = [unknown.unsqueeze(0) for unknown in start]
    return signed_adams(of_one, starts, iterations=iterations, lr=lr, project_=project_)[0]


def signed_adams(
    objectives: Objective,
    starts: Sequence[Tensor],
    *,
    iterations: int,
    lr: float,
    project_: Callable[..., object] | None = None,
) -> list[Descent]:
    """Runs Adam on the sign of the gradient, its step length cut to a tenth at 3/8, 5/8 and 7/8 of the way.

    The sign removes the scale of the gradient, which is tiny wherever the simulated update is large. Starts descend
    side by side, in one evaluation per iteration, and independently: all operations are elementwise.

    Args:
        objectives: function of as many unknowns as `starts` has -> values and mismatches, both [r].
        starts: the first iterates [r, ...] of each unknown; written into.
        iterations: steps, at least 1.
        lr: first step length, in units of the unknowns.
        project_: moves (*unknowns) to the nearest valid values, in place; without it all are valid.

    Returns:
        The best iterate from each start. Its objective is infinite if no gradient was finite and nonzero: the iterate
        is then the random start, which must not pass for a reconstruction.
    """
    cuts = [iterations * part // 8 for part in (3, 5, 7)]
    return _adams(
        objectives,
        starts,
        iterations=iterations,
        lr=lr,
        project_=project_,
        schedule=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=cuts, gamma=0.1),
        direction=torch.sign,
    )


def jittered_adams(
    objectives: Objective,
    starts: Sequence[Tensor],
    generator: torch.Generator,
    *,
    iterations: int,
    lr: float,
    jitter: float,
    project_: Callable[..., object] | None = None,
) -> list[Descent]:
    """Runs Adam with a warm-up and cosine decay of its step length, and Gaussian noise after every step.

    Args:
        objectives: as for `signed_adams`; the value of a start may depend on the others.
        starts: the first iterates [r, ...] of each unknown; written into.
        generator: source of the noise.
        iterations: steps, at least 1; a tenth of them, 50 at most, are the warm-up.
        lr: largest step length, in units of the unknowns.
        jitter: standard deviation of the noise, in step lengths: it decays as they do.
        project_: as for `signed_adams`.

    Returns:
        The same as `signed_adams`.
    """
    warm = min(WARM_UP, iterations // 10)

    def scaled(step: int) -> float:
        if step < warm:
            return (step + 1) / (warm + 1)
        return (1 + math.cos(math.pi * (step - warm) / (iterations - warm))) / 2

    def disturb_(unknown: Tensor, step_length: float) -> None:
        unknown.add_(normal(unknown.shape, generator, unknown), alpha=jitter * step_length)

    return _adams(
        objectives,
        starts,
        iterations=iterations,
        lr=lr,
        project_=project_,
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, scaled),
        direction=torch.clone,
        disturb_=disturb_ if jitter > 0 else None,
    )


def _adams(
    objectives: Objective,
    starts: Sequence[Tensor],
    *,
    iterations: int,
    lr: float,
    project_: Callable[..., object] | None,
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
    direction: Callable[[Tensor], Tensor],
    disturb_: Callable[[Tensor, float], None] | None = None,
) -> list[Descent]:
    """Runs Adam from several starts, along `direction` of the gradient; `disturb_` gets the length of the step."""
    project_ = project_ or (lambda *unknowns: None)
    project_(*starts)
    unknowns = [start.requires_grad_() for start in starts]
    optimizer = torch.optim.Adam(unknowns, lr=lr)
    step_lengths = schedule(optimizer)
    count = len(unknowns[0])
    best_values = unknowns[0].new_full((count,), math.inf)
    best_unknowns = [unknown.detach().clone() for unknown in unknowns]
    history, moved = [], torch.zeros(count, dtype=torch.bool, device=best_values.device)
    for _ in range(iterations):
        values, mismatches = objectives(*unknowns)
        gradients = torch.autograd.grad(values.sum(), unknowns)
        # Kept on the device: a comparison on the host would wait for the device in every iteration.
        better = values.detach() < best_values
        # NaN is below nothing, so an iterate without a finite objective is never kept.
        best_values = torch.where(better, values.detach(), best_values)
        best_unknowns = [
            torch.where(better.view(-1, *[1] * (u.ndim - 1)), u.detach(), b)
            for u, b in zip(unknowns, best_unknowns, strict=True)
        ]
        history.append(mismatches.detach())
        parts = [gradient.flatten(1) for gradient in gradients]
        finite = torch.stack([part.isfinite().all(dim=1) for part in parts]).all(dim=0)
        moved = moved | (finite & torch.stack([part.any(dim=1) for part in parts]).any(dim=0))
        for unknown, gradient in zip(unknowns, gradients, strict=True):
            # PyTorch's sign of NaN is 0 and documented nowhere; a NaN would stay in Adam's moments for good.
            unknown.grad = direction(gradient).nan_to_num_(posinf=0.0, neginf=0.0)
        optimizer.step()
        with torch.no_grad():
            if disturb_ is not None:
                length = float(step_lengths.get_last_lr()[0])
                for unknown in unknowns:
                    disturb_(unknown, length)
            project_(*unknowns)
        step_lengths.step()
    best_objectives = torch.where(moved, best_values, math.inf).tolist()
    return [
        Descent(unknowns=tuple(u[r] for u in best_unknowns), objective=best_objectives[r], history=of_one)
        for r, of_one in enumerate(torch.stack(history, dim=1))
    ]
