"""Calibrated loss: a candidate is a member if its loss is smaller than that of models that were not trained on it.

Watson, Guo, Cormode & Sablayrolles, "On the Importance of Difficulty Calibration in Membership Inference Attacks", ICLR
2022 (arXiv:2111.08440), Equation 5. What is hard for everybody is no sign of a stranger, and what is easy none of a
member. With `scaled` the log odds of the label stand in for the loss (Carlini et al., S&P 2022), whose differences do
not shrink where all models are sure.
"""

import torch

from .core import Access, Knows, MembershipScores, ModelAccess, attack, granted
from .core.membership.shadow_statistics import answered, label_log_probability, log_odds, mean_over


@attack(access=Access.BLACK_BOX, knows=Knows.SHADOWS)
def calibrated_loss(
    target: ModelAccess,
    coins: torch.Generator,
    *,
    shadows: int = 16,
    views: int = 1,
    scaled: bool = False,
    batch_size: int = 1024,
) -> MembershipScores:
    """Scores each candidate by how far its loss lies below the mean loss of models that were not trained on it.

    Args:
        target: the final model, answering with logits, and shadow models.
        coins: not used; the attack is deterministic.
        shadows: models to compare with; even. The half that was not trained on a candidate is used for it.
        views: of each candidate, as of `lira`; differences are averaged over them.
        scaled: whether log odds of the label stand in for minus the loss.
        batch_size: inputs asked at a time; bounds memory, changes nothing else.

    Returns:
        The mean loss of the others less that of the target in nats, or the difference of log odds; float64.

    Raises:
        NotApplicable: fewer shadow models, or views, than are asked for.
        ValueError: a setting out of range.
    """
    candidates = granted(target.candidates)
    own, others, trained_on = answered(target, shadows, views, batch_size)
    signal = log_odds if scaled else label_log_probability
    without = mean_over(signal(others, candidates.labels), ~trained_on)
    scores = (signal(own, candidates.labels) - without).mean(1)
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False, dependence="per_model")
