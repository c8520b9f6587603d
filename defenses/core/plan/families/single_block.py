"""Methods with a single block: DP-SGD, and projection before the bound or after the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ..bound import Bound
from ..codec import Everything
from ..defense import Block, Context, Stateless, StepPlan
from ..post import Project, identity
from .public_subspaces import Bases, Subspaces


@dataclass(frozen=True, kw_only=True)
class Whole(Stateless):
    """Releases the sum of bounded gradients, all coordinates in one block.

    Attributes:
        bound: bound of an example's gradient.
    """

    bound: Bound

    def plan(self, context: Context) -> StepPlan:
        """Plans a single block of all coordinates."""
        return StepPlan(Block(codec=Everything(context.dim), bound=self.bound))


@dataclass(frozen=True, kw_only=True)
class Projected:
    """Projects on a subspace: each gradient before the bound, or the noisy update.

    Before the bound, the clip norm is spent on the kept component, and as many numbers are released as there are
    directions. After the noise, the whole gradient is bounded and released, and the projection is post-processing.

    Attributes:
        bound: bound of an example's contribution.
        subspace: source of the directions of a step.
        where: position of the projection.
        rescale: whether the update of each span is multiplied by its length over its rank, which offsets the average
            shrinkage by a random projection.
    """

    bound: Bound
    subspace: Subspaces
    where: Literal["before the bound", "after the noise"]
    rescale: bool = False

    def start(self, context: Context) -> Bases:
        """Returns no directions yet."""
        return None

    def plan(self, state: Bases, context: Context) -> tuple[Bases, StepPlan]:
        """Plans a bounded block, of coefficients or of all coordinates."""
        bases, subspace, remarks = self.subspace.at(state, context)
        after = self.where == "after the noise"
        block = Block(codec=Everything(context.dim) if after else subspace, bound=self.bound)
        # Projection before the bound: the decoded update is in the subspace already, and `Project` only rescales it.
        post = Project(subspace, self.rescale) if after or self.rescale else identity
        return bases, StepPlan(block, post=post, remarks=remarks)

    def observe(self, state: Any, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Bases:
        """Returns the directions unchanged."""
        return state
