"""Random freeze: random sparsification that cools down over some epochs, and then stays as sparse as it is.

"Differentially Private SGD with Sparse Gradients", arXiv:2112.00845v1: sparsity r* min(e / (e_cool - 1), 1) in epoch e.
With `cooling_epochs` those of the run it is random sparsification.
Guarantee: one Gaussian a step at the defense's multiplier, whatever the mask, which never looks at data.
Caveat: the paper's epsilons are those of Poisson sampling, and its runs deal a shuffled data set out. Its multiplier of
1.54 for the DP-SGD beside it, over 40 epochs of 50 steps, is 2.75 with the one, and what is proved of the other is 25.3
(delta 1e-5).
"""

from __future__ import annotations

from .core import BoundKind, Defense, RandomMasks, bounded, refuse_count
from .random_sparsification import RandomSparsification


def random_freeze(
    *,
    clip_norm: float = 1.0,
    final_sparsity: float = 0.9,
    cooling_epochs: int = 10,
    refreshes: int = 1,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD whose sparsity grows over the first epochs, and is then held.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        final_sparsity: fraction of coordinates dropped from the last epoch of the cooling on.
        cooling_epochs: epochs in which the sparsity grows linearly from 0; 1 drops nothing in the first epoch alone.
        refreshes: new masks per epoch.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    refuse_count("cooling_epochs", cooling_epochs)
    method = RandomSparsification(
        bound=bounded(clip_norm, bound, regulariser),
        masks=RandomMasks(final_sparsity=final_sparsity, refreshes=refreshes, cooling_epochs=cooling_epochs),
    )
    return Defense(method, noise_multiplier, "random_freeze")
