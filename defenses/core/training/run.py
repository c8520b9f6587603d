"""Finished training runs: the model, its releases, and the facts that its claim rests on.

Guarantee:
    `Run.claim` is derived from the plans that were executed, and states its assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from ..gradients.augmentation import Augmentation, Views, draws, draws_at_start, views_of
from ..gradients.numerics.full_precision import Precision
from ..plan.defense import State
from ..privacy.ledger import Claim, Ledger
from ..randomness.noise import NoiseSource
from .assumptions import assumptions
from .transcript import Step, Transcript


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        model: the trained model, in evaluation mode; with the averaged parameters if the recipe averages them.
        ledger: ledger of the releases.
        transcript: the observations of the chosen observer.
        state: the method's last state.
        seed: key of the public randomness.
        sampler_key: key of the sampler: secret, because it reveals the participants of every step; never logged.
        engine: name of the engine that computed the sums.
        precision: precision of its forward and backward passes.
        noise: source of the noise; `none` if no release had noise, one-off releases and trials included.
        public_used: whether public examples were read.
        remarks: remarks of the executed plans, each once, and marks (`unverified_...`) of unverified components.
        unverified: the same components in sentences.
        key_given: whether the sampler's key was given, and not drawn from the operating system.
        last: the parameters [dim] after the last step, if the model has the averaged ones; else None.
        augmentation: views of an example over which its gradients were averaged; None for the example itself.
        resumed: whether it continued from a checkpoint.
        repeated: whether it took steps again with the same seeded noise, after an interruption.
        nominal_size: public number used instead of the number of examples; None if the latter is public.
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
    repeated: bool = False
    nominal_size: int | None = None
    precision: Precision = "float32"

    def views(self, step: int) -> Views | None:
        """Returns the views of examples in a step, from public randomness alone; None without augmentation.

        Args:
            step: its number.
        """
        if self.augmentation is None:
            return None
        return partial(views_of, self.augmentation, seed=draws(self.seed, step))

    def views_behind(self, step: Step) -> Views | None:
        """Returns the views of a step or a one-off release in the transcript."""
        if step.one_off is None or self.augmentation is None:
            return self.views(step.step)
        return partial(views_of, self.augmentation, seed=draws_at_start(self.seed))

    def claim(self, delta: float) -> Claim:
        """Returns the guarantee of the run at `delta`, with its assumptions."""
        sampling = self.ledger.sampling
        known = {"key_given": self.key_given, "public_used": self.public_used}
        continued = {"resumed": self.resumed, "repeated": self.repeated}
        assumes = assumptions(self.noise, sampling, **known, **continued, size_public=self.nominal_size is None)
        return replace(self.ledger.claim(delta), assumes=assumes, unverified=self.unverified)
