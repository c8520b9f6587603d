"""Random sparsification: DP-SGD on a random set of coordinates that shrinks and changes every epoch.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023. Coordinates are
dropped before clipping, so the clip norm is spent on fewer of them; dropped ones get no noise. The mask does not depend
on data, so it costs no privacy. It covers the whole flat vector and changes between steps only. The paper's ablation is
`without` noise or clipping.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier, for any mask (the paper's Theorem 3.1, whose
printed proof is that of `posterior_freeze`; here the bound applies to the masked gradient). Without clipping or noise,
none.
Caveat: Theorem 5.1, that sparser updates increase an attacker's error, assumes a fixed noise size and no clipping; if
clipping is active, the gain vanishes in the theorem's own model. The paper's noise factor under momentum, 1 / (1 - mu),
is that of the displacement; the velocity's is 1 / sqrt(1 - mu^2). `leakbench theory` measures both. Its epsilons assume
Poisson sampling, and most of its runs shuffle the data set and cut it into batches: noise multiplier 1.54 over 40
epochs of 50 steps gives 2.75 with the former, and 25.3 is proved for the latter (delta 1e-5).
"""

from dataclasses import dataclass
from typing import Literal

from .core import (
    Block,
    Bound,
    BoundKind,
    Context,
    Defense,
    Everything,
    Keep,
    RandomMasks,
    Stateless,
    StepPlan,
    bounded,
    refuse_unknown,
    unbounded,
)


@dataclass(frozen=True, kw_only=True)
class RandomSparsification(Stateless):
    """Keeps a uniformly random set of coordinates.

    Attributes:
        bound: bound of an example's contribution.
        masks: schedule and random choice of the dropped coordinates.
        where: whether the mask applies to each gradient before the bound, or to the noisy update.
    """

    bound: Bound
    masks: RandomMasks
    where: Literal["before the bound", "after the noise"] = "before the bound"

    def __post_init__(self) -> None:
        refuse_unknown("where", self.where, ("before the bound", "after the noise"))

    def plan(self, context: Context) -> StepPlan:
        """Plans a bounded block: the coordinates of the current mask, or all of them, masked afterwards."""
        kept = self.masks.at(context)
        if self.where == "after the noise":
            return StepPlan(Block(codec=Everything(context.dim), bound=self.bound), post=Keep(kept))
        return StepPlan(Block(codec=kept, bound=self.bound))


def random_sparsification(
    *,
    clip_norm: float = 1.0,
    final_sparsity: float = 0.9,
    refreshes: int = 1,
    cooling: bool = True,
    without: Literal["nothing", "noise", "clipping"] = "nothing",
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD whose sparsity (fraction dropped) grows linearly from 0 to `final_sparsity`.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        final_sparsity: fraction of coordinates dropped at the last refresh.
        refreshes: new masks per epoch; the number of steps per epoch for a new mask in every step.
        cooling: False drops `final_sparsity` from the first step on.
        without: the paper's ablation: masks without "noise" or without "clipping", both without a guarantee.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    refuse_unknown("without", without, ("nothing", "noise", "clipping"))
    limit = bounded(clip_norm, bound, regulariser)
    method = RandomSparsification(
        bound=unbounded(unit=clip_norm) if without == "clipping" else limit,
        masks=RandomMasks(final_sparsity=final_sparsity, refreshes=refreshes, cooling_epochs=None if cooling else 0),
    )
    return Defense(method, 0.0 if without == "noise" else noise_multiplier)
