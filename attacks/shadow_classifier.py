"""Shadow classifier: a classifier per class, trained on outputs of shadow models, that separates their members.

Shokri, Stronati, Song & Shmatikov, "Membership Inference Attacks Against Machine Learning Models", S&P 2017, Section V.
The adversary knows the members of its shadow models; a classifier for each class learns membership from their outputs.

Deviation: it reads the three largest probabilities, the loss and the correctness of the prediction, as Salem et al.
(NDSS 2019) do in part, while the paper takes all probabilities; it is a logistic regression (scikit-learn) instead of a
network; its shadow models are trained on halves of the very candidates instead of on other data. Everything is fitted
to shadow models.
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
"""Number of largest probabilities used as features."""


@attack(access=Access.BLACK_BOX, knows=Knows.SHADOWS)
def shadow_classifier(
    target: ModelAccess, generator: torch.Generator, *, shadows: int = 16, strength: float = 1.0, batch_size: int = 1024
) -> MembershipScores:
    """Scores each candidate by a classifier of its class, trained on the outputs of shadow models.

    Args:
        target: the final model, answering with logits, and shadow models.
        generator: not used; the attack is deterministic.
        shadows: number of shadow models to learn from; even.
        strength: inverse of the penalty on squared weights, of standardised features.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        Log odds of membership by the classifier of the label, in nats, float64.

    Raises:
        NotApplicable: too few shadow models, or a class whose candidates are all members of every shadow model, or of
            none.
        ValueError: a setting out of range.
    """
    if not strength > 0:
        raise ValueError(f"strength must be positive, got {strength}")
    candidates = granted(target.candidates)
    own, others, trained_on = answered(target, shadows, 1, batch_size)
    target_features, known = (_features(logits[..., 0, :], candidates.labels) for logits in (own, others))
    inside, labels = trained_on.cpu().numpy(), candidates.labels.cpu().numpy()
    scores = np.empty(len(labels))
    for label in np.unique(labels):
        of = labels == label
        membership = inside[:, of].ravel()
        if membership.all() or not membership.any():
            raise NotApplicable(
                f"class {label} must have candidates that a shadow model was trained on, and others that it was not"
            )
        learner = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=10_000))
        learner.fit(known[:, of].reshape(-1, known.shape[-1]), membership)
        scores[of] = learner.decision_function(target_features[of])
    score_tensor = torch.from_numpy(scores).to(candidates.ids.device)
    return MembershipScores(ids=candidates.ids, scores=score_tensor, exact=False, dependence="per_model")


def _features(logits: Tensor, labels: Tensor) -> ndarray:
    """Returns features [..., n, features] of outputs [..., n, classes] for examples with labels [n]."""
    log_p = logits.double().log_softmax(-1)
    own = log_p.gather(-1, labels.expand(log_p.shape[:-1])[..., None])
    top = log_p.topk(min(TOP, log_p.shape[-1]), dim=-1).values.exp()
    right = (log_p.argmax(-1) == labels).double()[..., None]
    return torch.cat([top, -own, right], dim=-1).cpu().numpy()
