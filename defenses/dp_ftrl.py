"""DP-FTRL by tree aggregation: noise of which a prefix of the run carries a logarithmic share.

Kairouz, McMahan, Song, Thakkar, Thakurta & Xu, "Practical and Private (Deep) Learning Without Sampling or Shuffling",
ICML 2021. The sum of the first t gradients is that of the nodes of a binary tree, one for each 1 in t's binary digits;
each node has noise of its own, which a step takes back when it completes a larger one. Nobody's participation is
random, and nothing has to be.
Deviation: only nodes that a prefix is made of are released, one a step, so that a record is in at most
floor(log2 steps) + 1 of them; no node's estimate is refined by its children's (Honaker's trick). Updates go to the
run's own optimizer, of which SGD without momentum is the paper's.
Guarantee:
    One Gaussian for every stream, by the steps that its sampler lets a record join. Under `partition` with a restart
    every epoch, a record that is used once in each pays one Gaussian at the noise multiplier an epoch.
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
        clip_norm: C, which no bounded gradient is longer than, L2, in gradient units.
        tree_per_epoch: whether every epoch has a tree of its own; one tree for the run else.
        noise_multiplier: what one use of a record is charged as: noise standard deviation / C of a node, over the root
            of the number of nodes above a step; None until it is calibrated.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
    """
    method = _InTrees(bound=bounded(clip_norm, bound, regulariser), restart=tree_per_epoch)
    return Defense(method, noise_multiplier, name="dp_ftrl")


@dataclass(frozen=True, kw_only=True)
class _InTrees(Streamed):
    def strategy(self, steps: int) -> Tree:
        return Tree(steps)
