"""Batch norms as a prior: their running statistics are those of the activations of the training data.

Yin, Molchanov, Li & others, "Dreaming to Distill: Data-free Knowledge Transfer via DeepInversion", CVPR 2020, Eq. 4,
which gradient inversion took over. The statistics are those of the model that the server sent; a small batch deviates
from them by more than a large batch.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..closed_form.recursion.forward import results
from ..targets.network import Network
from ..threat_model.attack_errors import NotApplicable


def statistics_mismatches(network: Network, like: Tensor) -> Callable[[Tensor], Float[Tensor, " r"]]:
    """Returns a function of inputs [r, b, *input_shape] -> mismatch of each batch's activations with the statistics.

    The mismatch is the sum over batch norms of |mean - running mean| + |variance - running variance|, norms over
    channels, with mean and variance, without correction, over the examples and pixels of a batch.

    Args:
        network: the network at the attacked step.
        like: a tensor of the dtype and on the device of the inputs.

    Raises:
        NotApplicable: there is no batch norm, or an operation of unknown kind before it.
    """
    norms = [norm for norm in network.operations if norm.kind == "batch_norm"]
    if not norms:
        raise NotApplicable(
            "the network must have batch norms with running statistics, and it has none: a model of private training "
            "has none"
        )
    # Operations after the last batch norm, such as max pooling, need not be of a known kind.
    last = network.operations.index(norms[-1])
    front = replace(network, operations=network.operations[:last])
    values = {name: v.to(like) if v.is_floating_point() else v for name, v in network.parameters.items()}
    # An unknown operation is refused here, and not in the first step of a search.
    with torch.no_grad():
        results(front, like.new_zeros(1, *network.operations[0].shape), values)

    def mismatches(inputs: Tensor) -> Tensor:
        r, b = inputs.shape[:2]
        outputs = results(front, inputs.flatten(0, 1), values)
        total = inputs.new_zeros(r)
        for norm in norms:
            # [r, channels, b and pixels]
            entering = outputs[norm.inputs[0]].unflatten(0, (r, b)).flatten(3).movedim(2, 1).flatten(2)
            mean, variance = values[norm.settings["mean"]], values[norm.settings["variance"]]
            total = total + _norms(entering.mean(dim=2) - mean)
            total = total + _norms(entering.var(dim=2, correction=0) - variance)
        return total

    return mismatches


def _norms(vectors: Tensor) -> Tensor:
    # clamp: the root has no derivative at 0.
    return vectors.square().sum(dim=1).clamp(min=torch.finfo(vectors.dtype).tiny).sqrt()
