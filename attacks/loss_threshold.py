"""Loss threshold: members have a smaller loss.

Yeom, Giacomelli, Fredrikson & Jha, "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", CSF
2018, Adversary 1 (arXiv:1709.01604). The attack sets no threshold: the scorer reports the whole ROC curve.
"""

import torch

from .core import Access, MembershipScores, ModelAccess, attack, granted
from .core.membership.query_scores import answers


@attack(access=Access.BLACK_BOX)
def loss_threshold(target: ModelAccess, generator: torch.Generator, *, batch_size: int = 1024) -> MembershipScores:
    """Scores each candidate by minus its cross-entropy under the final model.

    Args:
        target: the final model, answering with logits.
        generator: not used.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        Minus the loss in nats, in float64: in float32 the losses of a confident model are ties at 0.
    """
    candidates = granted(target.candidates)
    losses = -answers(target, candidates, batch_size).gather(1, candidates.labels[:, None])[:, 0]
    return MembershipScores(ids=candidates.ids, scores=-losses, exact=False, dependence="per_model")
