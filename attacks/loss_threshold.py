"""Loss threshold: members have a smaller loss.

Yeom, Giacomelli, Fredrikson & Jha, "Privacy Risk in Machine Learning: Analyzing the Connection to
Overfitting", CSF 2018, Adversary 1 (arXiv:1709.01604). The threshold is left to the scorer, which reports the
whole curve.
"""

import torch
from torch.nn.functional import cross_entropy

from .core import Access, MembershipScores, ModelAccess, attack, granted


@attack(access=Access.BLACK_BOX)
def loss_threshold(target: ModelAccess, coins: torch.Generator, *, batch_size: int = 1024) -> MembershipScores:
    """Scores each candidate by minus its cross-entropy under the final model.

    Args:
        target: the final model, answering with logits.
        coins: not used.
        batch_size: candidates asked at a time; bounds memory, changes nothing else.

    Returns:
        Minus the loss in nats, in float64: in float32 the losses of a confident model are ties at 0.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    candidates = granted(target.candidates)
    with torch.no_grad():
        losses = [
            cross_entropy(target.logits(inputs).double(), labels, reduction="none")
            for inputs, labels in zip(
                candidates.inputs.split(batch_size), candidates.labels.split(batch_size), strict=True
            )
        ]
    return MembershipScores(ids=candidates.ids, scores=-torch.cat(losses), exact=False, dependence="per_model")
