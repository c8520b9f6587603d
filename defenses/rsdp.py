"""RSDP-SGD: random sparsification at a constant rate, the comparison in the PCDP-SGD paper.

Gradients are restricted to a random set of coordinates before they are bounded (Zhu & Blaschko, TMLR 2023), but without
that paper's cooling: the fraction dropped is `sparsity` from the first step to the last.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier, for any mask, since masks do not depend on
data.
"""

from __future__ import annotations

from .core import BoundKind, Defense, RandomMasks, bounded, refuse_fraction
from .random_sparsification import RandomSparsification


def rsdp(
    *,
    clip_norm: float = 1.0,
    sparsity: float = 0.3,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD on a random set of coordinates of constant size, redrawn each epoch.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        sparsity: fraction of coordinates dropped.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    refuse_fraction("sparsity", sparsity)
    masks = RandomMasks(final_sparsity=sparsity, cooling_epochs=0)
    method = RandomSparsification(bound=bounded(clip_norm, bound, regulariser), masks=masks)
    return Defense(method, noise_multiplier, "rsdp")
