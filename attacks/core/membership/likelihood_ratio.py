"""Exact likelihood ratio of "took part" against "did not", for releases with Gaussian noise.

The remainder r is the undivided noisy sums less all other contributions. It is distributed as N(0, diag(s^2)) if the
candidate did not take part and as N(v, diag(s^2)) if it did, with v its own encoded and bounded contribution and s the
standard deviation of the noise. Then

    Lambda = sum_j v_j r_j / s_j^2 - v_j^2 / (2 s_j^2),

with signal-to-noise ratio mu = ||v / s|| <= 1 / noise_multiplier: AUC Phi(mu / sqrt 2), TPR Phi(Phi^-1(FPR) + mu). By
Neyman and Pearson no test is more powerful. Dense, masked, projected and two-part releases differ only in v and s.

Over steps the ratios multiply, although v_t depends on earlier releases, because the noise of a step is fresh given the
past. Under Poisson sampling with known rate q the ratio of a step is 1 - q + q exp(Lambda). The product is the ratio of
the whole run under Poisson sampling and if participation is known, and in no other case: with batches of a fixed size,
the others in the batch reveal whether there is room for another record, and a record that is used once an epoch cannot
join two of its steps. The product is then a strong test, but not the most powerful test.

A coordinate with signal and without noise has no likelihood ratio: it decides membership, because r equals v there or
does not.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ..targets.observation import Informed
from ..targets.results import Dependence, MembershipScores
from ..targets.target import Examples
from ..threat_model.requires import granted
from .matched_filter import MatchedFilter

_AT_ONCE = 32  # candidates whose rows exist at a time


def log_likelihood_ratio(
    remainder: Float[Tensor, "n m"], contribution: Float[Tensor, "n m"], noise_std: Float[Tensor, " m"]
) -> Float[Tensor, " n"]:
    """Returns Lambda of each candidate, in nats, over the coordinates that carry noise.

    Args:
        remainder: r, the undivided noisy sums less all other contributions.
        contribution: v, the candidate's addition to the undivided sums.
        noise_std: s on the undivided sums; coordinates with s = 0 are left out (see `relative_residual`).

    Returns:
        float64; summed in the dtype of the contributions, whose rounding is far below the noise.
    """
    std = noise_std.double()
    precision = torch.where(std > 0, std.clamp(min=torch.finfo(torch.float64).tiny) ** -2, 0.0)
    if not (precision < 1e30).all():  # out of float32's range once multiplied
        contribution = contribution.double()
    weighted = contribution * precision.to(contribution)
    # v r - v v / 2 as two batched dot products, which write nothing of the size of the tables.
    dot = torch.einsum("nm,nm->n", weighted, remainder.to(weighted))
    return dot.double() - torch.einsum("nm,nm->n", weighted, contribution).double() / 2


def relative_residual(remainder: Float[Tensor, "n m"], contribution: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
    """Returns ||r - v|| / ||v|| of each candidate: 0 if the release shows exactly its contribution, 1 if nothing.

    Returns:
        float64; NaN if v = 0, when the release cannot depend on the candidate.
    """
    missing = torch.linalg.vector_norm(remainder - contribution, dim=1, dtype=torch.float64)
    size = torch.linalg.vector_norm(contribution, dim=1, dtype=torch.float64)
    return missing / size.masked_fill(size == 0, math.nan)


def subsampled(log_ratio: Float[Tensor, " n"], sample_rate: float) -> Float[Tensor, " n"]:
    """Returns log(1 - q + q exp(Lambda)), the log ratio of a step that a record joins with probability q.

    Args:
        log_ratio: Lambda given participation, in nats.
        sample_rate: q, in (0, 1].
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
    if sample_rate == 1:
        return log_ratio
    joined = log_ratio.double() + math.log(sample_rate)
    # log1p, because 1 - q in floats loses the digits of a small q; logaddexp, because exp(Lambda) overflows.
    return torch.logaddexp(joined, torch.full_like(joined, math.log1p(-sample_rate)))


