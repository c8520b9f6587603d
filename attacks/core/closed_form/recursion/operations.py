"""Operations that closed forms can invert: modules by kind, and for each kind its result, inverse or linear part.

To add a kind, add its modules to `KINDS`, its name to the tuples below whose property it has (`ACTIVATIONS`,
`HOMOGENEOUS`, ...), its settings to `_settings`, and a case to `result_of` and to `affine` or `invert`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...targets.network import Operation
from ...threat_model.attack_errors import NotApplicable
from .convolution import Convolved, KernelGeometry, pooled
from .maps import Dense, Factors, IdentityMap, LinearMap, Reshaped

CLAMP = 1e-12
"""Smallest distance of a result of tanh or sigmoid from the ends of its range; nearer results are clamped."""

POSITIVE = 1e-9
"""Threshold above which a result of a ReLU counts as positive, relative to the largest; less may be a numerical error.
"""

SATURATED = 0.01
"""Error of the argument of a tanh or sigmoid, relative to the argument or 1, beyond which it is unknown."""

ROUNDED = 4.0
"""Assumed error of a result of tanh or sigmoid, in machine epsilons."""

ABOVE = 30.0
"""Assumed ratio of the largest relative error of an entry to the relative misfit of the equations."""

KINDS: Mapping[Any, str] = {
    **{nn.Linear: "linear", nn.Conv2d: "conv2d", nn.AvgPool2d: "avg_pool2d", nn.Flatten: "flatten"},
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d), "batch_norm"),
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Dropout2d), "identity"),  # in evaluation mode
    **dict.fromkeys((nn.ReLU, torch.relu, functional.relu), "relu"),
    **dict.fromkeys((nn.Tanh, torch.tanh), "tanh"),
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid), "sigmoid"),
    nn.LeakyReLU: "leaky_relu",
}
"""Modules and functions by kind; exact types only, because a subclass may compute a different function."""
LAYERS = ("linear", "conv2d")
ACTIVATIONS = ("leaky_relu", "relu", "tanh", "sigmoid")
KINKED = ("relu", "leaky_relu")
"""Activations without second derivatives."""
HOMOGENEOUS = (*LAYERS, *KINKED, "input", "avg_pool2d", "flatten", "identity", "add")
"""Positively homogeneous operations, if they have no bias: a multiple of the argument gives that multiple of the
result.
"""
INJECTIVE = ("input", "flatten", "identity", "batch_norm", "leaky_relu", "tanh", "sigmoid", "linear")
"""Operations that may be injective, depending on their parameters."""


def of_module(name: str, module: nn.Module) -> dict[str, Any]:
    """Returns kind, parameter names and settings of a module, as arguments of `Operation`; `other` if unknown."""
    words = f"{name} ({type(module).__name__})"
    # Hooks and parametrizations change the function that the class computes.
    foreign = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    known = type(module) in KINDS and not foreign and not hasattr(module, "parametrizations")
    settings = _settings(name, module) if known else ""
    if isinstance(settings, str):
        return {"kind": "other", "words": words + settings}
    own = {slot: f"{name}.{slot}" for slot in ("weight", "bias") if getattr(module, slot, None) is not None}
    return {"kind": KINDS[type(module)], "settings": settings, "words": words, **own}


def _settings(name: str, module: nn.Module) -> dict[str, Any] | str:
    """Returns a module's settings; a text for messages, possibly empty, if an `Operation` cannot express them."""
    match module:
        case nn.LeakyReLU():
            return {"slope": float(module.negative_slope)}
        case nn.Flatten() if (module.start_dim, module.end_dim) != (1, -1):
            return ""
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            names = {"mean": f"{name}.running_mean", "variance": f"{name}.running_var", "eps": float(module.eps)}
            return names if module.track_running_stats else ""
        case nn.AvgPool2d():
            values = {key: getattr(module, key) for key in ("kernel_size", "stride", "padding")}
            pairs = {key: (value, value) if isinstance(value, int) else tuple(value) for key, value in values.items()}
            # Every window must average over the same number of entries.
            uneven = any(pairs["padding"]) and not module.count_include_pad
            return "" if module.ceil_mode or module.divisor_override is not None or uneven else pairs
        case nn.Conv2d():
            padding = module.padding
            if isinstance(padding, str):
                # `same` may pad one side more than the other, which `Operation` cannot express.
                twice = [d * (k - 1) if padding == "same" else 0
                         for d, k in zip(module.dilation, module.kernel_size, strict=True)]  # fmt: skip
                padding = tuple(total // 2 for total in twice)
                if module.padding_mode == "zeros" and any(total % 2 for total in twice):
                    return " with uneven padding"
            pairs = {key: tuple(getattr(module, key)) for key in ("kernel_size", "stride", "dilation")}
            return (
                {**pairs, "padding": tuple(padding), "groups": module.groups} if module.padding_mode == "zeros" else ""
            )
    return {}


def result_of(operation: Operation, arguments: list[Tensor], values: Mapping[str, Tensor]) -> Tensor:
    """Returns the result of an operation, [b, *shape].

    Args:
        operation: any but `input`.
        arguments: the results that it takes.
        values: values of the parameters.

    Raises:
        NotApplicable: the operation is of unknown kind.
    """
    x, s = arguments[0], operation.settings
    weight, bias = _parameters(operation, values)
    match operation.kind:
        case "linear" if weight is not None:
            return functional.linear(x, weight, bias)
        case "conv2d" if weight is not None:
            return functional.conv2d(x, weight, bias, s["stride"], s["padding"], s["dilation"], s["groups"])
        case "avg_pool2d":
            return functional.avg_pool2d(x, s["kernel_size"], s["stride"], s["padding"])
        case "batch_norm":
            mean, variance = values[s["mean"]], values[s["variance"]]
            return functional.batch_norm(x, mean, variance, weight, bias, eps=s["eps"])
        case "flatten":
            return x.flatten(1)
        case "leaky_relu":
            return functional.leaky_relu(x, s["slope"])
        case "relu" | "tanh" | "sigmoid":
            return getattr(torch, operation.kind)(x)
        case "identity":
            return x
        case "add":
            return x + arguments[1]
    raise NotApplicable(f"every layer must be one that can be inverted, and {operation.words or operation.name} is not")


def affine(
    operation: Operation, below: tuple[int, ...], values: Mapping[str, Tensor], like: Tensor
) -> tuple[LinearMap, Tensor]:
    """Returns the linear part of an affine operation, and its shift.

    Args:
        operation: the operation.
        below: shape of its argument.
        values: parameters by name.
        like: a tensor of the wanted dtype and device.

    Raises:
        NotApplicable: the operation is not affine, or of unknown kind.
    """
    weight, bias = _parameters(operation, values)
    zero = like.new_zeros(())
    match operation.kind:
        case "linear" if weight is not None and len(below) == 1:
            return Dense(weight, below), zero if bias is None else bias
        case "conv2d" if weight is not None:
            geometry = KernelGeometry(operation.settings, below, operation.shape, like.device)
            return Convolved(weight, geometry), zero if bias is None else bias[:, None, None]
        case "avg_pool2d":
            return pooled(operation.settings, below, operation.shape, like), zero
        case "flatten":
            return Reshaped(IdentityMap(operation.shape, like), below), zero
        case "batch_norm":
            factors, shift = of_norm(operation, below, values)
            return Factors(factors, below), shift
    raise NotApplicable(f"every layer must be one that can be inverted, and {operation.words or operation.name} is not")


def of_norm(operation: Operation, below: tuple[int, ...], values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns factors and shift of a batch norm in evaluation mode, expanded from channels.

    Args:
        operation: the operation.
        below: shape of its argument.
        values: values of the parameters.
    """
    weight, bias = _parameters(operation, values)
    factors = (values[operation.settings["variance"]] + operation.settings["eps"]).rsqrt()
    factors = factors if weight is None else factors * weight
    shift = -values[operation.settings["mean"]] * factors
    shift = shift if bias is None else shift + bias
    by_channel = (-1, *[1] * (len(below) - 1))
    return factors.view(by_channel).expand(below), shift.view(by_channel)


def _parameters(operation: Operation, values: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = (None if name is None else values[name] for name in (operation.weight, operation.bias))
    return weight, bias


@dataclass(frozen=True, kw_only=True)
class Inverted:
    """Argument of an activation, computed from its result.

    Attributes:
        before: the argument, in the shape of the result.
        slope: derivative of the activation there.
        slope_of_inverse: derivative of the inverse, for the propagation of errors.
        known: bool, entries whose argument is determined; None for all.
        clamped: number of results outside of the activation's range, which were clamped.
        slope_error: largest error of an entry of `slope` by rounding of the result.
    """

    before: Tensor
    slope: Tensor
    slope_of_inverse: Tensor
    known: Tensor | None = None
    clamped: int = 0
    slope_error: float = 0.0


def invert(operation: Operation, result: Tensor, *, error: float = 0.0, rounding: float = 0.0) -> Inverted:
    """Returns the argument of an activation, from its result alone.

    Leaky ReLU (of positive slope), tanh and sigmoid are injective. A ReLU is invertible at positive results; elsewhere
    only its derivative, 0, is known. Rounding may push a result out of the open range of tanh or sigmoid; such results
    are clamped and counted. At the ends of their range a unit is saturated, and rounding hides its argument.

    Args:
        operation: the activation.
        result: its result.
        error: relative error of the result; entries of a ReLU that are not well above it count as 0.
        rounding: machine epsilon of the result, by which arguments of saturated units count as unknown; 0 takes all.

    Raises:
        NotApplicable: the activation has no inverse.
    """
    match operation.kind:
        case "leaky_relu" if (a := float(operation.settings["slope"])) > 0:
            # `where` of two Python numbers would be float32.
            slope = torch.where(result > 0, torch.ones_like(result), a)
            return Inverted(before=result / slope, slope=slope, slope_of_inverse=1 / slope)
        case "relu":
            positive = result > max(POSITIVE, ABOVE * error) * float(result.abs().max())
            slope = positive.to(result)
            return Inverted(before=result * slope, slope=slope, slope_of_inverse=slope, known=positive)
        case "tanh":
            inside = result.clamp(-1 + CLAMP, 1 - CLAMP)
            slope = 1 - inside.square()
            before = torch.atanh(inside)
        case "sigmoid":
            inside = result.clamp(CLAMP, 1 - CLAMP)
            slope = inside * (1 - inside)
            before = torch.logit(inside)
        case _:
            words = operation.words or operation.kind
            raise NotApplicable(f"every layer must have an inverse, and {words} has none")
    known, hidden = None, inside != result
    if rounding:
        known = ~hidden & (ROUNDED * rounding / slope <= SATURATED * before.abs().clamp(min=1.0))
    return Inverted(
        before=before,
        slope=slope,
        slope_of_inverse=1 / slope,
        known=known if known is None or not bool(known.all()) else None,
        clamped=int(hidden.sum()),
        slope_error=2 * ROUNDED * rounding,
    )
