"""The likelihood ratio against theory: 10^5 simulated releases of every kind that the defenses make."""

import math

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from leakbench.attacks.core import Evidence, log_likelihood_ratio, relative_residual, subsampled

from ..parameters import subtests
from . import toys

N = 50_000  # with, and as many without the canary: 10^5 releases
DIM = 20
GOLDEN_AUC = 0.760250  # Phi(1 / sqrt 2)
GOLDEN_TPR = 0.0923622  # Phi(Phi^-1(0.01) + 1)
# Standard errors at noise multiplier 1 of N against N draws. AUC: variance of the placements Phi(z - 1) on
# both sides. TPR at a threshold from the sample: binomial, plus that of the threshold times the slope of the
# ROC, exp(mu t - mu^2/2).
SE_AUC = math.sqrt(
    2 * float((norm.cdf(norm.ppf((torch.arange(10_000) + 0.5) / 10_000) + 1)).var()) / N  # symmetric: both sides equal
)
SLOPE = math.exp(norm.ppf(0.99) - 0.5)
SE_TPR = math.sqrt((GOLDEN_TPR * (1 - GOLDEN_TPR) + SLOPE**2 * 0.01 * 0.99) / N)
CHANCE_SE = math.sqrt((2 * N + 1) / (12 * N * N))


def orthonormal(rows: int, seed: int) -> Tensor:
    """[rows, DIM], rows orthonormal."""
    square = torch.randn(DIM, DIM, generator=toys.generator(seed), dtype=torch.float64)
    return torch.linalg.qr(square).Q[:, :rows].T


def filled(encoded: Tensor, bound: float) -> Tensor:
    """Clipping of a canary that is long enough: it fills its bound."""
    return encoded * (bound / encoded.norm())


CANARY = 100 * torch.randn(DIM, generator=toys.generator(11), dtype=torch.float64)
MASK = torch.arange(DIM) % 3 == 0
BASIS = orthonormal(6, seed=12)
DIRECTION = orthonormal(1, seed=13)
COMPLEMENT = torch.eye(DIM, dtype=torch.float64) - DIRECTION.T @ DIRECTION


def dense() -> tuple[Tensor, Tensor]:
    return filled(CANARY, 0.5), torch.full((DIM,), 0.5)


def masked() -> tuple[Tensor, Tensor]:
    # As it is shared dense: zeros off the mask, in the signal and in the noise.
    return filled(CANARY * MASK, 2.0), 2.0 * MASK


def kept() -> tuple[Tensor, Tensor]:
    # As it is shared in wire format: only the coordinates kept.
    return filled(CANARY[MASK], 2.0), torch.full((int(MASK.sum()),), 2.0)


def projected() -> tuple[Tensor, Tensor]:
    return filled(BASIS @ CANARY, 3.0), torch.full((len(BASIS),), 3.0)


def two_part(share: float = 0.3) -> tuple[Tensor, Tensor]:
    # The rest off one direction with share 1 - beta, and the coefficient along it with share beta, bounds 1.0
    # and 0.2.
    rest, along = filled(COMPLEMENT @ CANARY, 1.0), filled(DIRECTION @ CANARY, 0.2)
    std = torch.cat([torch.full((DIM,), 1.0 / (1 - share) ** 0.5), torch.full((1,), 0.2 / share**0.5)])
    return torch.cat([rest, along]), std


RELEASES = {"dense": dense, "masked": masked, "kept": kept, "projected": projected, "two_part": two_part}


