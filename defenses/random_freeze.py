"""Random freeze: random sparsification that cools down over some epochs and then keeps its sparsity.

"Differentially Private SGD with Sparse Gradients", arXiv:2112.00845v1: sparsity r* min(e / (e_cool - 1), 1) in epoch e.
If `cooling_epochs` is the whole run, it is random sparsification.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier, for any mask, since masks do not depend on
data.
Caveat: the paper's epsilons assume Poisson sampling, and its runs shuffle the data set and cut it into batches. The
multiplier 1.54 of its DP-SGD baseline, over 40 epochs of 50 steps, gives 2.75 with the former, and 25.3 is proved for
the latter (delta 1e-5).
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
    """DP-SGD whose sparsity grows over the first epochs and is then held.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        final_sparsity: fraction of coordinates dropped from the last epoch of the cooling on.
        cooling_epochs: epochs in which the sparsity grows linearly from 0; 1 drops nothing in the first epoch alone.
        refreshes: new masks per epoch.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    refuse_count("cooling_epochs", cooling_epochs)
    method = RandomSparsification(
        bound=bounded(clip_norm, bound, regulariser),
        masks=RandomMasks(final_sparsity=final_sparsity, refreshes=refreshes, cooling_epochs=cooling_epochs),
    )
    return Defense(method, noise_multiplier, "random_freeze")
