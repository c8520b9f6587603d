"""Canary alignment: inner products of the releases of a run with the contributions of canaries.

Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX Security 2023 (canaries in gradient
space, inner products with releases); Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning",
ICLR 2024 (many of them in a run). If participation is known, the influence of the other canaries is removed by the
linear minimum mean square error estimate of all inclusions x at once, from r = sum_i x_i v_i + noise with x_i of mean
1/2 and variance 1/4: x = 1/2 + (G + 4 I)^-1 (V r - G 1 / 2), with V the whitened contributions, G = V V^T summed over
all steps, and 1 the vector of ones (own derivation). The score is x - 1/2. Otherwise a canary's score is the sum of its
steps' log likelihood ratios, as if no other canary took part. The sum of the private examples is approximated by the
expected batch of average public examples. The score is computed without the inclusion coins, so a bound proved from the
coins holds for any score; the approximation and other records only weaken the test.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .core import (
    Access,
    Controls,
    Examples,
    InclusionScores,
    Knows,
    NotApplicable,
    Observation,
    SeenTranscript,
    attack,
    granted,
    subsampled,
)

_PRECISION = 4.0  # of a fair coin: 1 / variance
_AT_ONCE = 2**26  # entries of all canaries' contributions to a step, up to which they are estimated jointly
_RIDGE = 1e-3  # ridge without noise, relative to the mean squared norm of a contribution


@attack(access=Access.ALL_STEPS, knows=Knows.POPULATION | Knows.DEFENSE, controls=Controls.CANARIES)
def canary_alignment(target: SeenTranscript, generator: torch.Generator, *, batch_size: int = 64) -> InclusionScores:
    """Scores each canary by the inner products of all releases with its contributions.

    Args:
        target: the transcript; its candidates are the canaries.
        generator: not used; the attack is deterministic.
        batch_size: examples whose contributions are computed at a time; bounds memory, changes nothing else.

    Returns:
        Estimates of each canary's inclusion, less 1/2. If participation is random at a known rate, or if the
        contributions of all canaries would not fit into memory, log likelihood ratios in nats instead, or without noise
        inner products.

    Raises:
        ValueError: a setting out of range.
        NotApplicable: no canary contributes anything in any step, as with a method with another query.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    canaries = granted(target.candidates)
    count = len(canaries)
    ratios = torch.zeros(count, dtype=torch.float64, device=canaries.inputs.device)
    gram, along = ratios.new_zeros(count, count), ratios.clone()
    noisy = together = contributed = False
    for step in target.steps:
        weights, noisy = _whitening(step)
        public = granted(step.population)
        others = sum(rows.double().sum(dim=0) for rows in _contributions(step, public, batch_size))
        residual = (step.released.double() - others / len(public)) * step.expected_batch * weights
        together = step.sample_rate == 1 and count * len(residual) <= _AT_ONCE
        rows, products, squares = [], [], []
        for part in _contributions(step, canaries, batch_size):
            own = part.double() * weights
            products.append(own @ residual)
            squares.append(own.square().sum(dim=1))
            rows += [own] if together else []
        inner, sizes = torch.cat(products), torch.cat(squares)
        contributed = contributed or bool((sizes > 0).any())
        along += inner
        ratios += subsampled(inner - sizes / 2, step.sample_rate) if noisy else inner
        if together:
            gram += torch.cat(rows) @ torch.cat(rows).T
    if not contributed:
        raise NotApplicable("no canary contributes anything to a release of this method, so nothing of it could show")
    scores = _estimated(gram, along, noisy) if together else ratios
    return InclusionScores(ids=canaries.ids, scores=scores, exact=False)


def _contributions(step: Observation, examples: Examples, batch_size: int) -> Iterator[Tensor]:
    """Yields the additions of examples to the undivided sums, some at a time."""
    for inputs, labels in zip(examples.inputs.split(batch_size), examples.labels.split(batch_size), strict=True):
        yield step.contributions(inputs, labels)


def _whitening(step: Observation) -> tuple[Tensor, bool]:
    """Returns the whitening factor of each released number, and whether there is noise."""
    std = granted(step.noise_std).double()
    noisy = bool((std > 0).any())
    # If some numbers have noise, those without are left out: their infinite weight would outweigh all others.
    return torch.where(std > 0, 1 / std.clamp(min=1e-30), 0.0) if noisy else torch.ones_like(std), noisy


def _estimated(gram: Tensor, along: Tensor, noisy: bool) -> Tensor:
    """Returns the linear estimate of all inclusions at once."""
    ridge = _PRECISION if noisy else _RIDGE * float(gram.diagonal().mean())
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + ridge * eye, along - gram.sum(dim=1) / 2)
