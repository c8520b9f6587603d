"""LiRA: a candidate is a member if the model is as sure of its label as shadow models trained on it.

Carlini, Chien, Nasr, Song, Terzis & Tramèr, "Membership Inference Attacks From First Principles", S&P 2022, Algorithm 1
and section VI. Over trainings, the log odds of a label are about normal. The test of a candidate is therefore the
likelihood ratio of two normal distributions: of shadow models trained on it, and of shadow models not trained on it.

Deviation: a pooled variance is that of residuals, while the authors' code pools log odds of different candidates. The
offline score is the standard score, which orders candidates as its one-sided probability does, but has no ties at 1.
Several views are taken as independent, as in the authors' code for few models.
"""

import torch
from torch import Tensor

from .core import Access, Knows, MembershipScores, ModelAccess, attack, granted
from .core.membership.shadow_statistics import Normal, compared, normal


@attack(access=Access.BLACK_BOX, knows=Knows.SHADOWS)
def lira(
    target: ModelAccess,
    generator: torch.Generator,
    *,
    shadows: int = 16,
    views: int = 1,
    online: bool = True,
    variance: str = "auto",
    batch_size: int = 1024,
) -> MembershipScores:
    """Scores each candidate by the likelihood ratio of its log odds under models with and without it.

    Args:
        target: the final model, answering with logits, and shadow models.
        generator: not used; the attack is deterministic.
        shadows: number of shadow models to compare with; even.
        views: views of each candidate: 1 for the image itself, 2 with its mirror image, up to 18 with shifts by a
            pixel.
        online: whether shadow models trained on the candidate are used; without them the score is the standard score
            among those not trained on it, for an adversary that trained its models before it knew the candidates.
        variance: "per_example", "pooled" over candidates, or "auto": pooled below 64 models, else per example.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        log N(odds; in) - log N(odds; out), or the standard score, summed over views, float64.

    Raises:
        NotApplicable: too few shadow models.
        ValueError: a setting out of range.
    """
    own, others, trained_on = compared(target, shadows, views, batch_size)
    without = normal(others, ~trained_on, variance)
    if online:
        scores = _log_density(own, normal(others, trained_on, variance)) - _log_density(own, without)
    else:
        scores = (own - without.mean) / without.deviation
    ids = granted(target.candidates).ids
    return MembershipScores(ids=ids, scores=scores.sum(1), exact=False, dependence="per_model")


def _log_density(values: Tensor, under: Normal) -> Tensor:
    """Returns the log density without its constant, which is the same for all."""
    return -under.deviation.log() - ((values - under.mean) / under.deviation).square() / 2
