"""Normal-inverse-gamma prior of means and variances that vary between subjects, fitted to all (empirical Bayes).

Each subject has a few values. Mean mu and variance v are drawn from a normal-inverse-gamma prior: v from an inverse
gamma distribution of shape `alpha` and scale `beta`, and mu from N(location, v / kappa). The fitted prior has the
largest marginal likelihood (empirical Bayes), and the next value of a subject then has a Student t distribution
(Murphy, "Conjugate Bayesian analysis of the Gaussian distribution", 2007, Section 6). For a subject with many values it
approaches the normal distribution of these; subjects with few values share their variance estimates, the more the more
alike their variances are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from scipy.optimize import brentq
from scipy.special import digamma, polygamma
from torch import Tensor

from ..closed_form.least_squares import least_squares
from ..threat_model.attack_errors import NotApplicable

LEAST_VARIANCE = 1e-6
"""Added variance of each value, in units of the typical variance within a subject. Identical values of a subject would
have an unbounded likelihood, and many such subjects, as with an API that caps its confidences, a maximum for each.
"""

_FARTHEST, _NEAREST = 20.0, 30.0  # log hyperparameters are at most the first, at least minus the second: no overflow
_MOST_DESCENTS = 20
_IMPROVED = 1e-12  # in mean log likelihood: a descent that gains less is the last
# Up to this many subjects, the search runs on the CPU: it evaluates hundreds of times a few small sums, one after
# another, and each time a GPU takes longer to launch than to add. The crossover was not measured.
_FEW = 2**15


@dataclass(frozen=True)
class Summary:
    """Sufficient statistics of a normal model, for the values of each subject.

    Attributes:
        count: number of values.
        mean: mean of the values.
        squares: sum of squared deviations from the mean, plus the least variance times the count.
    """

    count: Float[Tensor, " n"]
    mean: Float[Tensor, " n"]
    squares: Float[Tensor, " n"]

    @classmethod
    def of(
        cls, values: Float[Tensor, "models n"], chosen: Bool[Tensor, "models n"], *, least: float = LEAST_VARIANCE
    ) -> "Summary":
        """Summarises the chosen values of each subject.

        Args:
            values: a value for each model and subject.
            chosen: mask of the values to summarise.
            least: added to the variance of each value.
        """
        weight = chosen.to(values)
        count = weight.sum(0)
        mean = (weight * values).sum(0) / count.clamp(min=1)
        squares = (weight * (values - mean).square()).sum(0) + count * least
        return cls(count, mean, squares)

    def to(self, device: torch.device) -> "Summary":
        """Returns a copy on `device`."""
        return Summary(self.count.to(device), self.mean.to(device), self.squares.to(device))

    def nothing(self) -> "Summary":
        """Returns the summary of as many subjects without any values."""
        zero = torch.zeros_like(self.mean)
        return Summary(zero, zero, zero)


@dataclass(frozen=True)
class StudentT:
    """Distribution of the next value of each subject.

    Attributes:
        location: centre, and mean if it exists.
        scale: scale parameter.
        freedom: degrees of freedom.
    """

    location: Float[Tensor, " n"]
    scale: Float[Tensor, " n"]
    freedom: Float[Tensor, " n"]

    def log_density(self, values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Returns the log density of a value per subject."""
        half = self.freedom / 2
        constant = torch.lgamma(half + 0.5) - torch.lgamma(half) - (math.pi * self.freedom).log() / 2
        away = (values - self.location) / self.scale
        return constant - self.scale.log() - (half + 0.5) * torch.log1p(away.square() / self.freedom)


@dataclass(frozen=True)
class ConjugatePrior:
    """Normal-inverse-gamma distribution of each subject's mean and variance.

    Attributes:
        location: prior expectation of each subject's mean.
        kappa: number of values that the prior of the mean is worth; for all subjects, or for each as the next two.
        alpha: shape of the variance's prior, half the number of values that it is worth.
        beta: scale of the variance's prior.
    """

    location: Float[Tensor, " n"]
    kappa: Float[Tensor, "..."]
    alpha: Float[Tensor, "..."]
    beta: Float[Tensor, "..."]

    def to(self, device: torch.device) -> "ConjugatePrior":
        """Returns a copy on `device`."""
        return ConjugatePrior(
            self.location.to(device), self.kappa.to(device), self.alpha.to(device), self.beta.to(device)
        )

    def after(self, summary: Summary) -> "ConjugatePrior":
        """Returns the posterior of each subject, with `kappa`, `alpha` and `beta` per subject."""
        kappa = self.kappa + summary.count
        away = self.kappa * summary.count * (summary.mean - self.location).square() / (2 * kappa)
        return ConjugatePrior(
            location=(self.kappa * self.location + summary.count * summary.mean) / kappa,
            kappa=kappa,
            alpha=self.alpha + summary.count / 2,
            beta=self.beta + summary.squares / 2 + away,
        )

    def log_marginal(self, summary: Summary) -> Float[Tensor, " n"]:
        """Returns the log likelihood of the values of each subject, with its mean and variance integrated out."""
        then = self.after(summary)
        ratio = torch.lgamma(then.alpha) - torch.lgamma(self.alpha) + (self.kappa.log() - then.kappa.log()) / 2
        powers = self.alpha * self.beta.log() - then.alpha * then.beta.log()
        return ratio + powers - summary.count / 2 * math.log(2 * math.pi)

    def predicted(self, summary: Summary) -> StudentT:
        """Returns the distribution of the next value of each subject."""
        then = self.after(summary)
        scale = (then.beta * (then.kappa + 1) / (then.alpha * then.kappa)).sqrt()
        return StudentT(then.location, scale, (2 * then.alpha).expand_as(then.location))


