"""Forward and backward pass of a network from its description: the results of all operations, on any data."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ...targets.network import Network, Operation
from ...threat_model.attack_errors import NotApplicable


def doubled(network: Network) -> dict[str, Tensor]:
    """Returns the parameters in float64: a single constant in float32 costs ten digits of an inversion."""
    return {n: v.double() if v.is_floating_point() else v for n, v in network.parameters.items()}


def results(network: Network, inputs: Tensor, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Returns the result of every operation.

    Args:
        network: its operations all have a name.
        inputs: [b, *shape], in the dtype of the parameters.
        values: values of the parameters; None for those of the network in float64.

    Raises:
        NotApplicable: an operation is of unknown kind.
    """
    values = doubled(network) if values is None else values
    outputs: dict[str, Tensor] = {}
    for operation in network.operations:
        outputs[operation.name] = (
            inputs
            if operation.kind == "input"
            else result_of(operation, [outputs[n] for n in operation.inputs], values)
        )
    return outputs


def result_of(operation: Operation, given: list[Tensor], values: Mapping[str, Tensor]) -> Tensor:
    """Returns the result of an operation, [b, *its shape].

    Args:
        operation: no input.
        given: the results that it takes.
        values: values of the parameters.

    Raises:
        NotApplicable: it is of unknown kind.
    """
    x, s = given[0], operation.settings
    weight = None if operation.weight is None else values[operation.weight]
    bias = None if operation.bias is None else values[operation.bias]
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
            return given[0] + given[1]
    raise NotApplicable(f"every layer must be one that can be inverted, and {operation.words or operation.name} is not")


def of_norm(operation: Operation, below: tuple[int, ...], values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns factors and shift of a batch norm of evaluation, by channel.

    Args:
        operation: the operation.
        below: shape of its argument.
        values: values of the parameters.
    """
    factors = (values[operation.settings["variance"]] + operation.settings["eps"]).rsqrt()
    if operation.weight is not None:
        factors = factors * values[operation.weight]
    shift = -values[operation.settings["mean"]] * factors
    if operation.bias is not None:
        shift = shift + values[operation.bias]
    by_channel = (-1, *[1] * (len(below) - 1))
    return factors.view(by_channel).expand(below), shift.view(by_channel)


def derivatives(network: Network, inputs: Tensor, label: int) -> dict[str, Tensor]:
    """Returns the loss's derivative by the result of every operation, for one example.

    Args:
        network: a network with cross-entropy or a logistic loss.
        inputs: [1, *shape], float64.
        label: class number.
    """
    outputs = results(network, inputs.clone().requires_grad_())
    logits = outputs[network.operations[-1].name]
    if logits.shape[1] == 1:
        loss = functional.softplus(logits[0, 0] * (1 - 2 * label))
    else:
        loss = functional.cross_entropy(logits, torch.tensor([label], device=logits.device))
    names = list(outputs)
    slopes = torch.autograd.grad(loss, [outputs[name] for name in names], allow_unused=True)
    # An operation that the logits do not depend on has none.
    return {n: torch.zeros_like(outputs[n][0]) if g is None else g[0] for n, g in zip(names, slopes, strict=True)}


def drawn_inputs(shape: tuple[int, ...], count: int, low: float, high: float, like: Tensor) -> Tensor:
    """Draws smooth random inputs in [low, high], [count, *shape], in place of public inputs."""
    coins = torch.Generator().manual_seed(0)
    if len(shape) == 3 and min(shape[1:]) >= 4:
        coarse = (shape[0], math.ceil(shape[1] / 4), math.ceil(shape[2] / 4))
        drawn = torch.rand(count, *coarse, generator=coins, dtype=torch.float64)
        drawn = functional.interpolate(drawn, size=shape[1:], mode="bilinear")
    else:
        drawn = torch.rand(count, *shape, generator=coins, dtype=torch.float64)
    return (low + (high - low) * drawn).to(like.device)
