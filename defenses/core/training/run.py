"""Finished training runs: the model, what it released, and what is needed to say so.

Guarantee:
    `Run.claim` is derived from the plans that were executed, and says what it assumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from ..gradients.augmentation import Augmentation, Views, draws, draws_at_start, views_of
from ..plan.defense import State
from ..privacy.ledger import Claim, Ledger
from ..randomness.noise import NoiseSource
from .assumptions import assumptions
from .transcript import Step, Transcript


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        model: the trained model, in evaluation mode; of the averaged parameters where the recipe averages them.
        ledger: what was released.
        transcript: what the chosen observer saw.
        state: the method's last state.
        seed: key of the public randomness.
        sampler_key: key of the sampler: secret, it tells who took part in which step, so that no log shows it.
        engine: how the sums were computed.
        noise: where the noise came from; `none` when the multiplier is 0.
        public_used: whether public examples were read.
        remarks: of the plans executed, each once, and marks of what took part and is none of ours.
        unverified: the same in sentences.
        key_given: whether the sampler's key was given, and not drawn from the operating system.
        last: the parameters [dim] that the last step left, where the model has the average; None where it has these.
        augmentation: which views of an example its gradients were averaged over; None for the example itself.
        resumed: whether it went on from a checkpoint.
        nominal_size: the public number in place of the number of examples; None where that is taken for public.
    """

    model: nn.Module
    ledger: Ledger
    transcript: Transcript
    state: State
    seed: int
    sampler_key: int = field(repr=False)
    engine: str
    noise: NoiseSource | Literal["none"]
    public_used: bool = False
    remarks: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    key_given: bool = False
    last: Float[Tensor, " dim"] | None = None
    augmentation: Augmentation | None = None
    resumed: bool = False
    nominal_size: int | None = None

    def views(self, step: int) -> Views | None:
        """What made the views of examples in a step, of public coins alone; None where there were none.

        Args:
            step: its number.
        """
        if self.augmentation is None:
            return None
        return partial(views_of, self.augmentation, coins=draws(self.seed, step))

    def views_behind(self, step: Step) -> Views | None:
        """The same of a step or a one-off release that the transcript has."""
        if step.one_off is None or self.augmentation is None:
            return self.views(step.step)
        return partial(views_of, self.augmentation, coins=draws_at_start(self.seed))

    def claim(self, delta: float) -> Claim:
        """The guarantee of the run at `delta`, with what it assumes."""
        sampling = self.ledger.sampling
        known = {"key_given": self.key_given, "public_used": self.public_used, "resumed": self.resumed}
        assumes = assumptions(self.noise, sampling, **known, size_public=self.nominal_size is None)
        return replace(self.ledger.claim(delta), assumes=assumes, unverified=self.unverified)
