"""BaVarIA: LiRA's test with each candidate's mean and variance shrunk towards a prior fitted to all candidates.

Brännvall, "Exponential-Family Membership Inference: From LiRA and RMIA to BaVarIA", 2026 (arXiv:2603.11799). LiRA and
RMIA (and BASE) are log ratios of an exponential family, and differ in the number of parameters that they estimate for
each candidate: with few shadow models, LiRA lacks good variances per candidate. Under a normal-inverse-gamma prior,
which all candidates share, the log odds of a candidate have a Student t distribution among models trained on it, and
another among the others.

Deviation: hyperparameters are those of the largest marginal likelihood. The location of the mean with a candidate is a
quadratic function of its mean without it, because membership lifts the log odds more, the less sure other models are of
the candidate, as in RMIA's p_in = a p_out + 1 - a. Offline, the distribution with the candidate is that prior, without
the outputs of models trained on this very candidate: they enter only the six hyperparameters, which an adversary can
fit on examples of its own. A candidate's log odds are taken to vary by at least a thousandth of the typical variation:
if many are equal, as with an API that caps its confidences, the likelihood of the hyperparameters otherwise has no
single maximum.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .core import Access, Knows, MembershipScores, ModelAccess, attack, granted
from .core.membership.conjugate_prior import Summary, fitted_prior
from .core.membership.shadow_statistics import compared, refuse_nobody


@attack(access=Access.BLACK_BOX, knows=Knows.SHADOWS)
def bavaria(
    target: ModelAccess,
    generator: torch.Generator,
    *,
    shadows: int = 16,
    views: int = 1,
    online: bool = True,
    batch_size: int = 1024,
) -> MembershipScores:
    """Scores each candidate by the ratio of two Student t densities of its log odds, with and without it.

    Args:
        target: the final model, answering with logits, and shadow models.
        generator: not used; the attack is deterministic.
        shadows: number of shadow models to compare with; even, at least 4.
        views: views of each candidate, as of `lira`; taken as independent.
        online: whether models trained on the candidate are used for it.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        log t(odds; in) - log t(odds; out), summed over views, float64.

    Raises:
        NotApplicable: too few shadow models.
        ValueError: a setting out of range.
    """
    odds, others, trained_on = compared(target, shadows, views, batch_size)
    refuse_nobody(trained_on)
    refuse_nobody(~trained_on)
    # Each view of a candidate has a mean and a variance of its own; all share a prior.
    values, inside = others.flatten(1), trained_on.repeat_interleave(views, dim=1)
    middle, size = _unit(values, inside)
    odds, values = (odds - middle) / size, (values - middle) / size
    without, among = Summary.of(values, ~inside), Summary.of(values, inside)
    ones = torch.ones_like(without.mean)
    out = fitted_prior(without, ones[:, None]).predicted(without)
    easy = out.location
    prior = fitted_prior(among, torch.stack([ones, easy, easy.square()], dim=1))
    lifted = prior.predicted(among if online else among.nothing())
    scores = lifted.log_density(odds.flatten()) - out.log_density(odds.flatten())
    ids = granted(target.candidates).ids
    return MembershipScores(ids=ids, scores=scores.unflatten(0, odds.shape).sum(1), exact=False, dependence="per_model")


def _unit(values: Float[Tensor, "models n"], inside: Bool[Tensor, "models n"]) -> tuple[Tensor, Tensor]:
    """Returns origin and unit for log odds: their median, and the typical standard deviation within a subject.

    A subject is a view of a candidate, with a value from each model. The variation over all values would be too large a
    unit: subjects may differ from each other a thousand times as much as models do on a subject, as with a pretrained
    model trained for a few steps. Medians are robust to a diverged model.
    """
    middle = values.median()
    away = values - middle
    far = _typical(away.abs())  # so that squares of huge values stay finite
    spreads = []
    for chosen in (inside, ~inside):
        summary = Summary.of(away / far, chosen, least=0.0)
        spreads.append((summary.squares / (summary.count - 1).clamp(min=1)).sqrt())
    return middle, far * _typical(torch.cat(spreads))


def _typical(sizes: Tensor) -> Tensor:
    """Returns the median of the nonzero values, or 1."""
    nonzero = sizes[sizes > 0]
    return nonzero.median() if nonzero.numel() else torch.ones_like(sizes.sum())
