"""DP-SGD with noise that is correlated over steps (matrix mechanisms): the base class of these methods."""

from __future__ import annotations

from dataclasses import dataclass

from ..codec import Everything
from ..defense import Block, Context, StepPlan
from ..noise_correlation import NoiseStrategy, StrategyRow
from .single_block import Whole


@dataclass(frozen=True, kw_only=True)
class Streamed(Whole):
    """Releases the sum of bounded gradients with correlated noise; subclasses define the strategy matrix.

    Attributes:
        restart: whether every epoch is a separate stream, with independent noise; otherwise the run is a single stream.
    """

    restart: bool = False

    def strategy(self, steps: int) -> NoiseStrategy:
        """Returns the strategy for a stream of this many steps."""
        raise NotImplementedError(f"{type(self).__name__} must define strategy(steps)")

    def plan(self, context: Context) -> StepPlan:
        """Plans a single block of all coordinates, at its position in the stream."""
        length = min(context.steps_per_epoch, context.steps) if self.restart else context.steps
        row = StrategyRow(self.strategy(length), context.step % length)
        return StepPlan(Block(codec=Everything(context.dim), bound=self.bound), correlated=row)
