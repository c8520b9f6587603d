"""Refuses BatchNorm, and InstanceNorm with running statistics, or converts them to GroupNorm.

BatchNorm computes each example's output from its neighbours in the batch, so removing one example changes the gradients
of the others and no per-example bound holds; in addition, its running statistics are a release without noise. A frozen
BatchNorm in evaluation mode is accepted: it is an affine map with constant statistics, and mixes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

# Private names, because PyTorch has no public base of all dimensions and of the synchronised and lazy variants.
_BatchNorm = nn.modules.batchnorm._BatchNorm
_InstanceNorm = nn.modules.instancenorm._InstanceNorm

_MOST_GROUPS = 32  # Wu & He, "Group Normalization", ECCV 2018
_LEAST_VALUES = 8  # per group, where `groups` is None: two normalised values are always +1 and -1


def refuse_batch_norm(model: nn.Module) -> None:
    """Raises if a layer mixes examples, or would in another mode.

    Raises:
        ValueError: names the first such layer and the remedy.
    """
    for name, module in model.named_modules():
        if _mixes(module) and not _is_constant(module):
            raise ValueError(
                f"model must not mix examples, got {type(module).__name__} at '{name}'; "
                "convert it first: model = leakbench.defenses.core.group_norm_instead(model), or, to keep published "
                "statistics, freeze its parameters and put it in evaluation mode"
            )


def into_training_mode(model: nn.Module) -> None:
    """Puts a model into training mode, except frozen BatchNorms in evaluation mode, whose statistics stay constant."""
    kept = [module for module in model.modules() if _mixes(module) and _is_constant(module)]
    model.train()
    for norm in kept:
        norm.eval()


def group_norm_instead(
    model: nn.Module, *, groups: int | None = None, input_shape: Sequence[int] | None = None
) -> nn.Module:
    """Returns a copy of the model with every layer that mixes examples replaced by a GroupNorm.

    The affine parameters are carried over; running statistics are dropped, so a trained model has to be fine-tuned.

    Args:
        model: unchanged.
        groups: wanted number of groups; the largest divisor of a layer's channels up to this is used. If None, at most
            32, and fewer if a group would normalise fewer than 8 values, as in the small maps of a small image. A
            BatchNorm1d gets one group: after a linear layer, a group of one channel is a constant. An InstanceNorm that
            tracks statistics gets a group per channel, which equals its computation without tracking.
        input_shape: of an example, which determines the size of a layer's maps. If None, 32 x 32 of the first
            convolution's channels, or the first linear layer's inputs.

    Returns:
        The converted copy.

    Raises:
        ValueError: for a layer with a single value to normalise, which a GroupNorm makes zero, and for an `input_shape`
            that the model does not accept.
    """
    converted, positions = copy.deepcopy(model), _positions(model, input_shape)
    group_norms: dict[nn.Module, nn.GroupNorm] = {}  # a layer that is registered in several places stays shared
    for place, norm in list(converted.named_modules(remove_duplicate=False)):
        if _mixes(norm):
            if norm not in group_norms:
                group_norms[norm] = _group_norm(norm, place, groups, positions.get(place))
            if not place:
                return group_norms[norm]
            owner, _, name = place.rpartition(".")
            setattr(converted.get_submodule(owner), name, group_norms[norm])
    return converted


def _positions(model: nn.Module, input_shape: Sequence[int] | None) -> dict[str, int]:
    """Returns the positions per channel in each mixing layer's input; empty if no pass could be made.

    The pass computes only shapes, on a copy on the meta device.
    """
    tried = input_shape or _likely_shape(model)
    if tried is None:
        return {}
    positions: dict[str, int] = {}

    def noting(place: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(_norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            position_count = arguments[0].shape[2:].numel()
            positions[place] = min(position_count, positions.get(place, position_count))

        return note

    try:
        shapes = copy.deepcopy(model).to("meta").eval()
        for place, module in shapes.named_modules(remove_duplicate=False):
            if _mixes(module):
                module.register_forward_pre_hook(noting(place))
        with torch.no_grad():
            shapes(torch.zeros(2, *tried, device="meta"))
    except Exception as error:  # anything that a user's model raises on a shape
        if input_shape is not None:
            raise ValueError(f"input_shape must be of an example of the model, got {tuple(tried)}: {error}") from error
        return {}
    return positions


def _likely_shape(model: nn.Module) -> tuple[int, ...] | None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return (module.in_channels, 32, 32)
        if isinstance(module, nn.Linear):
            return (module.in_features,)
    return None


def _mixes(module: nn.Module) -> TypeGuard[_BatchNorm | _InstanceNorm]:
    if isinstance(module, _InstanceNorm):
        # Without running statistics it normalises each image by itself.
        return module.track_running_stats
    return isinstance(module, _BatchNorm)


def _is_constant(norm: _BatchNorm | _InstanceNorm) -> bool:
    """Returns whether a layer has constant statistics and no trained parameter."""
    kept = norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None
    return kept and not norm.training and not any(parameter.requires_grad for parameter in norm.parameters())


def _group_norm(
    norm: _BatchNorm | _InstanceNorm, place: str, groups: int | None, positions: int | None
) -> nn.GroupNorm:
    channels = norm.num_features
    most = _MOST_GROUPS if groups is None else groups
    if isinstance(norm, _InstanceNorm):
        most = channels
    elif isinstance(norm, nn.BatchNorm1d):
        most = 1
    numbers = [g for g in range(1, min(most, channels) + 1) if channels % g == 0]
    if groups is None and positions is not None and not isinstance(norm, _InstanceNorm):
        numbers = [g for g in numbers if channels // g * positions >= _LEAST_VALUES] or [1]
    fitting = max(numbers)
    if positions is not None and channels // fitting * positions == 1:
        raise ValueError(
            f"{type(norm).__name__} at '{place}' must have more than one value to normalise, which a GroupNorm of "
            f"{fitting} groups makes zero, got {channels} channels of one position; "
            + ("take fewer groups" if channels > 1 else "remove it, or freeze it and put it in evaluation mode")
        )
    replacement = nn.GroupNorm(fitting, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:  # the same parameter objects: a tied parameter stays tied
        replacement.weight, replacement.bias = norm.weight, norm.bias
    return replacement
