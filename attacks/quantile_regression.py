"""Quantile regression: a candidate is a member if the model is more confident on it than on similar non-members.

Bertran, Tang, Kearns, Morgenstern, Roth & Wu, "Scalable Membership Inference Attacks via Quantile Regression", NeurIPS
2023 (arXiv:2307.03694): a regression of the score on the example, over non-members, in the place of shadow models. In
its Gaussian form it predicts mean and standard deviation, whose quantiles give a test at every false positive rate.

Deviation: gradient boosting (scikit-learn) on inputs and label, while the paper trains a network; the deviation is
fitted to out-of-fold residuals, because in-sample residuals are too small. Non-members are public examples.
"""

import numpy as np
import torch
from numpy import ndarray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import KFold, cross_val_predict

from .core import Access, Examples, Knows, MembershipScores, ModelAccess, NotApplicable, attack, granted
from .core.membership.query_scores import answers, logit_gap

FOLDS = 5


@attack(access=Access.BLACK_BOX, knows=Knows.POPULATION)
def quantile_regression(
    target: ModelAccess, generator: torch.Generator, *, trees: int = 100, batch_size: int = 1024
) -> MembershipScores:
    """Scores each candidate by its logit gap less that predicted from similar public examples, over its deviation.

    Args:
        target: the final model, answering with logits.
        generator: source of the folds and of the regression.
        trees: number of trees of each regression.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        (log p_y - log(1 - p_y) - its prediction) / predicted deviation, float64.

    Raises:
        NotApplicable: fewer than ten public examples.
        ValueError: a setting out of range.
    """
    if trees < 1:
        raise ValueError(f"trees must be at least 1, got {trees}")
    candidates, public = granted(target.candidates), granted(target.population)
    if len(public.ids) < 2 * FOLDS:
        raise NotApplicable(f"a regression must have at least {2 * FOLDS} public examples, got {len(public.ids)}")
    gaps = [logit_gap(answers(target, of, batch_size), of.labels).cpu().numpy() for of in (candidates, public)]
    candidate_features, known = _features(candidates, target.classes), _features(public, target.classes)
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    mean = HistGradientBoostingRegressor(max_iter=trees, random_state=seed)
    folds = KFold(FOLDS, shuffle=True, random_state=seed)
    away = np.abs(gaps[1] - cross_val_predict(mean, known, gaps[1], cv=folds))
    deviation = (
        HistGradientBoostingRegressor(max_iter=trees, random_state=seed).fit(known, away).predict(candidate_features)
    )
    # A deviation near 0 would turn a non-member above its prediction by rounding into a certain member.
    least = 0.1 * float(away.mean()) + 1e-12
    scores = (gaps[0] - mean.fit(known, gaps[1]).predict(candidate_features)) / np.maximum(deviation, least)
    score_tensor = torch.from_numpy(np.ascontiguousarray(scores, dtype=np.float64)).to(candidates.ids.device)
    return MembershipScores(ids=candidates.ids, scores=score_tensor, exact=False, dependence="per_model")


def _features(of: Examples, classes: int) -> ndarray:
    one_hot = torch.nn.functional.one_hot(of.labels, classes)
    return torch.cat([of.inputs.flatten(1).double(), one_hot], dim=1).cpu().numpy()