class Evidence:
    """Evidence for the membership of candidates, accumulated over the steps of a run.

    Args:
        candidates: number of candidates.
        device: device of the sums.
    """

    def __init__(self, candidates: int, device: torch.device | str = "cpu") -> None:
        self._log_ratio = torch.zeros(candidates, dtype=torch.float64, device=device)
        self._closest = torch.full_like(self._log_ratio, math.inf)
        self._exact = True

    @property
    def exact(self) -> bool:
        """True if the scores are the likelihood ratio of all steps so far, so that no test is more powerful."""
        return self._exact

    @property
    def log_ratio(self) -> Float[Tensor, " n"]:
        """Log likelihood ratio of all steps so far, over the coordinates with noise, in nats."""
        return self._log_ratio

    def add(
        self,
        remainder: Float[Tensor, "n m"],
        contribution: Float[Tensor, "n m"],
        noise_std: Float[Tensor, " m"],
        sample_rate: float = 1.0,
        part: slice = slice(None),
    ) -> None:
        """Adds the evidence of a step.

        Args:
            remainder: r, as for `log_likelihood_ratio`.
            contribution: v, as for `log_likelihood_ratio`.
            noise_std: s on the undivided sums.
            sample_rate: probability that a record takes part in the step.
            part: slice of the candidates that the rows belong to.
        """
        # Copies, because callers may hold the earlier sums.
        closest, log_ratio = self._closest.clone(), self._log_ratio.clone()
        for name, rows in (("remainder", remainder), ("contribution", contribution)):
            if rows.shape != (len(log_ratio[part]), len(noise_std)):
                raise ValueError(
                    f"{name} must have shape [candidates, coordinates] = "
                    f"{[len(log_ratio[part]), len(noise_std)]}, got {list(rows.shape)}"
                )
        # A release of two parts may have one without noise; most releases have noise everywhere or nowhere.
        bare = noise_std == 0
        if bare.any():
            everywhere = bool(bare.all())
            shown = remainder if everywhere else remainder[:, bare]
            expected = contribution if everywhere else contribution[:, bare]
            # fmin ignores NaN: a step to which the candidate contributes nothing decides nothing.
            closest[part] = torch.fmin(closest[part], relative_residual(shown, expected).to(closest))
            self._closest = closest
            if everywhere:
                return
        ratio = log_likelihood_ratio(remainder, contribution, noise_std).to(log_ratio)
        log_ratio[part] += subsampled(ratio, sample_rate)
        self._log_ratio = log_ratio

    def add_filtered(self, matched: MatchedFilter, noise_std: Float[Tensor, " m"], sample_rate: float = 1.0) -> None:
        """Adds the evidence of a step from its matched filter.

        Args:
            matched: matched filter of the candidates.
            noise_std: s on the undivided sums; if it is 0 everywhere, there is no ratio.
            sample_rate: probability that a record takes part in the step.
        """
        if matched.inner.shape != self._log_ratio.shape:
            raise ValueError(
                f"a matched filter must have one number a candidate, {len(self._log_ratio)}, "
                f"got {list(matched.inner.shape)}"
            )
        # fmin ignores NaN, as in `add`.
        self._closest = torch.fmin(self._closest, matched.residuals.to(self._closest))
        if bool((noise_std > 0).any()):
            ratio = matched.log_likelihood_ratio.to(self._log_ratio)
            self._log_ratio = self._log_ratio + subsampled(ratio, sample_rate)

    def add_step(self, step: Informed, candidates: Examples) -> None:
        """Adds the evidence of an observed step.

        Args:
            step: grants OTHERS and DEFENSE.
            candidates: candidates of the step's `others_removed`, in the same order.
        """
        std = granted(step.noise_std)
        if step.matched_filter is not None:
            self.add_filtered(step.matched_filter(), std, step.sample_rate)
        else:
            remainder = granted(step.others_removed)
            for start in range(0, len(candidates), _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                contribution = step.contributions(candidates.inputs[part], candidates.labels[part])
                self.add(remainder(part).detach(), contribution.detach(), std, step.sample_rate, part)
        # Dependent participation: ratios of single steps do not multiply to that of the run.
        self._exact = self._exact and step.participation != "dependent"

    def scores(self) -> tuple[Float[Tensor, " n"], bool]:
        """Returns the score of each candidate, and whether any candidate was decided without noise.

        Returns:
            The log ratio in nats and False. If a contribution has coordinates without noise, True, and scores on
            another scale: minus the smallest relative residual over the steps (0: a step shows exactly this candidate;
            -1: none does); for a candidate without such coordinates minus its posterior probability of being a
            non-member, at prior odds of 1 (-1/2: no evidence).
        """
        # All candidates are ranked together, so scores of undecided candidates are mapped to the scale of decisions.
        decided = self._closest.isfinite()
        if not decided.any():
            return self._log_ratio, False
        return torch.where(decided, -self._closest, -torch.sigmoid(-self._log_ratio)), True

    def about(self, candidates: Examples, *, dependence: Dependence) -> MembershipScores:
        """Returns the scores as the result of an attack.

        Args:
            candidates: candidates of the evidence, in their order.
            dependence: randomness that the scores share, as in `MembershipScores`.
        """
        scores, deterministic = self.scores()
        return MembershipScores(
            ids=candidates.ids, scores=scores, exact=self.exact, deterministic=deterministic, dependence=dependence
        )
