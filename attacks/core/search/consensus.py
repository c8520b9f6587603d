"""Consensus of several guesses of the same images: their mean after registration by shifts.

Gradients carry little information on positions in an image, so guesses from several starts have the same objects in
different places. Each is shifted onto the mean of all; a second mean is taken of the shifted guesses, and the guesses
are drawn towards that.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def consensus(guesses: Float[Tensor, "r b *shape"], most: int) -> Float[Tensor, "b *shape"]:
    """Returns the mean of guesses, each image shifted by whole pixels to be nearest to the mean of all.

    Args:
        guesses: guesses of the same batch, in the same order; images have height and width as their last axes.
        most: largest shift along an axis, in pixels; vectors are not shifted.
    """
    mean = guesses.mean(dim=0)
    if most == 0 or guesses.ndim < 4:
        return mean
    shifted = shifts(guesses, most)  # [s, r, b, *shape]
    errors = (shifted - mean).square().flatten(3).sum(dim=3)
    best = errors.argmin(dim=0)  # [r, b]
    chosen = shifted.gather(0, best.view(1, *best.shape, *[1] * (guesses.ndim - 2)).expand(1, *guesses.shape))[0]
    return chosen.mean(dim=0)


def shifts(images: Float[Tensor, "*any height width"], most: int) -> Float[Tensor, "s *any height width"]:
    """Returns images shifted by up to `most` whole pixels along each axis, with border pixels repeated.

    The unshifted image is first: argmin takes it if several shifts are as good.
    """
    height, width = images.shape[-2:]
    flat = images.reshape(1, -1, height, width)
    padded = functional.pad(flat, (most,) * 4, mode="replicate").view(*images.shape[:-2], height + 2 * most, -1)
    steps = sorted(range(-most, most + 1), key=abs)
    return torch.stack([padded[..., most - dy :, most - dx :][..., :height, :width] for dy in steps for dx in steps])
