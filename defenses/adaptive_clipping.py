"""Adaptive clipping: the clip norm follows a quantile of the gradient norms, estimated from a noisy count.

Andrew, Thakkar, McMahan & Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021, Algorithm
1. A second block on the same batch counts the gradients within the clip norm, as +1/2 or -1/2 each, so that an example
moves the count by 1/2; the clip norm then moves geometrically towards the quantile. `adapted` of
`leakbench.defenses.core` does the same for any other method with a single block: `adapted(pcdp(rank=50))`.
Deviation: the count's noise follows from the step's multiplier sigma and `share`, while the paper sets its standard
deviation s_b, in examples, which corresponds to a share of (sigma / (2 s_b))^2. The paper's s_b = B / 20, at B = 200
and sigma = 1, is a share of 1/400. The paper's initial clip norm is 0.1; here it is 1, as in other methods; rate and
quantile are the paper's. A norm up to 1/2048 beyond the clip norm counts in part, so that rounding cannot flip an
example.
Caveat: noise scales with the clip norm. If the learning rate is so large that noise makes the gradients grow, the clip
norm grows with them, and the noise with it: on 10,000 digits at sigma 14 and B 1000 updates grew to 6 times the first
at lr 0.1 (accuracy 0.88), to 35 times at 0.3 (0.16), while a fixed clip norm of 1 is best at lr 1.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier, for both blocks together: gradients have noise
of sigma / sqrt(1 - share), the count sigma / sqrt(share), in units of their sensitivity.
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
    """DP-SGD whose clip norm follows a quantile of the gradient norms.

    Args:
        clip_norm: C of the first step, L2, in gradient units.
        quantile: target fraction of gradients within the clip norm.
        rate: eta_C, rate of the geometric update; 0 keeps the clip norm.
        share: fraction of a step's 1 / sigma^2 spent on the count.
        lowest: lower limit of the clip norm, in gradient units; fixed beforehand.
        highest: upper limit of the clip norm, in gradient units; fixed beforehand.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: multiplier of the step as one Gaussian; None until calibrated.
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
