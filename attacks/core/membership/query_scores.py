"""What a final model answers about labelled examples, as the scores of membership tests are made of it."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..targets.observation import Examples, ModelAccess


def answers(target: ModelAccess, asked: Examples, batch_size: int) -> Float[Tensor, "n classes"]:
    """Log probabilities, in float64: in float32 a confident model's are ties at 0.

    Args:
        target: answering with logits.
        asked: whom to ask about.
        batch_size: examples asked at a time; bounds memory, changes nothing else.

    Raises:
        ValueError: batch_size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    with torch.no_grad():
        found = [target.logits(inputs).double().log_softmax(dim=1) for inputs in asked.inputs.split(batch_size)]
    return torch.cat(found)


def logit_gap(log_probabilities: Float[Tensor, "n classes"], labels: Tensor) -> Float[Tensor, " n"]:
    """Log odds of the label, log p_y - log sum_{c != y} p_c: about normal over trainings (Carlini et al., S&P 2022)."""
    own = log_probabilities.gather(1, labels[:, None])[:, 0]
    # From the others and not as log(1 - p_y), which is log 0 where the model is certain.
    others = log_probabilities.scatter(1, labels[:, None], -torch.inf).logsumexp(dim=1)
    return own - others
