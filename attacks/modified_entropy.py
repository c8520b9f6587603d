"""Modified entropy: the model answers members with confidence, and correctly.

Song & Mittal, "Systematic Evaluation of Privacy Risks of Machine Learning Models", USENIX Security 2021
(arXiv:2003.10595), Section 3.2: -(1 - p_y) log p_y - sum over the other classes of p_c log(1 - p_c), which is 0 for a
confident correct prediction and grows without bound for a confident wrong prediction, while entropy is small for both.

Deviation: instead of a threshold per class, learned from shadow models, minus the logarithm of the modified entropy is
centred by public examples of the class; without `calibrated` the score is minus the modified entropy. The attack sets
no threshold: the scorer reports the whole ROC curve.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from .core import Access, Knows, MembershipScores, ModelAccess, attack, granted
from .core.membership.query_scores import answers

BORROWED = 8
"""Pseudo-count: number of examples of average score added to each class's public examples."""


@attack(access=Access.BLACK_BOX, knows=Knows.POPULATION)
def modified_entropy(
    target: ModelAccess, generator: torch.Generator, *, calibrated: bool = True, batch_size: int = 1024
) -> MembershipScores:
    """Scores each candidate by minus its modified entropy under the final model.

    Args:
        target: the final model, answering with logits.
        generator: not used.
        calibrated: whether classes are made comparable by public examples, which the model answers as it does
            non-members.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        Minus the modified entropy in nats, or its centred logarithm; float64, larger for members.
    """
    candidates, public = granted(target.candidates), granted(target.population)
    scores = -_modified_entropy(answers(target, candidates, batch_size), candidates.labels)
    if calibrated:
        of_public = -_modified_entropy(answers(target, public, batch_size), public.labels)
        scores = _centred(scores, candidates.labels, of_public, public.labels, target.classes)
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False, dependence="per_model")


def _modified_entropy(log_p: Float[Tensor, "n classes"], labels: Tensor) -> Float[Tensor, " n"]:
    own = log_p.gather(1, labels[:, None])[:, 0]
    # log(1 - p_c) is computed from the other classes' probabilities: 1 - p is 0 in float64 if p is within 1e-16 of 1.
    largest = log_p.argmax(dim=1, keepdim=True)
    log_rest = log_p.scatter(1, largest, -torch.inf).logsumexp(dim=1, keepdim=True)
    of_others = torch.log1p(-log_p.exp().clamp(max=1 - 1e-16)).scatter(1, largest, log_rest)
    without_own = (log_p.exp() * of_others).scatter(1, labels[:, None], 0.0)
    missing = of_others.gather(1, labels[:, None])[:, 0].exp()  # 1 - p_y
    return -missing * own - without_own.sum(dim=1)


def _centred(scores: Tensor, labels: Tensor, public: Tensor, public_labels: Tensor, classes: int) -> Tensor:
    """Returns minus log modified entropy less its mean over public examples of the class.

    The mean of a class is shrunk towards the mean of all, as if it had `BORROWED` more examples of average score.
    """
    size, own = -(-scores).clamp(min=1e-300).log(), -(-public).clamp(min=1e-300).log()
    counts = torch.bincount(public_labels, minlength=classes)
    sums = torch.zeros(classes, dtype=own.dtype, device=own.device).index_add(0, public_labels, own)
    centre = (sums + BORROWED * own.mean()) / (counts + BORROWED)
    return size - centre[labels]
