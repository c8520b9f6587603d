"""Statistics over shadow models: log odds of the label, and their mean and spread with a candidate in and out.

Carlini et al., S&P 2022, section V: over trainings, the log odds of a label are about normal. Few models give a poor
variance for each candidate, so it is then pooled over candidates. It is pooled over *residuals*: raw log odds of
different candidates also differ by difficulty, which two public implementations count as variance over trainings.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..targets.observation import ModelAccess
from ..targets.target import Examples
from ..threat_model.attack_errors import NotApplicable
from ..threat_model.requires import granted
from .query_scores import logit_gap
from .shadow_models import viewed

ENOUGH = 64
"""Number of shadow models from which on each candidate has a variance of its own (half of them in, half out)."""

LEAST_DEVIATION = 1e-6
"""Smallest standard deviation of log odds: a smaller value is rounding, and would turn a score that exceeds the mean by
rounding into a certain member.
"""


@dataclass(frozen=True)
class Normal:
    """Normal distribution of log odds for each candidate and view.

    Attributes:
        mean: [candidates, views].
        deviation: standard deviation [candidates, views], at least `LEAST_DEVIATION`.
        count: [candidates], number of models behind each estimate.
    """

    mean: Float[Tensor, "n views"]
    deviation: Float[Tensor, "n views"]
    count: Float[Tensor, " n"]


def target_answers(target: ModelAccess, examples: Examples, views: int, batch_size: int) -> Float[Tensor, "n views k"]:
    """Returns logits of the target for examples under several views, float64.

    Args:
        target: a model that answers with logits.
        examples: examples to query.
        views: number of views of each, as in `viewed`.
        batch_size: inputs per query; bounds memory, changes nothing else.

    Raises:
        ValueError: batch_size below 1, outputs that are not finite, or as `viewed`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    inputs = viewed(examples.inputs, views).flatten(0, 1)
    with torch.no_grad():
        logits = torch.cat([target.logits(batch).double() for batch in inputs.split(batch_size)])
    if not logits.isfinite().all():
        raise ValueError("logits of the target must be finite, got NaN or infinity: its training diverged")
    return logits.unflatten(0, (len(examples), views))


def log_odds(logits: Float[Tensor, "*some n views k"], labels: Tensor) -> Float[Tensor, "*some n views"]:
    """Returns log odds of the label under each view, `logit_gap`, in float64.

    Args:
        logits: outputs of a model or of several.
        labels: labels of the candidates [n].
    """
    own = labels[:, None].expand(logits.shape[:-1])
    # Differences of logits are those of log probabilities, so nothing is normalised first.
    return logit_gap(logits.double().flatten(0, -2), own.flatten()).reshape(logits.shape[:-1])


def label_log_probability(logits: Float[Tensor, "*some n views k"], labels: Tensor) -> Float[Tensor, "*some n views"]:
    """Returns the log probability of the label under each view, minus its loss, in float64.

    Args:
        logits: outputs of a model or of several.
        labels: labels of the candidates [n].
    """
    own = labels[:, None].expand(logits.shape[:-1])
    return logits.double().log_softmax(-1).gather(-1, own[..., None])[..., 0]


def answered(target: ModelAccess, shadows: int, views: int, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits of the target [n, views, k] and shadow models [models, n, views, k], and `trained_on` [models, n].

    Args:
        target: a target with candidates and shadow models.
        shadows: number of models to use.
        views: views of each candidate, at most as many as the shadow models have.
        batch_size: inputs per query.

    Raises:
        NotApplicable: there are fewer models, or views.
    """
    candidates, bank = granted(target.candidates), granted(target.shadows).first(shadows)
    if views > bank.logits.shape[2]:
        raise NotApplicable(f"{views} views are asked for, and shadow models were asked about {bank.logits.shape[2]}")
    return target_answers(target, candidates, views, batch_size), bank.logits[:, :, :views], bank.trained_on


def compared(target: ModelAccess, shadows: int, views: int, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log odds by target [n, views] and shadow models [models, n, views], and `trained_on` [models, n].

    Arguments and errors are those of `answered`.
    """
    own, others, trained_on = answered(target, shadows, views, batch_size)
    labels = granted(target.candidates).labels
    return log_odds(own, labels), log_odds(others, labels), trained_on


def mean_over(values: Float[Tensor, "models n views"], chosen: Bool[Tensor, "models n"]) -> Float[Tensor, "n views"]:
    """Returns the mean for each candidate over its chosen models.

    Args:
        values: values by model, candidate and view.
        chosen: models by candidate, such as those not trained on it.

    Raises:
        NotApplicable: a candidate without a model.
    """
    refuse_nobody(chosen)
    weight = chosen.to(values)[..., None]
    return (weight * values).sum(0) / weight.sum(0)


def log_mean_over(logs: Float[Tensor, "models n views"], chosen: Bool[Tensor, "models n"]) -> Float[Tensor, "n views"]:
    """Returns the logarithm of the mean of exp(logs) for each candidate over its chosen models.

    Args:
        logs: logarithms, such as log probabilities, by model, candidate and view.
        chosen: as for `mean_over`.

    Raises:
        NotApplicable: a candidate without a model.
    """
    refuse_nobody(chosen)
    return logs.masked_fill(~chosen[..., None], -torch.inf).logsumexp(0) - chosen.sum(0).to(logs).log()[:, None]


def refuse_nobody(chosen: Bool[Tensor, "models n"], least: int = 1) -> None:
    """Refuses if a candidate has too few chosen models, such as models trained on it.

    Raises:
        NotApplicable: a candidate has fewer than `least`.
    """
    if int(chosen.sum(0).min()) < least:
        raise NotApplicable(
            f"every candidate must have at least {least} shadow models of a kind, trained on it or not, "
            f"got {int(chosen.sum(0).min())}; take more"
        )


def normal(values: Float[Tensor, "models n views"], chosen: Bool[Tensor, "models n"], variance: str = "auto") -> Normal:
    """Fits the normal distribution of log odds over the chosen models of each candidate.

    Args:
        values: log odds.
        chosen: models by candidate, such as those trained on it.
        variance: "per_example", "pooled" over candidates, or "auto", decided by the number of models.

    Raises:
        ValueError: an unknown `variance`.
        NotApplicable: a candidate without a model, or with fewer than two for a variance of its own.
    """
    if variance not in ("auto", "per_example", "pooled"):
        raise ValueError(f"variance must be auto, per_example or pooled, got {variance!r}")
    own = variance == "per_example" or (variance == "auto" and len(values) >= ENOUGH)
    weight = chosen.double()[..., None]
    count = weight.sum(0)
    refuse_nobody(chosen, 2 if own else 1)
    mean = (weight * values).sum(0) / count
    squares = (weight * (values - mean).square()).sum(0)
    if own:
        spread = squares / (count - 1)
    else:
        # Residuals of n models have n - 1 degrees of freedom for each candidate.
        freedom = (count - 1).sum()
        if freedom < 1:
            raise NotApplicable("a pooled variance must have candidates with two models of a kind, take more shadows")
        spread = (squares.sum(0) / freedom).expand_as(squares)
    return Normal(mean, spread.sqrt().clamp(min=LEAST_DEVIATION), count[:, 0])
