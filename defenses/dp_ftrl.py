"""DP-FTRL by tree aggregation: a prefix sum of gradients has the noise of logarithmically many tree nodes.

Kairouz, McMahan, Song, Thakkar, Thakurta & Xu, "Practical and Private (Deep) Learning Without Sampling or Shuffling",
ICML 2021. The sum of the first t gradients is that of the nodes of a binary tree, one for each 1 in t's binary digits;
each node has its own noise, which a step cancels when it completes a larger node. Participation need not be random.
Deviation: only nodes that are summed in some prefix are released, a node per step, so a record is in at most floor(log2
steps) + 1 of them; node estimates are not refined by their children's (Honaker's trick). Updates go to the run's own
optimizer; SGD without momentum is the paper's.

Guarantee:
    A single Gaussian for every tree, with the largest sensitivity over the steps in which the sampler may use a record.
    Under `partition` with a restart every epoch, a record that is used once in each is charged a Gaussian at the noise
    multiplier per epoch.
"""

from dataclasses import dataclass

from .core import BoundKind, Defense, Streamed, Tree, bounded


def dp_ftrl(
    *,
    clip_norm: float = 1.0,
    tree_per_epoch: bool = True,
    noise_multiplier: float | None = None,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
) -> Defense:
    """DP-SGD with tree-aggregated noise; for `partition` sampling, or `shuffle`.

    Args:
        clip_norm: C, upper limit on the norm of a bounded gradient, L2, in gradient units.
        tree_per_epoch: whether every epoch has its own tree; otherwise the run has a single tree.
        noise_multiplier: multiplier of the Gaussian charged for a single use of a record: noise standard deviation / C
            of a node, over the root of the largest number of nodes that contain a step; None until calibrated.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
    """
    method = _InTrees(bound=bounded(clip_norm, bound, regulariser), restart=tree_per_epoch)
    return Defense(method, noise_multiplier, name="dp_ftrl")


@dataclass(frozen=True, kw_only=True)
class _InTrees(Streamed):
    def strategy(self, steps: int) -> Tree:
        return Tree(steps)
