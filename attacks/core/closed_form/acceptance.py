"""Acceptance test of closed forms, without the ground truth: an input explains the update, and its multiples do not.

Equations of layers are solved under assumptions, such as that nothing was clipped or that a single example took part.
The simulated release of the solution, under the given defense, is therefore compared with the actual release. Clipping
hides the length of a gradient: if multiples of an input have multiples of its gradient, they explain the update as
well.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..search.gradient_matching import expected_distance, squared_distance
from ..targets.observation import Observation

EXPONENT = 0.4
"""Exponent of machine epsilon that gives the relative misfit attributed to rounding: 5e-7 in float64, 2e-3 in float32,
because recursions lose digits at every layer.
"""

ABOVE_NOISE = 4.0
"""Largest squared residual of an input that explains a noisy update, over the expected squared length of the noise."""

STRETCHED = (1.1, 1 / 1.1, 1.003, 1 / 1.003)
"""Multiples of an input whose residuals are compared with that of the input."""

WORSE = 10.0
"""Ratio of a multiple's residual to that of the input, above which the update determines the input's scale."""

DIGITS = 100.0
"""Residual of a multiple that must be exceeded as well, in machine epsilons, relative to the update."""


@dataclass(frozen=True, kw_only=True)
class ReleaseMatch:
    """Test of guessed inputs against an update, by the residual of their simulated release.

    Attributes:
        target: the update.
        expected: expected squared whitened length of its noise; 0 without noise.
        scale: squared whitened length of the update.
    """

    target: Observation
    expected: float
    scale: float

    @classmethod
    def of(cls, target: Observation, noise_std: Tensor) -> "ReleaseMatch":
        """Returns the test for an update, given the standard deviation of the noise on the undivided sums [m]."""
        with torch.no_grad():
            scale = float(target.residual(torch.zeros_like(target.released)).double().square().sum())
        return cls(target=target, expected=expected_distance(target, noise_std), scale=scale)

    def squared_residual(self, inputs: Tensor, labels: Tensor) -> float:
        """Returns the squared whitened residual of the update for inputs [b, *shape]."""
        with torch.no_grad():
            return float(squared_distance(self.target)(inputs, labels))

    def fits(self, inputs: Tensor, labels: Tensor) -> bool:
        """Returns whether rounding or noise accounts for the residual."""
        rounding = torch.finfo(self.target.released.dtype).eps ** EXPONENT
        return self.squared_residual(inputs, labels) <= max(rounding**2 * self.scale, ABOVE_NOISE * self.expected)

    def leaves_scale_open(self, inputs: Tensor, labels: Tensor) -> bool:
        """Returns whether multiples of the inputs explain the update as well: it was clipped, or is mostly noise."""
        rounding = DIGITS * torch.finfo(self.target.released.dtype).eps
        least = max(WORSE**2 * self.squared_residual(inputs, labels), rounding**2 * self.scale)
        least = ABOVE_NOISE * self.expected if self.expected > 0 else least
        return any(self.squared_residual(times * inputs, labels) <= least for times in STRETCHED)

    def stretched(self, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """Returns the largest multiple of the inputs in the box if it explains the update, else None."""
        low, high = self.target.input_low, self.target.input_high
        most, least = float(inputs.max()), float(inputs.min())
        if (most > 0 and high <= 0) or (least < 0 and low >= 0):
            return None
        room = [bound / value for value, bound in ((most, high), (-least, -low)) if value > 0]
        multiple = inputs * min(room, default=1.0)
        return multiple if self.fits(multiple, labels) else None
