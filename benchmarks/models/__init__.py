"""Architectures by name: `build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)`.

A file here is an architecture; nothing else needs an edit. None has BatchNorm, which mixes the examples of a
batch, so that no example has a gradient of its own to bound.
"""

from typing import Any

import torch
from torch import nn

from ..core import Catalogue

__all__ = ["build", "defaults", "describe", "names"]

_CATALOGUE = Catalogue(__name__, __path__, "model")


def names() -> tuple[str, ...]:
    """Names of all architectures, sorted."""
    return _CATALOGUE.names()


def describe(name: str) -> str:
    """One line about an architecture; raises `ValueError` for an unknown name."""
    return _CATALOGUE.describe(name)


def defaults(name: str) -> dict[str, Any]:
    """Settings of an architecture with their defaults; raises `ValueError` for an unknown name."""
    return _CATALOGUE.defaults(name)


def build(name: str, *, input_shape: tuple[int, ...], classes: int, seed: int = 0, **settings: Any) -> nn.Module:
    """A freshly initialised network on the CPU that maps [n, *input_shape] to logits [n, classes].

    Args:
        name: one of `names()`.
        input_shape: shape of one input, (channels, height, width) for the convolutional ones.
        classes: number of classes, at least 2.
        seed: of the initial weights; the same seed gives the same weights, and torch's own generator is left
            as it was found.
        **settings: of the architecture, see `defaults(name)`.

    Raises:
        ValueError: for an unknown name or setting, or an input that does not fit.
    """
    architecture = _CATALOGUE.find(name)
    if classes < 2:
        raise ValueError(f"classes must be at least 2, got {classes}")
    known = _CATALOGUE.defaults(name)
    for setting in settings:
        if setting not in known:
            raise ValueError(f"model {name!r} has no setting {setting!r}; it has {', '.join(known) or 'none'}")
    # The CPU's generator alone: torch.manual_seed would also reseed every GPU.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return architecture(input_shape=tuple(input_shape), classes=classes, **settings)
