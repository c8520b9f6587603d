"""DP-SGD with noise that is correlated over steps: what its defenses share."""

from __future__ import annotations

from dataclasses import dataclass

from ..codec import Everything
from ..defense import Block, Context, StepPlan
from ..noise_correlation import NoiseStrategy, StrategyRow
from .single_block import Whole


@dataclass(frozen=True, kw_only=True)
class Streamed(Whole):
    """Releases the sum of bounded gradients under the noise of a stream; its classes say how that is correlated.

    Attributes:
        restart: whether every epoch is a stream of its own; the whole run is one else.
    """

    restart: bool = False

    def strategy(self, steps: int) -> NoiseStrategy:
        """How noise is correlated over a stream of so many steps."""
        raise NotImplementedError(f"{type(self).__name__} must define strategy(steps)")

    def plan(self, context: Context) -> StepPlan:
        """One block of everything, in its place of the stream."""
        length = min(context.steps_per_epoch, context.steps) if self.restart else context.steps
        row = StrategyRow(self.strategy(length), context.step % length)
        return StepPlan(Block(codec=Everything(context.dim), bound=self.bound), correlated=row)