def simulated(signal: Tensor, std: Tensor, *, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Remainders [2N, m], the first N with the canary, and the truth [2N]; `scale` falsifies the noise."""
    noise = torch.randn(2 * N, len(signal), generator=toys.generator(seed), dtype=torch.float64) * std * scale
    member = torch.arange(2 * N) < N
    return noise + member[:, None] * signal, member


def log_ratio(signal: Tensor, std: Tensor, remainder: Tensor) -> Tensor:
    evidence = Evidence(len(remainder))
    evidence.add(remainder, signal.expand_as(remainder), std.double())
    scores, deterministic = evidence.scores()
    assert not deterministic
    return scores


def tpr_at_1pct(scores: Tensor, member: Tensor) -> float:
    threshold = scores[~member].sort(descending=True).values[N // 100]
    return float((scores[member] > threshold).double().mean())


@subtests("release", RELEASES)
def test_a_canary_that_fills_its_bound_has_the_power_that_theory_gives(release):
    signal, std = RELEASES[release]()
    remainder, member = simulated(signal, std.double(), seed=21)
    scores = log_ratio(signal, std, remainder)
    assert abs(toys.auc(scores, member) - GOLDEN_AUC) < 3 * SE_AUC
    assert abs(tpr_at_1pct(scores, member) - GOLDEN_TPR) < 3 * SE_TPR


@pytest.mark.long
@subtests("scale", [2 / 3, 3 / 2])
@subtests("release", RELEASES)
def test_noise_of_a_wrong_scale_would_be_noticed(release, scale):
    signal, std = RELEASES[release]()
    remainder, member = simulated(signal, std.double(), seed=22, scale=scale)
    scores = log_ratio(signal, std, remainder)
    assert abs(toys.auc(scores, member) - GOLDEN_AUC) > 30 * SE_AUC
    assert abs(tpr_at_1pct(scores, member) - GOLDEN_TPR) > 10 * SE_TPR


@pytest.mark.parametrize("release", ["masked", "projected"])
def test_a_canary_outside_of_what_is_released_is_not_seen(release):
    outside = torch.where(MASK, 0.0, CANARY) if release == "masked" else CANARY - BASIS.T @ (BASIS @ CANARY)
    encoded = outside * MASK if release == "masked" else BASIS @ outside
    # What encoding leaves of it (rounding) is far below the bound, so the bound passes it as it is.
    assert encoded.norm() < 1e-10
    std = 2.0 * MASK if release == "masked" else torch.full((len(BASIS),), 2.0)
    remainder, member = simulated(encoded, std.double(), seed=23)
    ties = log_ratio(torch.zeros_like(encoded), std, remainder)
    assert (ties == 0).all()
    assert toys.auc(ties, member) == 0.5
    assert abs(toys.auc(log_ratio(encoded, std, remainder), member) - 0.5) < 3 * CHANCE_SE


def test_two_parts_must_be_weighed_by_their_own_noise():
    signal, std = two_part(share=0.3)
    remainder, member = simulated(signal, std.double(), seed=24)
    # The same test with one common noise scale, as if whitening were forgotten, loses power that must be
    # noticed.
    blunt = log_ratio(signal, torch.ones_like(std), remainder)
    assert toys.auc(blunt, member) < GOLDEN_AUC - 10 * SE_AUC


@subtests("share", [0.1, 0.5, 0.9])
def test_the_power_of_two_parts_does_not_depend_on_how_the_budget_is_shared(share):
    signal, std = two_part(share)
    assert ((signal / std) ** 2).sum().item() == pytest.approx(1.0, rel=1e-6)


def test_lambda_is_the_difference_of_gaussian_log_densities():
    coins = toys.generator(31)
    r, v = (torch.randn(7, 5, generator=coins, dtype=torch.float64) for _ in range(2))
    std = torch.rand(5, generator=coins, dtype=torch.float64) + 0.1
    with_canary = torch.distributions.Normal(v, std).log_prob(r).sum(1)
    without = torch.distributions.Normal(torch.zeros_like(v), std).log_prob(r).sum(1)
    torch.testing.assert_close(log_likelihood_ratio(r, v, std), with_canary - without)


def test_whitening_a_basis_that_is_not_orthonormal_changes_nothing():
    """Coefficients in two bases of one subspace are one evidence, each weighed by its own covariance."""
    skewed = torch.linalg.cholesky(torch.eye(6, dtype=torch.float64) + 0.5).mT @ BASIS
    root = torch.linalg.cholesky(skewed @ skewed.mT)
    noise = torch.randn(50, DIM, generator=toys.generator(32), dtype=torch.float64)
    signal = BASIS.mT @ (BASIS @ CANARY) / 100
    plain = log_likelihood_ratio(noise @ BASIS.mT, (BASIS @ signal).expand(50, -1), torch.ones(6))
    whitened = (torch.linalg.solve_triangular(root, (skewed @ x.mT), upper=False).mT for x in (noise, signal[None]))
    r, v = whitened
    torch.testing.assert_close(log_likelihood_ratio(r, v.expand_as(r), torch.ones(6)), plain)


def test_single_precision_costs_no_more_than_its_rounding():
    coins = toys.generator(33)
    r, v = (torch.randn(3, 20_000, generator=coins) for _ in range(2))
    exact = (v.double() * r.double() - v.double() ** 2 / 2).sum(1)
    ratio = log_likelihood_ratio(r, v, torch.ones(20_000))
    assert ratio.dtype == torch.float64
    torch.testing.assert_close(ratio, exact, rtol=1e-5, atol=0)


@subtests("q", [0.01, 0.3, 1.0])
def test_subsampling_mixes_the_two_densities(q):
    ratio = torch.tensor([-50.0, -1.0, 0.0, 2.0, 30.0], dtype=torch.float64)
    torch.testing.assert_close(subsampled(ratio, q), torch.log(1 - q + q * ratio.exp()))


def test_subsampling_neither_overflows_nor_forgets():
    ratio = torch.tensor([-1e5, 1e5], dtype=torch.float64)
    torch.testing.assert_close(
        subsampled(ratio, 0.01), torch.tensor([math.log(0.99), 1e5 + math.log(0.01)], dtype=torch.float64)
    )


@subtests("q", [0.0, -0.1, 1.5])
def test_an_impossible_sample_rate_is_refused(q):
    with pytest.raises(ValueError, match=r"sample_rate must be in \(0, 1\]"):
        subsampled(torch.zeros(1), q)


def test_steps_with_known_participation_add_up_to_one_with_the_root_of_the_summed_squares():
    signal, std = dense()
    evidence, steps = Evidence(2 * N), 4
    member = torch.zeros(0)
    for step in range(steps):
        remainder, member = simulated(signal, 2 * std.double(), seed=40 + step)
        evidence.add(remainder, signal.expand_as(remainder), 2 * std)
    # Four steps at mu = 1/2 are one at mu = 1.
    assert abs(toys.auc(evidence.scores()[0], member) - GOLDEN_AUC) < 3 * SE_AUC


def test_sampled_steps_give_away_less_than_certain_ones():
    signal, std = dense()
    member = torch.arange(2 * N) < N
    coins = toys.generator(50)
    evidence = Evidence(2 * N)
    for _ in range(4):
        joins = member & (torch.rand(2 * N, generator=coins) < 0.25)
        noise = torch.randn(2 * N, DIM, generator=coins, dtype=torch.float64) * std
        evidence.add(noise + joins[:, None] * signal, signal.expand(2 * N, -1), std, sample_rate=0.25)
        assert evidence.log_ratio.dtype == torch.float64
    sampled = toys.auc(evidence.scores()[0], member)
    assert 0.5 + 10 * CHANCE_SE < sampled < GOLDEN_AUC - 10 * SE_AUC


def test_without_noise_the_residual_decides():
    coins = toys.generator(60)
    v = torch.randn(6, DIM, generator=coins)
    member = torch.tensor([True, False, True, False, True, False])
    evidence = Evidence(6)
    for joined in (member, torch.zeros(6, dtype=torch.bool)):  # in the second step nobody takes part
        evidence.add(joined[:, None] * v, v, torch.zeros(DIM), sample_rate=0.5)
    scores, deterministic = evidence.scores()
    assert deterministic
    torch.testing.assert_close(scores, torch.where(member, 0.0, -1.0).double())


def test_a_contribution_of_zero_cannot_be_decided():
    v = torch.zeros(2, DIM)
    v[0] = 1
    evidence = Evidence(2)
    evidence.add(v, v, torch.zeros(DIM))
    assert evidence.scores()[0].tolist() == [0.0, -0.5]
    assert relative_residual(v, v).isnan().tolist() == [False, True]


def test_one_coordinate_without_noise_that_carries_signal_decides_alone():
    std = torch.ones(DIM)
    std[0] = 0
    v = torch.ones(2, DIM)
    noise = 100 * std * torch.randn(2, DIM, generator=toys.generator(61))
    evidence = Evidence(2)
    evidence.add(noise + torch.tensor([[1.0], [0.0]]) * v, v, std)
    scores, deterministic = evidence.scores()
    assert deterministic
    torch.testing.assert_close(scores, torch.tensor([0.0, -1.0], dtype=torch.float64))


def test_a_coordinate_without_noise_and_without_signal_decides_nothing():
    std = torch.ones(DIM)
    std[0] = 0
    v = torch.ones(2, DIM)
    v[:, 0] = 0
    evidence = Evidence(2)
    evidence.add(v, v, std)
    scores, deterministic = evidence.scores()
    assert not deterministic
    torch.testing.assert_close(scores, torch.full((2,), (DIM - 1) / 2, dtype=torch.float64))


def test_rows_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"remainder must have shape .*\[3, 20\], got \[2, 20\]"):
        Evidence(3).add(torch.zeros(2, DIM), torch.zeros(2, DIM), torch.ones(DIM))
