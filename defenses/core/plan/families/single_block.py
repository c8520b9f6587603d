"""Methods that several defenses share: DP-SGD's single block, and projection before the bound or after the noise."""

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
        bound: of one example's gradient.
    """

    bound: Bound

    def plan(self, context: Context) -> StepPlan:
        """One block of everything."""
        return StepPlan(Block(codec=Everything(context.dim), bound=self.bound))


@dataclass(frozen=True, kw_only=True)
class Projected:
    """Keeps what lies inside a subspace: of each gradient before it is bounded, or of the noisy update.

    Before the bound, the norm is spent on what is kept, and as few numbers are released as there are directions. After
    the noise, the whole gradient is bounded and released, and the projection is post-processing.

    Attributes:
        bound: of one example's contribution.
        subspace: the directions of a step.
        where: what is projected.
        rescale: whether the update of a span is multiplied by its length over its rank.
    """

    bound: Bound
    subspace: Subspaces
    where: Literal["before the bound", "after the noise"]
    rescale: bool = False

    def start(self, context: Context) -> Bases:
        """No directions yet."""
        return None

    def plan(self, state: Bases, context: Context) -> tuple[Bases, StepPlan]:
        """One bounded block, of coefficients or of everything."""
        bases, subspace, remarks = self.subspace.at(state, context)
        after = self.where == "after the noise"
        block = Block(codec=Everything(context.dim) if after else subspace, bound=self.bound)
        # Before the bound the update is inside the subspace already, and projecting it again only rescales it.
        post = Project(subspace, self.rescale) if after or self.rescale else identity
        return bases, StepPlan(block, post=post, remarks=remarks)

    def observe(self, state: Any, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Bases:
        """The directions, for as long as they are used."""
        return state
