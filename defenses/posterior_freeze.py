"""Posterior freeze: DP-SGD, of whose noisy update a random, shrinking set of coordinates is kept.

The control in "Differentially Private SGD with Sparse Gradients", arXiv:2112.00845v1: the masks of random
sparsification after clipping and noise. The clip norm is spent on whole gradients, so that what is kept of one is
never longer than under random sparsification. The update is as sparse; the release is dense, and that is what is
attacked here: a client that sends the masked update alone shows less.
Guarantee: one Gaussian a step at the defense's multiplier; the mask is post-processing of DP-SGD.
"""

from __future__ import annotations

from .core import BoundKind, Defense, RandomMasks, bounded
from .random_sparsification import RandomSparsification


def posterior_freeze(
    *,
    clip_norm: float = 1.0,
    final_sparsity: float = 0.9,
    cooling_epochs: int | None = None,
    refreshes: int = 1,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD with its update masked at random.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        final_sparsity: fraction of coordinates dropped at the end of the cooling.
        cooling_epochs: epochs in which the sparsity grows linearly from 0; all of the run if None, 0 for none.
        refreshes: new masks per epoch.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    method = RandomSparsification(
        bound=bounded(clip_norm, bound, regulariser),
        masks=RandomMasks(final_sparsity=final_sparsity, refreshes=refreshes, cooling_epochs=cooling_epochs),
        where="after the noise",
    )
    return Defense(method, noise_multiplier, "posterior_freeze")
