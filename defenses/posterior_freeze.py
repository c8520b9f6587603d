"""Posterior freeze: DP-SGD whose noisy update is restricted to a random, shrinking set of coordinates.

The control in "Differentially Private SGD with Sparse Gradients", arXiv:2112.00845v1: the masks of random
sparsification, applied after clipping and noise. The whole gradient is clipped, so its kept part is never longer than
under random sparsification. The update is as sparse, but the release is dense, and attacks here get the dense release:
a client that sends only the masked update reveals less.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier; the mask is post-processing of DP-SGD.
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
    """DP-SGD with a randomly masked update.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        final_sparsity: fraction of coordinates dropped at the end of the cooling.
        cooling_epochs: epochs in which the sparsity grows linearly from 0; None for the whole run, 0 for no cooling.
        refreshes: new masks per epoch.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = RandomSparsification(
        bound=bounded(clip_norm, bound, regulariser),
        masks=RandomMasks(final_sparsity=final_sparsity, refreshes=refreshes, cooling_epochs=cooling_epochs),
        where="after the noise",
    )
    return Defense(method, noise_multiplier, "posterior_freeze")
