"""Refuses BatchNorm, and InstanceNorm with running statistics, or converts them to GroupNorm.

BatchNorm computes each example's output from its neighbours in the batch, so removing one example moves the
gradients of the others and no per-example bound holds; its running statistics are an unaccounted release
besides. Frozen and in evaluation mode it is an affine map with constants, as of published weights, and mixes nothing.
"""

from __future__ import annotations

import copy
from typing import TypeGuard

from torch import nn

# Private names, because PyTorch has no public one for all dimensions and their synchronised and lazy kin.
_BatchNorm = nn.modules.batchnorm._BatchNorm
_InstanceNorm = nn.modules.instancenorm._InstanceNorm


def refuse_batch_norm(model: nn.Module) -> None:
    """Raises when a layer mixes examples, or would in another mode.

    Raises:
        ValueError: naming the first such layer and the way out.
    """
    for name, module in model.named_modules():
        if _mixes(module) and not _is_constant(module):
            raise ValueError(
                f"model must not mix examples, got {type(module).__name__} at '{name}'; "
                "convert it first: model = defenses.core.group_norm_instead(model), or, to keep published statistics, "
                "freeze its parameters and put it in evaluation mode"
            )


def into_training_mode(model: nn.Module) -> None:
    """Puts a model into training mode, but for frozen BatchNorms in evaluation mode, whose statistics stay."""
    kept = [module for module in model.modules() if _mixes(module) and _is_constant(module)]
    model.train()
    for norm in kept:
        norm.eval()


def group_norm_instead(model: nn.Module, *, groups: int = 32) -> nn.Module:
    """A copy of the model with every layer that mixes examples replaced by a GroupNorm.

    The affine parameters are carried over; running statistics are dropped, so a trained model has to be
    fine-tuned.

    Args:
        model: left as it is.
        groups: wanted number of groups; the largest divisor of a layer's channels that is at most this is
            used. A BatchNorm1d gets one group: after a linear layer, a group of one channel is a constant. An
            InstanceNorm that tracks statistics gets a group a channel, which is what it computes without.

    Returns:
        The converted copy.
    """
    converted = copy.deepcopy(model)
    if _mixes(converted):
        return _group_norm(converted, groups)
    for parent in list(converted.modules()):
        for name, child in list(parent.named_children()):
            if _mixes(child):
                setattr(parent, name, _group_norm(child, groups))
    return converted


def _mixes(module: nn.Module) -> TypeGuard[_BatchNorm | _InstanceNorm]:
    if isinstance(module, _InstanceNorm):
        # Without running statistics it normalises each image by itself.
        return module.track_running_stats
    return isinstance(module, _BatchNorm)


def _is_constant(norm: _BatchNorm | _InstanceNorm) -> bool:
    """Whether it computes with statistics that stay, and nothing of it is trained."""
    kept = norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None
    return kept and not norm.training and not any(parameter.requires_grad for parameter in norm.parameters())


def _group_norm(norm: _BatchNorm | _InstanceNorm, groups: int) -> nn.GroupNorm:
    channels = norm.num_features
    if isinstance(norm, _InstanceNorm):
        groups = channels
    elif isinstance(norm, nn.BatchNorm1d):
        groups = 1
    fitting = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
    replacement = nn.GroupNorm(fitting, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:  # the very parameters: a tied one stays tied
        replacement.weight, replacement.bias = norm.weight, norm.bias
    return replacement
