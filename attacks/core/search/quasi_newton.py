"""Descent by L-BFGS from a start: few, accurate steps on a smooth objective, and no step length to tune.

A line search with the strong Wolfe conditions never increases the objective, so the last iterate is the best. A descent
that meets values that are not finite is repeated from another start.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .restarts import Descent, Objective

RESEEDS = 10
"""Largest number of further starts, after a descent that diverges."""

DIVERGED = 10.0
"""A value that exceeds the start's by this factor is divergence."""

HISTORY = 100
"""Number of steps that the curvature is estimated from."""

TRIALS = 25
"""Largest number of lengths tried along a direction."""

START = 1e10
"""Value to which the objective at the start is scaled. PyTorch's L-BFGS skips curvature updates below an absolute
threshold of 1e-10: unscaled, the estimate stops improving long before the search converges.
"""


def quasi_newton(
    objective: Objective,
    start: Callable[[], Sequence[Tensor]],
    *,
    iterations: int,
    lr: float,
    enough: float = -math.inf,
) -> Descent:
    """Descends from a start, and from another if the objective is not finite, or ten times its value at the start.

    Args:
        objective: function of as many unknowns as `start` returns.
        start: draws the first iterate.
        iterations: steps, at least 1, each along a direction.
        lr: length of a first step along a direction, in steps of Newton's method.
        enough: value at which the descent ends, after a step at least.

    Returns:
        The last iterate; its objective is infinite if nothing improved on the start, which must not pass for a result.
        The history repeats its last value if the descent ended early, because no step improved or `enough` was reached.
    """
    descent = _descended(objective, start(), iterations, lr, enough)
    for _ in range(RESEEDS):
        if math.isfinite(descent.objective):
            break
        descent = _descended(objective, start(), iterations, lr, enough)
    return descent


def _descended(objective: Objective, start: Sequence[Tensor], iterations: int, lr: float, enough: float) -> Descent:
    unknowns = [unknown.detach().clone().requires_grad_() for unknown in start]
    # One iteration per call, so that the search can end after any of them; curvature is kept between calls. Tolerances
    # are 0: the loop below ends when no step improves.
    optimizer = torch.optim.LBFGS(
        unknowns,
        lr=lr,
        max_iter=1,
        max_eval=TRIALS,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
    )
    with torch.no_grad():
        value, mismatch = objective(*unknowns)
        first = float(value)
    if not math.isfinite(first):
        return Descent(unknowns=tuple(start), objective=math.inf, history=_padded([mismatch], iterations))
    scale = START / max(abs(first), torch.finfo(unknowns[0].dtype).tiny * START)
    last: list[tuple[list[Tensor], Tensor, Tensor, Sequence[Tensor]]] = []

    def evaluated() -> tuple[Tensor, Tensor]:
        # A call mostly begins at the point that the previous call evaluated last.
        if not last or not all(torch.equal(u, v) for u, v in zip(unknowns, last[0][0], strict=True)):
            value, mismatch = objective(*unknowns)
            gradients = torch.autograd.grad(scale * value, unknowns)
            last[:] = [([u.detach().clone() for u in unknowns], value.detach(), mismatch.detach(), gradients)]
        _, value, mismatch, gradients = last[0]
        for unknown, gradient in zip(unknowns, gradients, strict=True):
            unknown.grad = gradient.clone()
        return value, mismatch

    reached, history = first, [evaluated()[1]]
    for _ in range(iterations):
        before = reached
        optimizer.step(lambda: scale * evaluated()[0])
        value, mismatch = evaluated()
        reached = float(value)
        if not math.isfinite(reached) or reached > DIVERGED * abs(first):
            return Descent(unknowns=tuple(start), objective=math.inf, history=_padded(history, iterations))
        history.append(mismatch)
        if reached >= before or reached <= enough:
            break
    better = reached < first
    return Descent(
        unknowns=tuple(unknown.detach() for unknown in unknowns),
        objective=reached if better else math.inf,
        history=_padded(history, iterations),
    )


def _padded(history: Sequence[Tensor], iterations: int) -> Tensor:
    """Stacks the mismatches of the first iterates; repeats the last if there are fewer."""
    return torch.stack([*history, *[history[-1]] * iterations][:iterations])
