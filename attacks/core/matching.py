"""Gradient matching: how far the update that guessed data would give is from the one that was released.

What an attack minimises is a function of guessed inputs and labels. Both objectives here compare in the released space,
whitened by the noise, so the same lines serve dense, masked, projected and two-part updates; and each simulated example
passes the bound of the defense by itself, as each real one did. `squared_distance` is that of Zhu, Liu & Han, "Deep
Leakage from Gradients", NeurIPS 2019; `direction_mismatch` that of Geiping et al., "Inverting Gradients", NeurIPS 2020.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .observation import Observation


def squared_distance(target: Observation) -> Callable[[Tensor, Tensor], Tensor]:
    """Function (inputs, labels) -> |simulated - released|^2, whitened; differentiable in both.

    Args:
        target: one shared update; `residual` and `simulate` are read.

    Returns:
        Takes inputs [b, *input_shape] and labels, int64 [b] or class probabilities [b, classes]. In units of the
        noise's variance; where there is no noise, of the update squared.
    """
    return lambda inputs, labels: target.residual(target.simulate(inputs, labels)).square().sum()


def direction_mismatch(target: Observation) -> Callable[[Tensor, Tensor], Tensor]:
    """Function (inputs, labels) -> 1 - cos(simulated, released), both whitened; differentiable in both.

    Args:
        target: one shared update; `residual`, `released` and `simulate` are read.

    Returns:
        Takes inputs and labels as `squared_distance` does. In [0, 2]; the size of the update, which depends on clipping
        and on the expected batch, does not count.
    """
    # residual(p) = W (released - p) with W the whitening, so W p = residual(0) - residual(p) for every kind of release.
    shared = target.residual(torch.zeros_like(target.released))
    # clamp: an update of zeros has no direction, and 0 / tiny is 0 where 0 / 0 is NaN.
    direction = shared / shared.norm().clamp(min=torch.finfo(shared.dtype).tiny)

    def mismatch(inputs: Tensor, labels: Tensor) -> Tensor:
        simulated = shared - target.residual(target.simulate(inputs, labels))
        unit = simulated / simulated.norm().clamp(min=torch.finfo(simulated.dtype).tiny)
        # |a - b|^2 / 2 = 1 - cos(a, b) for unit vectors, without the cancellation near 0.
        return (unit - direction).square().sum() / 2

    return mismatch
