"""Checks that an input fits an architecture, and counts the features that leave a stack of layers."""

import math

import torch
from torch import nn


def image_shape(input_shape: tuple[int, ...], *, smallest: int, model: str) -> tuple[int, int, int]:
    """`input_shape` as (channels, height, width), refused where the convolutions of `model` have no room.

    Args:
        input_shape: shape of one input without the batch dimension.
        smallest: least height and width, in pixels, that leave one feature after the last pooling.
        model: name of the architecture, for the error.

    Raises:
        ValueError: if it is not an image or is too small.
    """
    if len(input_shape) != 3 or min(input_shape) < 1 or min(input_shape[1:]) < smallest:
        raise ValueError(
            f"input_shape of {model} must be (channels, height, width) with at least {smallest} x {smallest} "
            f"pixels, got {tuple(input_shape)}; 'mlp' takes inputs of any shape"
        )
    channels, height, width = input_shape
    return channels, height, width


def features(body: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Number of values per example that `body` puts out; measured, so that no formula can disagree."""
    with torch.no_grad():
        return math.prod(body(torch.zeros(1, *input_shape)).shape[1:])
