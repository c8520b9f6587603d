"""Adaptive clipping: the clip norm follows a quantile of the gradient norms, read off a noisy count.

Andrew, Thakkar, McMahan & Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021, Algorithm
1. A second block of the same batch counts the gradients within the clip norm, as +1/2 or -1/2 each, so that one
example moves it by 1/2; the clip norm then moves geometrically towards the quantile. `adapted` of
`leakbench.defenses.core` does the same to any other method of one block: `adapted(pcdp(rank=50))`.
Deviation: the count's noise follows from the step's multiplier sigma and `share`, where the paper gives it as a number
of examples s_b: that is a share of (sigma / (2 s_b))^2. Its s_b = B / 20, at B = 200 and sigma = 1, is a share of
1/400. Its first clip norm is 0.1, and here that of other methods, 1; rate and quantile are the paper's. A norm up to
1/2048 beyond the clip norm counts in part, so that rounding turns nobody from one to the other.
Caveat: noise goes with the clip norm. Where the learning rate is so large that noise makes the gradients grow, the clip
norm follows them, and the noise it: on 10,000 digits at sigma 14 and B 1000 updates grew to 6 times the first at lr 0.1
(accuracy 0.88), to 35 times at 0.3 (0.16), where a fixed clip norm of 1 is best at lr 1.
Guarantee: one Gaussian a step at the defense's multiplier, for both blocks together: gradients have noise of sigma /
sqrt(1 - share), the count sigma / sqrt(share), in units of what an example moves them by.
"""

from __future__ import annotations

from .core import Adapted, BoundKind, Defense, Whole, bounded


def adaptive_clipping(
    *,
    clip_norm: float = 1.0,
    quantile: float = 0.5,
    rate: float = 0.2,
    share: float = 0.01,
    lowest: float = 1e-3,
    highest: float = 1e3,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD whose clip norm follows the gradients.

    Args:
        clip_norm: C of the first step, L2, in gradient units.
        quantile: fraction of the gradients that is to be within the clip norm.
        rate: eta_C, of the geometric step towards it; 0 leaves the clip norm where it is.
        share: fraction of a step's 1 / sigma^2 spent on the count.
        lowest: the clip norm falls no further, in gradient units; fixed beforehand.
        highest: it rises no further.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: of the latter two, in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: of the step as one Gaussian; None until it is calibrated.
    """
    if not lowest <= clip_norm <= highest:  # refused here, not in the first step
        raise ValueError(
            f"clip_norm must lie between lowest and highest, got {clip_norm} between {lowest} and {highest}"
        )
    method = Adapted(
        method=Whole(bound=bounded(clip_norm, bound, regulariser)),
        quantile=quantile,
        rate=rate,
        share=share,
        lowest=lowest,
        highest=highest,
    )
    return Defense(method, noise_multiplier, "adaptive_clipping")