def fitted_prior(summary: Summary, features: Float[Tensor, "n features"]) -> ConjugatePrior:
    """Fits the prior under which the values of all subjects are most likely.

    Values are expected to vary by about 1 within a subject: the limits, and `LEAST_VARIANCE`, are absolute numbers.

    Args:
        summary: summaries, with at least two values for some subjects.
        features: regressors of the location, one row per subject; a constant column gives all subjects the same
            location.

    Raises:
        NotApplicable: no subject has two values, so the variance within subjects cannot be separated from that between.
    """
    if (summary.count - 1).clamp(min=0).sum() < 1:
        raise NotApplicable("a prior of variances must have candidates with two models of a kind, take more shadows")
    device = summary.mean.device
    if len(summary.mean) <= _FEW:
        summary, features = summary.to(torch.device("cpu")), features.cpu()
    # Powers of large values are nearly dependent; orthonormal columns have the same span.
    basis = torch.linalg.qr(features).Q
    weight = summary.count.sqrt()[:, None]
    middle = least_squares(basis * weight, summary.mean[:, None] * weight)[:, 0]

    def prior(at: Tensor) -> ConjugatePrior:
        kappa, alpha, beta = _bounded(at[len(middle) :]).exp()
        return ConjugatePrior(basis @ at[: len(middle)], kappa, alpha, beta)

    best: tuple[float, ConjugatePrior] | None = None
    # If some variances are nearly 0 and others are not, there are several maxima.
    for hyper in _starts(summary, summary.mean - basis @ middle):
        point = torch.cat([middle, hyper.clamp(-_NEAREST, _FARTHEST - 1)]).detach().requires_grad_()
        reached = -_descend(lambda point=point: -prior(point).log_marginal(summary).mean(), point)
        fitted = prior(point.detach())
        finite = all(value.isfinite().all() for value in (fitted.location, fitted.kappa, fitted.alpha, fitted.beta))
        if finite and (best is None or reached > best[0]):
            best = reached, fitted
    if best is None:
        raise NotApplicable("no prior of means and variances fits the answers of the shadow models")
    return best[1].to(device)


def _bounded(logarithms: Tensor) -> Tensor:
    """Keeps logarithms within their limits, smoothly: a clamp would have no slope beyond an edge."""
    middle, half = (_FARTHEST - _NEAREST) / 2, (_FARTHEST + _NEAREST) / 2
    return middle + half * ((logarithms - middle) / half).tanh()


def _starts(summary: Summary, away: Float[Tensor, " n"]) -> list[Float[Tensor, " 3"]]:
    """Returns logarithms of kappa, alpha and beta as starts of a search.

    Args:
        summary: summaries of the subjects.
        away: deviation of each subject's mean from its expected value.
    """
    several = summary.count > 1
    half = (summary.count[several] - 1) / 2
    variances = summary.squares[several] / (2 * half)
    within, between = summary.squares.sum() / (2 * half.sum()), away.square().mean().clamp(min=LEAST_VARIANCE)
    # A prior of the variance worth four values, of the pooled variance.
    pooled = torch.stack([(within / between).log(), torch.full_like(within, 2.0).log(), (2 * within).log()])
    # By moments of the logarithms of variances, each the variance times a chi-squared number over its freedom.
    logs = variances.log()
    spread = float(logs.var(correction=0) - torch.polygamma(1, half).mean())
    shape: Any = brentq(lambda a: polygamma(1, a) - min(max(spread, 1e-6), 1e6), 1e-4, 1e7)
    scale = logs.mean() + digamma(shape) - (torch.digamma(half) - half.log()).mean()
    ratios = (away[several].square() / variances - 1 / summary.count[several]).clamp(min=1e-6)  # of 1 / kappa each
    alpha = torch.full_like(scale, math.log(shape))
    kappas = -ratios.median().log(), torch.zeros_like(scale)
    return [pooled, *(torch.stack([kappa, alpha, scale]) for kappa in kappas)]


def _descend(objective: Callable[[], Tensor], point: Tensor) -> float:
    """Moves the point to a minimum of the objective, and returns the minimum."""
    # If all subjects have the same variance, alpha and beta grow without end along a plateau, where the curvature
    # estimated before is useless and the search stops short of the best kappa. A restart discards it.
    before = math.inf
    for _ in range(_MOST_DESCENTS):
        _descend_once(objective, point)
        with torch.no_grad():
            minimum = float(objective())
        if not minimum < before - _IMPROVED:  # true for NaN, too
            return minimum
        before = minimum
    return before


def _descend_once(objective: Callable[[], Tensor], point: Tensor) -> None:
    settings = {"max_iter": 300, "tolerance_grad": 1e-9, "tolerance_change": 1e-13}
    search = torch.optim.LBFGS([point], line_search_fn="strong_wolfe", **settings)

    def closure() -> Tensor:
        search.zero_grad()
        with torch.enable_grad():
            value = objective()
        value.backward()
        return value

    search.step(closure)  # pyright: ignore[reportArgumentType] - its stub wants a float, its code a tensor
