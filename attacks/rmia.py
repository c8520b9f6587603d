"""RMIA: a candidate is a member if the target's training raised its probability more than that of non-members.

Zarifzadeh, Liu & Shokri, "Low-Cost High-Power Membership Inference Attacks", ICML 2024 (arXiv:2312.03262), Section 3
and Algorithm 1. R(x) is the probability of the label under the target over its mean under reference models; the score
is the share of public examples z with R(x) >= gamma R(z). BASE (Lassila et al. 2025) is the same test.

On a single target the score is an increasing function of R(x), for any public examples and gamma, so its AUC is that of
R(x); public examples and gamma make scores of different targets comparable. n public examples give scores of n + 1
steps, so that they do not resolve false positive rates below 1 / n; ten of them for each false positive, at a rate of 1
%, are a thousand. Within a step R(x) itself decides.

Deviation: public examples are in no reference model, so their mean is estimated as offline in both modes. With views
the score is the mean over views, while the authors vote.
"""

import math

import torch
from torch import Tensor

from .core import Access, Knows, MembershipScores, ModelAccess, NotApplicable, attack, granted
from .core.membership.shadow_statistics import answered, label_log_probability, log_mean_over, target_answers

LEAST_POPULATION = 10
"""Smallest number of public examples for a meaningful score."""

GRID = [i / 10 for i in range(11)]
"""Values of `a` among which it is tuned."""


@attack(access=Access.BLACK_BOX, knows=Knows.SHADOWS | Knows.POPULATION)
def rmia(
    target: ModelAccess,
    generator: torch.Generator,
    *,
    shadows: int = 16,
    views: int = 1,
    online: bool = True,
    gamma: float = 1.0,
    a: float = 0.3,
    tuned: bool = False,
    temperature: float = 1.0,
    terms: int = 0,
    margin: float = 0.0,
    batch_size: int = 1024,
) -> MembershipScores:
    """Scores each candidate by the share of public examples whose probability rose less.

    Args:
        target: the final model, answering with logits, shadow models and public examples.
        generator: not used; the attack is deterministic.
        shadows: number of reference models; even.
        views: views of each candidate, as of `lira`; public examples are queried as they are.
        online: whether the half of the models trained on the candidate is used; without it the mean over all models is
            taken to be ((1 + a) p_out + 1 - a) / 2.
        gamma: factor by which its probability must have risen more than that of a public example.
        a: slope, in [0, 1], of the probability of the label with the candidate in the training set over that without:
            p_in = a p_out + 1 - a.
        tuned: whether `a` is chosen for the largest mean AUC with shadow models as targets of the others.
        temperature: divisor of the logits.
        terms: number of terms of the Taylor series that replaces the exponential in the softmax, even; 0 for the
            softmax itself. The authors' best setting is 4 with a margin of 0.6 and a temperature of 2.
        margin: subtracted from the logit of the label, with `terms`.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Returns:
        The share, refined by R(x) within its steps, in (0, 1), float64.

    Raises:
        NotApplicable: too few shadow models or public examples.
        ValueError: a setting out of range.
    """
    for name, value in (("gamma", gamma), ("temperature", temperature)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if not 0 <= a <= 1:
        raise ValueError(f"a must be in [0, 1], got {a}")
    if terms < 0 or terms % 2:
        raise ValueError(f"terms must be even, or 0 for the softmax, got {terms}: an odd series may be negative")
    if not math.isfinite(margin) or margin < 0 or (margin and not terms):
        raise ValueError(f"margin must be at least 0 and finite, and 0 without terms, got {margin}")
    candidates, public = granted(target.candidates), granted(target.population)
    if len(public) < LEAST_POPULATION:
        raise NotApplicable(f"rmia must have at least {LEAST_POPULATION} public examples, got {len(public)}")
    own, others, trained_on = answered(target, shadows, views, batch_size)
    strangers = granted(target.shadows).first(shadows).population
    if strangers is None:
        raise NotApplicable("rmia must know what shadow models answer about the public examples")

    def of_label(logits: Tensor, labels: Tensor) -> Tensor:
        scaled = logits / temperature
        return taylor_log_probability(scaled, labels, terms, margin) if terms else label_log_probability(scaled, labels)

    log_p, of_models = (of_label(logits, candidates.labels) for logits in (own, others))
    if tuned:
        a = best_slope(of_models, trained_on)
    mean = log_mean_over(of_models, torch.ones_like(trained_on)) if online else None
    ratio = log_p - (_both(log_mean_over(of_models, ~trained_on), a) if mean is None else mean)
    log_z = of_label(target_answers(target, public, 1, batch_size), public.labels)
    out_z = of_label(strangers[:, :, None], public.labels)
    ratio_z = log_z - _both(log_mean_over(out_z, torch.ones_like(out_z[..., 0], dtype=torch.bool)), a)
    scores = dominated(ratio, ratio_z[:, 0], gamma).mean(1)
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False, dependence="per_model")


