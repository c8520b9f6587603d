"""Parameter averaging: a moving average of the parameters over the steps of a run, returned in their place.

De, Berrada, Hayes, Smith & Balle, "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
2022: average <- m average + (1 - m) parameters after each step, with m = min(decay, (1 + t) / (10 + t)) growing with
the step t, so that the weight of the initial parameters decays fast. Noise averages out over the steps; the signal
stays.

Guarantee:
    Parameters are functions of releases, and so is their average: it costs no privacy. An observer of every release
    learns as much as without averaging.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass
class ParameterAverage:
    """The moving average of a run in progress.

    Attributes:
        decay: largest weight of the past in a step; None keeps no average.
        value: the average [dim]; None before the first step, and without averaging.
    """

    decay: float | None
    value: Float[Tensor, " dim"] | None = None

    def add(self, step: int, before: Float[Tensor, " dim"], after: Float[Tensor, " dim"]) -> None:
        """Adds the parameters after a step to the average.

        Args:
            step: its number, from 0.
            before: the parameters at which the step was taken, which are the average before the first step. A plan may
                have set them, for example to prune the model.
            after: the parameters after the optimizer's step.
        """
        if self.decay is None:
            return
        past = self.value if self.value is not None else before.clone()
        self.value = past.lerp(after, 1 - min(self.decay, (1 + step) / (10 + step)))
