"""Momentum and noise: how far noise displaces the parameters, and rescaling that keeps this when momentum changes.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023, keep C / (1 -
momentum) constant. PyTorch's momentum, v <- momentum v + update, adds each update to the parameters 1 + momentum +
momentum^2 + ... = 1 / (1 - momentum) times in the long run, so the rule keeps the displacement of the parameters by
noise and by clipped gradients.

Deviation: their argument uses 1 / (1 - momentum) as the factor by which momentum amplifies the noise in v. That factor
is 1 / sqrt(1 - momentum^2); 1 / (1 - momentum) is the factor for the noise in the parameters.
"""

from __future__ import annotations

import math


def rescale_for_momentum(clip_norm: float, *, momentum: float, to: float) -> float:
    """Returns the clip norm that moves the parameters as far at another momentum: C (1 - to) / (1 - momentum).

    It may be applied to the learning rate instead, not to both. Gradients below the clip norm move as far only if the
    learning rate is rescaled. Neither holds for Adam, whose step does not grow with the clip norm.

    Args:
        clip_norm: C, in gradient units; or the learning rate.
        momentum: momentum at which C was chosen.
        to: the new momentum.
    """
    _refuse_momentum("momentum", momentum)
    _refuse_momentum("to", to)
    return clip_norm * (1 - to) / (1 - momentum)


def velocity_std(std: float, *, momentum: float) -> float:
    """Returns the standard deviation of the noise in the velocity v, after many steps.

    Args:
        std: standard deviation of the noise in an update.
        momentum: PyTorch's.
    """
    _refuse_momentum("momentum", momentum)
    return std / math.sqrt(1 - momentum**2)


def displacement_std(std: float, *, momentum: float, lr: float, steps: int) -> float:
    """Returns the standard deviation of a parameter's displacement by noise.

    It is lr std sqrt(sum_j ((1 - m^j) / (1 - m))^2). For many steps it is lr std sqrt(steps) / (1 - m).

    Args:
        std: standard deviation of the noise in an update, independent from step to step.
        momentum: m, PyTorch's.
        lr: learning rate, constant.
        steps: number of steps of the run.
    """
    _refuse_momentum("momentum", momentum)
    # With j steps left, the noise of a step has been added j times, with weights 1, m, m^2, ...
    shares = (((1 - momentum**remaining) / (1 - momentum)) ** 2 for remaining in range(1, steps + 1))
    return lr * std * math.sqrt(math.fsum(shares))


def _refuse_momentum(argument: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{argument} must be in [0, 1), got {value}")
