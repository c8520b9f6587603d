"""Consensus of several guesses of the same images: what they agree on, wherever in the picture each of them has it.

Gradients hardly tell where in an image something is, so guesses from several starts have the same things in different
places. Each is shifted onto the mean of all before a second mean is taken, and is drawn towards that.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def consensus(guesses: Float[Tensor, "r b *shape"], most: int) -> Float[Tensor, "b *shape"]:
    """The mean of guesses, each image shifted by whole pixels to where it is nearest to the mean of all.

    Args:
        guesses: of the same batch, in the same order; images have height and width as their last axes.
        most: pixels of a shift along an axis at most; vectors are not shifted.
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
    """Images shifted by up to so many whole pixels down and right or up and left, pixels of the border repeated.

    Not shifted at all is the first: where several shifts are as good, it is the one to take.
    """
    height, width = images.shape[-2:]
    flat = images.reshape(1, -1, height, width)
    padded = functional.pad(flat, (most,) * 4, mode="replicate").view(*images.shape[:-2], height + 2 * most, -1)
    steps = sorted(range(-most, most + 1), key=abs)
    return torch.stack([padded[..., most - dy :, most - dx :][..., :height, :width] for dy in steps for dx in steps])
