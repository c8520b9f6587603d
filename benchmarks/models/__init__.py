"""Architectures by name: `build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)`.

Each file here is an architecture, or a family with a table of its variants; adding one needs no other edit. None has
BatchNorm, which mixes the examples of a batch, so that per-example gradients do not exist. Names outside the catalogue
are `torchvision:NAME` and `FILE.py:FUNCTION`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from leakbench.lazy_names import lazy_names

from ..core.catalogue import Catalogue, Natural
from ..core.open_names import PATTERNS, Answers, as_they_are, is_factory, is_torchvision

if TYPE_CHECKING:
    import torch


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

# Names and descriptions are listed without PyTorch, so it is imported by the functions that build.
__getattr__, __dir__ = lazy_names(__name__)

_CATALOGUE = Catalogue(__name__, __path__, "model", families=True)


def names() -> tuple[str, ...]:
    """Returns the names of all architectures in this package, sorted."""
    return _CATALOGUE.names()


def patterns() -> dict[str, str]:
    """Returns the patterns of names outside the catalogue, each with a line about it."""
    return PATTERNS


def check(name: str) -> None:
    """Checks that `build` knows a name, without running a user's file.

    Raises:
        ValueError: names the nearest architecture, or the missing file.
        ModuleNotFoundError: torchvision is missing for its classifiers; names the extra.
    """
    if _kind(name) is None:
        _CATALOGUE.find(name)
    else:
        _kind(name).check(name)


def describe(name: str) -> str:
    """Returns a line about an architecture; raises as `check`."""
    kind = _kind(name)
    return _CATALOGUE.describe(name) if kind is None else kind.describe(name)


def about(name: str) -> str:
    """Returns the docstring of the file of an architecture in `names()`; raises `ValueError` for another name."""
    return _CATALOGUE.about(name)


def factory(name: str) -> Callable[..., torch.nn.Module]:
    """Returns the function that builds an architecture in `names()`, with its settings as keywords.

    Raises:
        ValueError: another name.
    """
    return _CATALOGUE.find(name)


def defaults(name: str) -> dict[str, Any]:
    """Returns the settings of an architecture with defaults, none outside the catalogue; raises as `check`."""
    check(name)
    return _CATALOGUE.defaults(name) if _kind(name) is None else {}


def takes(name: str, setting: str) -> bool:
    """Returns whether an architecture may have a setting of that name.

    Outside the catalogue only building shows that, so every name is accepted except arguments that the data determine.

    Raises:
        ValueError, ModuleNotFoundError: as `check`.
    """
    kind = _kind(name)
    return setting in defaults(name) if kind is None else setting not in kind.DECIDED


def natural(name: str) -> Natural:
    """Returns the input shape, number of classes and settings at which an architecture's parameter count is stated.

    Raises:
        ValueError: the name is not in `names()`.
    """
    return _CATALOGUE.natural(name)


def count(name: str, **changes: Any) -> int:
    """Counts the trained parameters on the meta device, without memory, computation or extras.

    Args:
        name: in `names()`.
        **changes: input_shape, classes or settings, if they differ from `natural(name)`.

    Raises:
        ValueError: the name is not in `names()`, or the input does not fit.
    """
    import torch

    usual = natural(name)
    arguments = {"input_shape": usual.input_shape, "classes": usual.classes, **usual.settings, **changes}
    # Constructors' draws must not advance the caller's generator, even here.
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
) -> torch.nn.Module:
    """Builds a freshly initialised network on the CPU that maps [n, *input_shape] to logits [n, classes].

    Args:
        name: in `names()`, or of a kind in `patterns()`.
        input_shape: of a single input, (channels, height, width) for convolutional networks.
        classes: number of classes, at least 2; 1, for a binary logit, if `natural(name)` has it.
        fewest_classes: smallest number accepted; 1 for networks that are audited and not trained, such as binary
            classifiers with one output.
        answers: extracts the logits from the output of a user's network, whose shape is checked; None for no check.
        seed: of the initial weights; the same seed gives the same weights, and torch's own generator is left unchanged.
        **settings: of the architecture, see `defaults(name)`.

    Raises:
        ValueError: an unknown name or setting, an input that does not fit, or any error in a user's file.
        ModuleNotFoundError: an extra is not installed; names it.
    """
    import torch

    check(name)
    kind, shape = _kind(name), tuple(input_shape)
    # A single logit is accepted only for networks that R-GAP attacks, whose loss is binary.
    least = fewest_classes if kind else min(fewest_classes, natural(name).classes)
    if classes < least:
        raise ValueError(f"classes must be at least {least}, got {classes}")
    # The CPU's generator alone: torch.manual_seed would also reseed every GPU.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if is_factory(name):
            return kind.build(name, input_shape=shape, classes=classes, settings=settings, answers=answers)
        if kind is not None:
            return kind.build(name, input_shape=shape, classes=classes, settings=settings)
        known = _CATALOGUE.defaults(name)
        for setting in settings:
            if setting not in known:
                raise ValueError(f"model {name!r} has no setting {setting!r}; it has {', '.join(known) or 'none'}")
        return _CATALOGUE.find(name)(input_shape=shape, classes=classes, **settings)


def _kind(name: str) -> Any:
    """Module that builds networks outside the catalogue; None for a name that should be in `names()`."""
    if is_torchvision(name):
        return import_module("leakbench.benchmarks.core.nets.torchvision_models")
    return import_module("leakbench.benchmarks.core.user_factory") if is_factory(name) else None
