"""Acceptance test of closed forms, without the truth: the input, and it alone of its multiples, explains the update.

Equations of layers are solved under assumptions: that nothing was clipped, that only one example took part. The release
that the solution would have caused, under the given defense, is compared with the actual release. A bound hides the
length of a gradient; if the multiples of an input have multiples of its gradient, they explain the update as well.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..search.gradient_matching import expected_distance, squared_distance
from ..targets.observation import Observation

EXPONENT = 0.4
"""Exponent from the rounding error of a number to the relative misfit that rounding explains: 5e-7 in float64, 2e-3 in
float32. Recursions lose digits from layer to layer.
"""

ABOVE_NOISE = 4.0
"""Largest residual of an input that explains a noisy update, over the squared length of the noise."""

STRETCHED = (1.1, 1 / 1.1, 1.003, 1 / 1.003)
"""Multiples that are tried."""

WORSE = 10.0
"""Smallest ratio of the residual at a multiple of an input to that at the input, for the input's scale to be decided.
"""

DIGITS = 100.0
"""The same, in rounding errors of the update."""


@dataclass(frozen=True, kw_only=True)
class ReleaseMatch:
    """Match of guessed inputs with an update, by their residual.

    Attributes:
        target: the update.
        expected: squared whitened length of its noise; 0 without noise.
        scale: squared whitened length of the update.
    """

    target: Observation
    expected: float
    scale: float

    @classmethod
    def of(cls, target: Observation, noise_std: Tensor) -> "ReleaseMatch":
        """Returns the match of an update whose noise is known, on the undivided sums [m]."""
        with torch.no_grad():
            scale = float(target.residual(torch.zeros_like(target.released)).double().square().sum())
        return cls(target=target, expected=expected_distance(target, noise_std), scale=scale)

    def left(self, inputs: Tensor, labels: Tensor) -> float:
        """Returns the squared whitened residual of the update for inputs [b, *shape]."""
        with torch.no_grad():
            return float(squared_distance(self.target)(inputs, labels))

    def fits(self, inputs: Tensor, labels: Tensor) -> bool:
        """Returns whether the residual is rounding, or noise."""
        rounding = torch.finfo(self.target.released.dtype).eps ** EXPONENT
        return self.left(inputs, labels) <= max(rounding**2 * self.scale, ABOVE_NOISE * self.expected)

    def leaves_scale_open(self, inputs: Tensor, labels: Tensor) -> bool:
        """Returns whether multiples of the inputs explain the update as well: it was clipped, or it is noise."""
        rounding = DIGITS * torch.finfo(self.target.released.dtype).eps
        least = max(WORSE**2 * self.left(inputs, labels), rounding**2 * self.scale)
        least = ABOVE_NOISE * self.expected if self.expected > 0 else least
        return any(self.left(times * inputs, labels) <= least for times in STRETCHED)

    def stretched(self, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """Returns the largest multiple that lies in the box of valid inputs, if it explains the update; None if not."""
        low, high = self.target.input_low, self.target.input_high
        most, least = float(inputs.max()), float(inputs.min())
        if (most > 0 and high <= 0) or (least < 0 and low >= 0):
            return None
        room = [bound / value for value, bound in ((most, high), (-least, -low)) if value > 0]
        multiple = inputs * min(room, default=1.0)
        return multiple if self.fits(multiple, labels) else None
