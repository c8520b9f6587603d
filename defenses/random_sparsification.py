"""Random sparsification: DP-SGD on a random set of coordinates that shrinks and changes every epoch.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023.
Coordinates are dropped before clipping, so the clip norm is spent on fewer of them; dropped ones get no
noise. The mask never looks at data, so it costs no privacy. One mask over the whole flat vector; it changes
between steps only. Their ablation is `without` noise or clipping.
Guarantee: one Gaussian a step at the defense's multiplier, whatever the mask (their Theorem 3.1, whose printed proof
is of `posterior_freeze`; here the masked gradient is what is bounded). Without clipping or noise, nothing.
Caveat: Theorem 5.1, that sparser updates leave an attacker more error, is of noise of one size and no clipping; where
clipping is active the gain is gone in the theorem's own model. Its noise factor under momentum, 1 / (1 - mu), is that
of the displacement; the velocity's is 1 / sqrt(1 - mu^2). `leakbench theory` measures both. Its epsilons are those of
Poisson sampling, and most of its runs deal a shuffled data set out: noise multiplier 1.54 over 40 epochs of 50 steps
is 2.75 with the one, and what is proved of the other is 25.3 (delta 1e-5).
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
        bound: of one example's contribution.
        masks: how many coordinates are dropped when, and which.
        where: whether each gradient is masked before it is bounded, or the noisy update.
    """

    bound: Bound
    masks: RandomMasks
    where: Literal["before the bound", "after the noise"] = "before the bound"

    def __post_init__(self) -> None:
        refuse_unknown("where", self.where, ("before the bound", "after the noise"))

    def plan(self, context: Context) -> StepPlan:
        """One bounded block: of the coordinates of the current mask, or of everything, masked afterwards."""
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
        refreshes: new masks per epoch; as many as there are steps in an epoch for one a step.
        cooling: False drops `final_sparsity` from the first step on.
        without: the paper's ablation: masks without "noise", or without "clipping", neither of which proves anything.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    refuse_unknown("without", without, ("nothing", "noise", "clipping"))
    limit = bounded(clip_norm, bound, regulariser)
    method = RandomSparsification(
        bound=unbounded(unit=clip_norm) if without == "clipping" else limit,
        masks=RandomMasks(final_sparsity=final_sparsity, refreshes=refreshes, cooling_epochs=None if cooling else 0),
    )
    return Defense(method, 0.0 if without == "noise" else noise_multiplier)
