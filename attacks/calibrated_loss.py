"""Calibrated loss: a candidate is a member if its loss is smaller than under models not trained on it.

Watson, Guo, Cormode & Sablayrolles, "On the Importance of Difficulty Calibration in Membership Inference Attacks", ICLR
2022 (arXiv:2111.08440), Equation 5. A loss that is high under all models is no sign of a non-member, and a loss that is
low under all is no sign of a member. With `scaled` the log odds of the label replace the loss (Carlini et al., S&P
2022), because their differences do not shrink if all models are confident.
"""

import torch

from .core import Access, Knows, MembershipScores, ModelAccess, attack, granted
from .core.membership.shadow_statistics import answered, label_log_probability, log_odds, mean_over


@attack(access=Access.BLACK_BOX, knows=Knows.SHADOWS)
def calibrated_loss(
    target: ModelAccess,
    generator: torch.Generator,
    *,
    shadows: int = 16,
    views: int = 1,
    scaled: bool = False,
    batch_size: int = 1024,
) -> MembershipScores:
    """Scores each candidate by the mean loss of models not trained on it, less its loss under the target.

    Args:
        target: the final model, answering with logits, and shadow models.
        generator: not used; the attack is deterministic.
        shadows: number of shadow models to compare with; even. The half that was not trained on a candidate is used for
            it.
        views: views of each candidate, as of `lira`; differences are averaged over them.
        scaled: whether log odds of the label replace minus the loss.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        The mean loss of the others less that of the target in nats, or the difference of log odds; float64.

    Raises:
        NotApplicable: fewer shadow models, or views, than requested.
        ValueError: a setting out of range.
    """
    candidates = granted(target.candidates)
    own, others, trained_on = answered(target, shadows, views, batch_size)
    signal = log_odds if scaled else label_log_probability
    without = mean_over(signal(others, candidates.labels), ~trained_on)
    scores = (signal(own, candidates.labels) - without).mean(1)
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False, dependence="per_model")
