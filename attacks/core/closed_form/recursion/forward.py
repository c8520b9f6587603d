"""Forward and backward pass of a network from its description: the results of all operations, on any data."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ...targets.network import Network
from .operations import result_of


def doubled(network: Network) -> dict[str, Tensor]:
    """Returns the parameters in float64: a single float32 constant would cost an inversion ten digits."""
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


def derivatives(network: Network, inputs: Tensor, label: int) -> dict[str, Tensor]:
    """Returns the derivative of the loss with respect to the result of every operation, for one example.

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
    # Operations that the logits do not depend on have no derivative.
    return {n: torch.zeros_like(outputs[n][0]) if g is None else g[0] for n, g in zip(names, slopes, strict=True)}


def drawn_inputs(shape: tuple[int, ...], count: int, low: float, high: float, like: Tensor) -> Tensor:
    """Draws smooth random inputs in [low, high], [count, *shape], in place of public inputs."""
    generator = torch.Generator().manual_seed(0)
    if len(shape) == 3 and min(shape[1:]) >= 4:
        coarse = (shape[0], math.ceil(shape[1] / 4), math.ceil(shape[2] / 4))
        drawn = torch.rand(count, *coarse, generator=generator, dtype=torch.float64)
        drawn = functional.interpolate(drawn, size=shape[1:], mode="bilinear")
    else:
        drawn = torch.rand(count, *shape, generator=generator, dtype=torch.float64)
    return (low + (high - low) * drawn).to(like.device)
