"""The recipe of De et al.: DP-SGD whose update is divided by the clip norm, for use with augmentation multiplicity.

De, Berrada, Hayes, Smith & Balle, "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
2022, arXiv:2204.13650. The release of a step is that of DP-SGD; the update is divided by C, so that the learning rate
need not be tuned again with C. The rest of the recipe is not part of the defense.

The other parts are settings of the training and the model, for this defense as for any other:

- augmentation multiplicity K: `views = 16`, with `crop_padding` and `horizontal_flip` (`Recipe.augmentation`):
  gradients of K views of an example are averaged, and the mean is bounded once, so that an example costs no more
  privacy;
- parameter averaging: `average = 0.999` (`Recipe.average`): the model is a moving average over the steps;
- weight standardisation and GroupNorm: `model = { name = "wrn_16_4", standardised = true }`;
- large batches, a constant learning rate, neither momentum nor weight decay: `batch = 4096`, and the task's defaults.

In a suite, `{ name = "de_recipe", lr = 2.0, batch = 4096, views = 16, average = 0.999 }` is the paper's setting at
epsilon 1 on CIFAR-10, with noise multiplier 10 and 875 steps. Each part may be left out, to measure its contribution.

Deviation: K does not count the clean image, and each view is random.
Guarantee: each step is a Gaussian mechanism, as in DP-SGD: views are averaged before the bound, and the division and
the average are functions of releases.
"""

from dataclasses import dataclass

from .core import Block, Bound, BoundKind, Context, Defense, Everything, Rescale, Stateless, StepPlan, bounded


@dataclass(frozen=True, kw_only=True)
class DeRecipe(Stateless):
    """DP-SGD's block, with the update divided by the clip norm."""

    bound: Bound

    def plan(self, context: Context) -> StepPlan:
        """Plans a single block of all coordinates, and 1 / C after the noise."""
        return StepPlan(Block(codec=Everything(context.dim), bound=self.bound), post=Rescale(1 / self.bound.norm))


def de_recipe(
    *,
    clip_norm: float = 1.0,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD with a learning rate that does not depend on the clip norm.

    Args:
        clip_norm: C, largest norm of an example's gradient averaged over its views, L2, in gradient units.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    return Defense(DeRecipe(bound=bounded(clip_norm, bound, regulariser)), noise_multiplier)
