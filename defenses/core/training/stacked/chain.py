"""Check of the models that a stack accepts: chains of supported layers, trained as a whole, without hooks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as _of_all_modules

from ...gradients.checks.model_checks import Refused, refuse_model
from .layers import EXAMPLE_BY_EXAMPLE, KINDS
from .stack_error import StackError


def chain(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of a model in order.

    Raises:
        StackError: if it is no chain, or has an unsupported layer, a layer that is not trained, or a hook.
    """
    _refuse_unseen(model)
    layers = _layers(model)
    for layer in layers:
        if type(layer) not in KINDS and type(layer) not in EXAMPLE_BY_EXAMPLE:
            raise StackError(
                "a stack must be of linear layers, convolutions, group norms and functions of single examples, got "
                f"{type(layer).__name__}"
            )
        if any(not p.requires_grad for p in layer.parameters()):
            raise StackError("a stack must be of models that are trained as a whole, got a frozen layer")
        # It would overwrite the outputs from which a layer's gradient is computed.
        if getattr(layer, "inplace", False):
            raise StackError(f"a stack must be of functions that change nothing in place, got {layer}")
        if getattr(layer, "return_indices", False):
            raise StackError(f"a stack must be of layers with one output, got indices beside it from {layer}")
        if isinstance(layer, nn.Flatten) and layer.start_dim < 1:
            raise StackError(f"a stack must flatten within an example, start_dim at least 1, got {layer}")
    weights = [id(p) for layer in layers for p in layer.parameters()]
    if len(set(weights)) < len(weights):
        raise StackError("a stack must be of layers with parameters of their own, got shared ones")
    if not any(has_parameters(layer) for layer in layers):
        raise StackError("a stack must have a layer with parameters")
    return layers


def has_parameters(layer: nn.Module) -> bool:
    """Returns whether a layer of a chain has parameters; a group norm without affine parameters has none."""
    return type(layer) in KINDS and getattr(layer, "weight", None) is not None


def settings_of(layers: list[nn.Module]) -> list[tuple[str, dict[str, str]]]:
    """Returns the layers' hyperparameters from their attributes; `repr` omits some, such as an average's divisor.

    Args:
        layers: the layers of a model.
    """
    return [
        # Without the mode, on which the output of none of these layers depends.
        (
            type(layer).__name__,
            {k: repr(v) for k, v in vars(layer).items() if not k.startswith("_") and k != "training"},
        )
        for layer in layers
    ]


def gains(layers: list[nn.Module], device: torch.device) -> bool:
    """Returns whether stacked training of such a chain is faster than separate training.

    Args:
        layers: the layers of a model.
        device: that they are trained on.
    """
    # A rule of thumb. On a single CPU thread, a stack of DP-CNN/S at 28x28 with batches of 64 takes 1.1 to 1.4 times as
    # long as separate training, and so does DP-CNN. With batches of 16, or for images of 8x8 with few channels, a stack
    # of convolutions is faster on a CPU too, which this rule ignores.
    return device.type == "cuda" or not any(isinstance(layer, nn.Conv2d) for layer in layers)


def _layers(model: nn.Module) -> list[nn.Module]:
    if type(model) is not nn.Sequential:
        raise StackError(f"a stack must be of nn.Sequential models, got {type(model).__name__}")
    return [part for child in model for part in (_layers(child) if type(child) is nn.Sequential else [child])]


def _refuse_unseen(model: nn.Module) -> None:
    """Refuses modules that do anything besides their type's own computation.

    Raises:
        StackError: for a hook, or a function on the instance that replaces its class's.
    """
    try:
        refuse_model(model)
    except Refused as error:
        raise StackError(str(error)) from error
    everywhere = [*_of_all_modules._global_forward_hooks, *_of_all_modules._global_forward_pre_hooks]
    for part in model.modules():
        own = vars(part)
        if everywhere or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            raise StackError("a stack must be of models without hooks")
        if replaced := [name for name in own if callable(getattr(type(part), name, None))]:
            raise StackError(f"a stack must be of layers that compute what their type does, got another {replaced[0]}")
