"""Priors of images, independent of any release: total variation is small, and pixels lie in a box."""

from jaxtyping import Float
from torch import Tensor


def total_variation(images: Float[Tensor, "batch *channels height width"]) -> Float[Tensor, ""]:
    """Returns mean|dx| + mean|dy|, in input units.

    Each mean is over all differences along its axis, of the whole batch. (Implementations that *sum* need weights that
    are smaller by the number of pixels.)

    Args:
        images: the last two axes are height and width; a side of 1 has no differences and adds 0.
    """
    variation = images.new_zeros(())
    for axis in (-1, -2):
        if images.shape[axis] > 1:
            variation = variation + images.diff(dim=axis).abs().mean()
    return variation


def total_variations(
    images: Float[Tensor, "guesses batch *channels height width"],
) -> Float[Tensor, " guesses"]:
    """Returns `total_variation` of each of several batches."""
    variation = images.new_zeros(len(images))
    for axis in (-1, -2):
        if images.shape[axis] > 1:
            variation = variation + images.diff(dim=axis).abs().flatten(1).mean(dim=1)
    return variation


class Box:
    """Box [low, high] of valid inputs, in units in which it is [-2, 2].

    Images normalised by their mean and standard deviation lie in about that box. Step lengths and starts that were
    tuned on such images keep their meaning for inputs of any range.
    """

    def __init__(self, low: float, high: float) -> None:
        if not low < high:
            raise ValueError(f"low must be below high, got {low} and {high}")
        self.centre = (low + high) / 2
        self.scale = (high - low) / 4
        self.low, self.high = low, high

    def inputs(self, point: Tensor) -> Tensor:
        """Maps box units to model-input units; differentiable."""
        return self.centre + self.scale * point

    def project_(self, point: Tensor) -> Tensor:
        """Moves a point in box units to the nearest valid point, in place."""
        return point.clamp_(-2.0, 2.0)

    def clamp(self, inputs: Tensor) -> Tensor:
        """Returns the nearest valid inputs, in model-input units; removes rounding at the edges of the box."""
        return inputs.clamp(self.low, self.high)
