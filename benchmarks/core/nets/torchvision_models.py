"""Classifiers of torchvision by name: `torchvision:resnet18`, untrained, for the classes of the data.

Networks are built unchanged, so their BatchNorm has to be converted before private training. With published weights
they serve as encoders of public features, of which no part is trained.
"""

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..data.downloads import FAILURES, aside
from ..extras import optional
from ..open_names import TORCHVISION
from .scatter import Coloured
from .shapes import first_line, refuse_misfit

DECIDED = ("weights", "num_classes", "progress")
"""Arguments of torchvision's builders that are not settings: models start untrained and fit the data."""
# Their auxiliary heads return tuples in training, and torchvision warns unless `init_weights` is given.
_SINGLE_HEADED = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def check(name: str) -> None:
    """Checks that torchvision has a classifier of that name.

    Args:
        name: with its prefix.

    Raises:
        ValueError: it has none; the message suggests the nearest name.
        ModuleNotFoundError: torchvision is missing; names the extra.
    """
    vision = optional("torchvision.models", needed_by=f"model {name!r}")
    # `module` excludes detection and segmentation, whose models are in modules of their own.
    network, known = name.removeprefix(TORCHVISION), vision.list_models(module=vision)
    if network not in known:
        near = difflib.get_close_matches(network, known, n=1)
        hint = f"did you mean '{TORCHVISION}{near[0]}'?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"no classifier named {network!r} in torchvision; {hint}")


def describe(name: str) -> str:
    """Returns a line about a classifier; raises as `check`."""
    check(name)
    return (
        f"{name.removeprefix(TORCHVISION)} of torchvision, untrained; its BatchNorm, if it has any, must be converted."
    )


def build(name: str, *, input_shape: tuple[int, ...], classes: int, settings: Mapping[str, Any]) -> nn.Module:
    """Builds a freshly initialised classifier on the default device.

    Args:
        name: with its prefix.
        input_shape: (3, height, width).
        classes: number of logits.
        settings: of torchvision's builder.

    Raises:
        ValueError: an unknown name, settings that the builder refuses, or inputs that do not fit.
        ModuleNotFoundError: torchvision is missing; names the extra.
    """
    check(name)
    if len(input_shape) != 3 or input_shape[0] != 3:
        raise ValueError(f"input_shape of {name} must be (3, height, width), got {input_shape}")
    for setting in DECIDED:
        if setting in settings:
            raise ValueError(f"model {name!r} has no setting {setting!r}; it is built untrained, for {classes} classes")
    network = name.removeprefix(TORCHVISION)
    arguments = {**_SINGLE_HEADED.get(network, {}), **settings, "weights": None, "num_classes": classes}
    if arguments.get("aux_logits"):
        raise ValueError(f"aux_logits of {name} must be false, got true: a model must put out one tensor of logits")
    make = optional("torchvision.models", needed_by=f"model {name!r}").get_model
    try:
        model = make(network, **arguments)
    except Exception as error:  # a builder may raise anything on unknown settings
        raise ValueError(f"model {name!r} cannot be built with {dict(settings)}: {first_line(error)}") from error
    # Only shapes: a forward pass of the largest classifiers takes seconds on a CPU.
    refuse_misfit(model, name, input_shape, classes, compute=False)
    return model


def published(name: str, *, download: bool = True) -> tuple[nn.Module, nn.Module, str]:
    """Returns a classifier with the classes and weights of ImageNet, on the CPU.

    Args:
        name: with its prefix.
        download: whether torchvision's default weights are fetched; if not, the weights are random.

    Returns:
        Module that standardises the colours of images in [0, 1] as in its training; the classifier; torchvision's name
        of the weights.

    Raises:
        ValueError: an unknown name, a classifier without weights, or weights that cannot be fetched.
        ModuleNotFoundError: torchvision is missing; names the extra.
    """
    check(name)
    vision = optional("torchvision.models", needed_by=f"encoder {name!r}")
    network = name.removeprefix(TORCHVISION)
    weights = vision.get_model_weights(network).DEFAULT
    with torch.device("cpu"):
        # Keeps the auxiliary heads, which the weights include; torchvision warns unless `init_weights` is given.
        model = vision.get_model(
            network, weights=None, **({"init_weights": False} if network in _SINGLE_HEADED else {})
        )
    if download:
        try:
            # Loads tensors only, checked by the hash in the file's name.
            with aside():
                model.load_state_dict(weights.get_state_dict(check_hash=True, weights_only=True))
        except FAILURES as error:
            folder = f"{torch.hub.get_dir()}/checkpoints"
            raise ValueError(
                f"weights of {name!r} are not in {folder}, and could not be downloaded ({first_line(error)}); connect "
                f"to the network once, put there what is at {weights.url}, or name a file of them by --weights"
            ) from error
    preset = weights.transforms()
    return Coloured(preset.mean, preset.std), model, str(weights)
