"""Architectures by name: `build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)`.

A file here is an architecture, or a family of them with a table of its variants; nothing else needs an edit. None has
BatchNorm, which mixes the examples of a batch, so that no example has a gradient of its own to bound. Two kinds of
names are open-ended: `torchvision:NAME` and `FILE.py:FUNCTION`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core import Catalogue, user_factory
from ..core.nets import torchvision_models
from ..core.nets.shapes import Answers, Natural, as_they_are

__all__ = [
    "Natural",
    "about",
    "build",
    "check",
    "count",
    "defaults",
    "describe",
    "factory",
    "names",
    "natural",
    "patterns",
    "takes",
]

_CATALOGUE = Catalogue(__name__, __path__, "model", families=True)


def names() -> tuple[str, ...]:
    """Names of all architectures that are written here, sorted."""
    return _CATALOGUE.names()


def patterns() -> dict[str, str]:
    """The open-ended kinds of names, each with a line about it."""
    return {
        torchvision_models.PATTERN: "Any classifier of torchvision, untrained; needs the extra 'images'.",
        user_factory.PATTERN: "A function of yours, called with input_shape and classes, that returns an nn.Module.",
    }


def check(name: str) -> None:
    """Refuses a name that `build` does not know; runs nothing of a user's file.

    Raises:
        ValueError: naming the nearest architecture, or the file that is not there.
        ModuleNotFoundError: for torchvision's without torchvision; names the extra.
    """
    if _kind(name) is None:
        _CATALOGUE.find(name)
    else:
        _kind(name).check(name)


def describe(name: str) -> str:
    """One line about an architecture; raises as `check`."""
    kind = _kind(name)
    return _CATALOGUE.describe(name) if kind is None else kind.describe(name)


def about(name: str) -> str:
    """What its file says of one of `names()`; raises `ValueError` for another name."""
    return _CATALOGUE.about(name)


def factory(name: str) -> Callable[..., nn.Module]:
    """The function that builds one of `names()`, whose keywords are its settings.

    Raises:
        ValueError: for another name.
    """
    return _CATALOGUE.find(name)


def defaults(name: str) -> dict[str, Any]:
    """Settings of an architecture with their defaults, none for the open-ended kinds; raises as `check`."""
    check(name)
    return _CATALOGUE.defaults(name) if _kind(name) is None else {}


def takes(name: str, setting: str) -> bool:
    """Whether an architecture may have a setting of that name.

    Of the open-ended kinds only building shows it, so all are let through but what the data decide.

    Raises:
        ValueError, ModuleNotFoundError: as `check`.
    """
    kind = _kind(name)
    return setting in defaults(name) if kind is None else setting not in kind.DECIDED


def natural(name: str) -> Natural:
    """The input, number of classes and settings that an architecture is quoted for.

    Raises:
        ValueError: for what is not one of `names()`.
    """
    return _CATALOGUE.natural(name)


def count(name: str, **changes: Any) -> int:
    """How many parameters are trained, counted without memory, time, or what an extra brings.

    Args:
        name: one of `names()`.
        **changes: input_shape, classes or settings, where they are not those of `natural(name)`.

    Raises:
        ValueError: for what is not one of `names()`, or an input that does not fit.
    """
    usual = natural(name)
    arguments = {"input_shape": usual.input_shape, "classes": usual.classes, **usual.settings, **changes}
    # fork_rng all the same: whatever a constructor draws must not move the caller's generator.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = _CATALOGUE.find(name)(**arguments)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def build(
    name: str,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    seed: int = 0,
    fewest_classes: int = 2,
    answers: Answers = as_they_are,
    **settings: Any,
) -> nn.Module:
    """A freshly initialised network on the CPU that maps [n, *input_shape] to logits [n, classes].

    Args:
        name: one of `names()`, or as `patterns()` says.
        input_shape: shape of one input, (channels, height, width) for the convolutional ones.
        classes: number of classes, at least 2; 1, for a binary logit, where `natural(name)` has it.
        fewest_classes: that are let through; 1 for what is never trained here, as a binary classifier of others.
        answers: takes the logits out of what a network of the user's puts out, whose shape is looked at; None to
            look at nothing.
        seed: of the initial weights; the same seed gives the same weights, and torch's own generator is left
            as it was found.
        **settings: of the architecture, see `defaults(name)`.

    Raises:
        ValueError: for an unknown name or setting, an input that does not fit, or whatever a user's file does wrong.
        ModuleNotFoundError: for an extra that is not installed; names it.
    """
    check(name)
    kind, shape = _kind(name), tuple(input_shape)
    # One logit is for the networks of R-GAP, whose loss is binary.
    least = fewest_classes if kind else min(fewest_classes, natural(name).classes)
    if classes < least:
        raise ValueError(f"classes must be at least {least}, got {classes}")
    # The CPU's generator alone: torch.manual_seed would also reseed every GPU.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if kind is user_factory:
            return kind.build(name, input_shape=shape, classes=classes, settings=settings, answers=answers)
        if kind is not None:
            return kind.build(name, input_shape=shape, classes=classes, settings=settings)
        known = _CATALOGUE.defaults(name)
        for setting in settings:
            if setting not in known:
                raise ValueError(f"model {name!r} has no setting {setting!r}; it has {', '.join(known) or 'none'}")
        return _CATALOGUE.find(name)(input_shape=shape, classes=classes, **settings)


def _kind(name: str) -> Any:
    """The module that builds what is not written here; None for what should be one of `names()`."""
    if name.startswith(torchvision_models.PREFIX):
        return torchvision_models
    return user_factory if user_factory.named(name) else None
