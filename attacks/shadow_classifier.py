"""Shadow classifier: what tells members of shadow models from strangers, learned from their answers, one test a class.

Shokri, Stronati, Song & Shmatikov, "Membership Inference Attacks Against Machine Learning Models", S&P 2017, Section V.
Of its shadow models the adversary knows the members; a classifier for each class learns from answers who is one.

Deviation: it reads the three largest probabilities, the loss and whether the answer is right, as Salem et al. (NDSS
2019) do in part, where the paper takes all probabilities; by logistic regression (scikit-learn), where it trains
networks; of shadow models on halves of the very candidates, where it trains them on other data. All that is fitted is
fitted to shadow models.
"""

import numpy as np
import torch
from numpy import ndarray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from .core import Access, Knows, MembershipScores, ModelAccess, NotApplicable, attack, granted
from .core.membership.shadow_statistics import answered

TOP = 3
"""Largest probabilities that are looked at."""


@attack(access=Access.BLACK_BOX, knows=Knows.SHADOWS)
def shadow_classifier(
    target: ModelAccess, coins: torch.Generator, *, shadows: int = 16, strength: float = 1.0, batch_size: int = 1024
) -> MembershipScores:
    """Scores each candidate by a classifier of its class, which learned members of shadow models from their answers.

    Args:
        target: the final model, answering with logits, and shadow models.
        coins: not used; the attack is deterministic.
        shadows: models to learn from; even.
        strength: inverse of the penalty on squared weights, of standardised features.
        batch_size: inputs asked at a time; bounds memory, changes nothing else.

    Returns:
        Log odds of membership by the classifier of the label, in nats, float64.

    Raises:
        NotApplicable: too few shadow models, or a class whose candidates are all members of each of them, or none is.
        ValueError: a setting out of range.
    """
    if not strength > 0:
        raise ValueError(f"strength must be positive, got {strength}")
    candidates = granted(target.candidates)
    own, others, trained_on = answered(target, shadows, 1, batch_size)
    asked, known = (_features(logits[..., 0, :], candidates.labels) for logits in (own, others))
    inside, labels = trained_on.cpu().numpy(), candidates.labels.cpu().numpy()
    scores = np.empty(len(labels))
    for label in np.unique(labels):
        of = labels == label
        told = inside[:, of].ravel()
        if told.all() or not told.any():
            raise NotApplicable(
                f"class {label} must have candidates that a shadow model was trained on, and others that it was not"
            )
        learner = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=10_000))
        learner.fit(known[:, of].reshape(-1, known.shape[-1]), told)
        scores[of] = learner.decision_function(asked[of])
    found = torch.from_numpy(scores).to(candidates.ids.device)
    return MembershipScores(ids=candidates.ids, scores=found, exact=False, dependence="per_model")


def _features(logits: Tensor, labels: Tensor) -> ndarray:
    """[..., n, features] of answers [..., n, classes] about examples with these labels [n]."""
    log_p = logits.double().log_softmax(-1)
    own = log_p.gather(-1, labels.expand(log_p.shape[:-1])[..., None])
    top = log_p.topk(min(TOP, log_p.shape[-1]), dim=-1).values.exp()
    right = (log_p.argmax(-1) == labels).double()[..., None]
    return torch.cat([top, -own, right], dim=-1).cpu().numpy()
