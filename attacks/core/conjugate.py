"""Normal values whose mean and variance vary from one subject to another: a conjugate prior, fitted to all of them.

Of each subject there are a few values. Mean mu and variance v are drawn from a normal-inverse-gamma prior: v from an
inverse gamma distribution of shape `alpha` and scale `beta`, and mu from N(location, v / kappa). The prior is that of
the largest marginal likelihood (empirical Bayes), and the next value of a subject has a Student t distribution then
(Murphy, "Conjugate Bayesian analysis of the Gaussian distribution", 2007, Section 6). With many values of a subject it
becomes their normal distribution; with few, variances borrow from one another by as much as they are alike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .errors import NotApplicable

LEAST_VARIANCE = 1e-12
"""Of each value: subjects whose values are all the same would have a likelihood without bound."""

_FARTHEST = 20.0  # of a hyperparameter's logarithm: as good as 0, or as infinity, and far from overflow
_MOST_DESCENTS = 20
_IMPROVED = 1e-12  # of a mean log likelihood: a descent that gains less is the last


@dataclass(frozen=True)
class Summary:
    """What a normal model reads of the values of each subject.

    Attributes:
        count: of values.
        mean: of values.
        squares: sum of squared deviations from the mean, at least `count * LEAST_VARIANCE`.
    """

    count: Float[Tensor, " n"]
    mean: Float[Tensor, " n"]
    squares: Float[Tensor, " n"]

    @classmethod
    def of(cls, values: Float[Tensor, "models n"], chosen: Bool[Tensor, "models n"]) -> "Summary":
        """Of those values that are chosen for each subject.

        Args:
            values: one a model and subject.
            chosen: which of them count.
        """
        weight = chosen.to(values)
        count = weight.sum(0)
        mean = (weight * values).sum(0) / count.clamp(min=1)
        squares = (weight * (values - mean).square()).sum(0) + count * LEAST_VARIANCE
        return cls(count, mean, squares)

    def nothing(self) -> "Summary":
        """Of as many subjects of whom nothing is known."""
        zero = torch.zeros_like(self.mean)
        return Summary(zero, zero, zero)


@dataclass(frozen=True)
class StudentT:
    """A distribution of the next value of each subject.

    Attributes:
        location: its middle.
        scale: its width.
        freedom: degrees of freedom.
    """

    location: Float[Tensor, " n"]
    scale: Float[Tensor, " n"]
    freedom: Float[Tensor, " n"]

    def log_density(self, values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Of one value of each subject."""
        half = self.freedom / 2
        constant = torch.lgamma(half + 0.5) - torch.lgamma(half) - (math.pi * self.freedom).log() / 2
        away = (values - self.location) / self.scale
        return constant - self.scale.log() - (half + 0.5) * torch.log1p(away.square() / self.freedom)


@dataclass(frozen=True)
class ConjugatePrior:
    """A normal-inverse-gamma distribution of each subject's mean and variance.

    Attributes:
        location: of the mean, for each subject.
        kappa: values that the location is worth.
        alpha: shape of the variance, half the values that its prior is worth.
        beta: scale of the variance.
    """

    location: Float[Tensor, " n"]
    kappa: Float[Tensor, ""]
    alpha: Float[Tensor, ""]
    beta: Float[Tensor, ""]

    def after(self, seen: Summary) -> "ConjugatePrior":
        """The posterior of each subject; `kappa`, `alpha` and `beta` are one a subject then."""
        kappa = self.kappa + seen.count
        away = self.kappa * seen.count * (seen.mean - self.location).square() / (2 * kappa)
        return ConjugatePrior(
            location=(self.kappa * self.location + seen.count * seen.mean) / kappa,
            kappa=kappa,
            alpha=self.alpha + seen.count / 2,
            beta=self.beta + seen.squares / 2 + away,
        )

    def log_marginal(self, seen: Summary) -> Float[Tensor, " n"]:
        """Log likelihood of the values of each subject, with its mean and variance integrated out."""
        then = self.after(seen)
        ratio = torch.lgamma(then.alpha) - torch.lgamma(self.alpha) + (self.kappa.log() - then.kappa.log()) / 2
        powers = self.alpha * self.beta.log() - then.alpha * then.beta.log()
        return ratio + powers - seen.count / 2 * math.log(2 * math.pi)

    def predicted(self, seen: Summary) -> StudentT:
        """The distribution of the next value of each subject."""
        then = self.after(seen)
        scale = (then.beta * (then.kappa + 1) / (then.alpha * then.kappa)).sqrt()
        return StudentT(then.location, scale, (2 * then.alpha).expand_as(then.location))


def fitted_prior(seen: Summary, features: Float[Tensor, "n features"]) -> ConjugatePrior:
    """The prior under which the values of all subjects are most likely.

    Args:
        seen: of at least two values of some subjects.
        features: whose best linear combination is the location of each subject's mean; a column of ones for one
            location of all.

    Raises:
        NotApplicable: no subject has two values, so that its variance cannot be told from that of the means.
    """
    freedom = (seen.count - 1).clamp(min=0).sum()
    if freedom < 1:
        raise NotApplicable("a prior of variances must have candidates with two models of a kind, take more shadows")
    # Powers of large values are nearly dependent; orthonormal columns have the same combinations.
    basis = torch.linalg.qr(features).Q
    weight = seen.count.sqrt()[:, None]
    start = torch.linalg.lstsq(basis * weight, seen.mean[:, None] * weight).solution[:, 0]
    within = seen.squares.sum() / freedom
    between = (seen.mean - basis @ start).square().mean().clamp(min=LEAST_VARIANCE)
    # A prior of the variance worth four values, of the pooled variance; descent goes on from there.
    hyper = torch.stack([(within / between).log(), torch.full_like(within, 2.0).log(), (2 * within).log()])
    point = torch.cat([start, hyper.clamp(-_FARTHEST, _FARTHEST)]).detach().requires_grad_()

    def prior(at: Tensor) -> ConjugatePrior:
        kappa, alpha, beta = at[len(start) :].clamp(-_FARTHEST - 10, _FARTHEST).exp()
        return ConjugatePrior(basis @ at[: len(start)], kappa, alpha, beta)

    _descend(lambda: -prior(point).log_marginal(seen).mean(), point)
    found = prior(point.detach())
    if not all(value.isfinite().all() for value in (found.location, found.kappa, found.alpha, found.beta)):
        raise NotApplicable("no prior of means and variances fits the answers of the shadow models")
    return found


def _descend(objective: Callable[[], Tensor], point: Tensor) -> None:
    # Where a variance is the same for all, alpha and beta grow without end, on a plateau: what the search has learnt of
    # curvature is of no use there, and it stops short of the best kappa. Begun anew it goes on.
    before = math.inf
    for _ in range(_MOST_DESCENTS):
        _descend_once(objective, point)
        with torch.no_grad():
            found = float(objective())
        if not found < before - _IMPROVED:  # true for NaN, too
            return
        before = found


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
