"""Outputs of a final model on labelled examples, as the basis of membership scores."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..targets.observation import ModelAccess
from ..targets.target import Examples


def answers(target: ModelAccess, examples: Examples, batch_size: int) -> Float[Tensor, "n classes"]:
    """Returns log probabilities in float64: in float32 those of a confident model are ties at 0.

    Args:
        target: a model that answers with logits.
        examples: examples to query.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Raises:
        ValueError: batch_size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with torch.no_grad():
        log_probabilities = [
            target.logits(inputs).double().log_softmax(dim=1) for inputs in examples.inputs.split(batch_size)
        ]
    return torch.cat(log_probabilities)


def logit_gap(log_probabilities: Float[Tensor, "n classes"], labels: Tensor) -> Float[Tensor, " n"]:
    """Returns log odds of the label, log p_y - log sum_{c != y} p_c; about normal over trainings (Carlini et al.)."""
    own = log_probabilities.gather(1, labels[:, None])[:, 0]
    # The other classes are summed, because log(1 - p_y) is log 0 if the model is certain.
    others = log_probabilities.scatter(1, labels[:, None], -torch.inf).logsumexp(dim=1)
    return own - others