def taylor_log_probability(logits: Tensor, labels: Tensor, terms: int, margin: float) -> Tensor:
    """Returns the label's log probability, by a softmax with a Taylor series for the exponential and a soft margin.

    De Brébisson & Vincent, ICLR 2016, for the series; Banerjee et al., arXiv:2011.11538, for the margin. The series
    grows as a power of the logits, so that it separates logits for which the softmax is 1 to the last digit.

    Args:
        logits: [..., n, views, classes].
        labels: labels of the n examples.
        terms: terms of the series beyond the first; even, so that it is positive.
        margin: subtracted from the logit of the label.
    """
    own = labels[:, None].expand(logits.shape[:-1])[..., None]
    wide = logits.double()
    wide = wide.scatter_add(-1, own, torch.full_like(own, -margin, dtype=wide.dtype))
    series, term = torch.ones_like(wide), torch.ones_like(wide)
    for power in range(1, terms + 1):
        term = term * wide / power
        series = series + term
    log = series.log()
    return (log - log.logsumexp(-1, keepdim=True)).gather(-1, own)[..., 0]


def dominated(log_ratio: Tensor, of_public: Tensor, gamma: float) -> Tensor:
    """Returns the share of public examples with R(x) >= gamma R(z), ties broken by R(x): strictly increasing.

    Args:
        log_ratio: log R(x), of any shape.
        of_public: log R(z) [public].
        gamma: the factor.
    """
    below = torch.searchsorted((of_public + math.log(gamma)).sort().values, log_ratio.contiguous(), right=True)
    # x / (1 + |x|) and not a sigmoid, which is 0 or 1 to float64 from 37 nats on.
    within = (1 + log_ratio / (1 + log_ratio.abs())) / 2
    return (below + within) / (len(of_public) + 1)


def best_slope(log_p: Tensor, trained_on: Tensor) -> float:
    """Returns the `a` of the largest mean AUC, with each shadow model in turn as the target of the others.

    The model trained on the other half is left out as well: otherwise the number of remaining models trained on a
    candidate would reveal whether the target was.

    Args:
        log_p: log probability of the label [models, n, views].
        trained_on: [models, n], in pairs.

    Raises:
        NotApplicable: a single pair of models, or no pairs of complements.
    """
    models = len(trained_on)
    if models < 4 or not torch.equal(trained_on[::2], ~trained_on[1::2]):
        raise NotApplicable(f"a can be tuned on at least 4 shadow models in pairs of complements, got {models}")
    outside = log_p.masked_fill(~(~trained_on)[..., None], -torch.inf)
    # One model of each pair was not trained on the candidate; the reference for both models of a pair is the mean over
    # such models of all other pairs.
    of_pair = outside.unflatten(0, (models // 2, 2)).logsumexp(1).exp()
    log_others = ((of_pair.sum(0) - of_pair) / (models // 2 - 1)).clamp(min=0).log().repeat_interleave(2, dim=0)
    scored = torch.stack([(log_p - _both(log_others, a)).mean(-1) for a in GRID])
    return GRID[int(_mean_auc(scored, trained_on).argmax())]


def _mean_auc(scores: Tensor, positive: Tensor) -> Tensor:
    """Returns the mean over models of the AUC of scores [settings, models, n]; ties, rare here, count by order."""
    ranks = scores.argsort(-1).argsort(-1).double() + 1
    inside = positive.sum(-1).double()
    lead = (ranks * positive).sum(-1) - inside * (inside + 1) / 2
    return (lead / (inside * (positive.shape[-1] - inside))).mean(-1)


def _both(log_out: Tensor, a: float) -> Tensor:
    """Returns the log of ((1 + a) p_out + 1 - a) / 2, the mean of p_out and of p_in = a p_out + 1 - a."""
    log_offset = math.log((1 - a) / 2) if a < 1 else -math.inf
    return torch.logaddexp(log_out + math.log((1 + a) / 2), torch.full_like(log_out, log_offset))
