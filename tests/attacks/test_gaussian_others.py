"""What is particular to the test with unknown others, and its covariance; the duties of every attack are elsewhere."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.covariance import ledoit_wolf

from leakbench.attacks.core import NotApplicable
from leakbench.attacks.core.membership.shrunk_gaussian import ShrunkGaussian, shrinkage
from leakbench.attacks.gaussian_others import gaussian_others
from leakbench.attacks.gradient_similarity import gradient_similarity
from leakbench.attacks.one_step_likelihood_ratio import one_step_likelihood_ratio

from ..parameters import subtests
from . import toys


@subtests("q, m", [(30, 6), (10, 50), (3, 40)])
def test_the_covariance_is_scikit_learn_s_shrunk_one_plus_noise(q, m):
    coins = toys.generator(q)
    vectors = torch.randn(q, m, generator=coins, dtype=torch.float64) * torch.linspace(0.1, 3, m) + 2
    std = torch.rand(m, generator=coins, dtype=torch.float64)
    expected, weight = ledoit_wolf(vectors.numpy())
    found, _ = shrinkage(vectors - vectors.mean(0))
    assert found == pytest.approx(float(weight), rel=1e-9)
    whole = torch.tensor(7.0 * expected) + std.square().diag()
    spread = ShrunkGaussian.of_sums(vectors, 7.0, std)
    rows = torch.randn(5, m, generator=coins, dtype=torch.float64)
    torch.testing.assert_close(spread.solved(rows[0]), torch.linalg.solve(whole, rows[0]))
    torch.testing.assert_close(spread.squared_lengths(rows), (rows @ torch.linalg.inv(whole) * rows).sum(1))


def test_scores_are_the_ratio_of_the_densities_with_the_whole_covariance():
    target, _ = toys.sparse_step(count=12, joined=4)
    asked, public = target.candidates, target.population
    assert asked is not None and public is not None and target.noise_std is not None
    known = target.contributions(public.inputs, public.labels).double().numpy()
    own = target.contributions(asked.inputs, asked.labels).double().numpy()
    covariance = 3 * ledoit_wolf(known)[0] + np.diag(target.noise_std.double().numpy() ** 2)
    sums, mean = 4 * target.released.double().numpy(), 3 * known.mean(0)
    # The determinant is the same for both: what is left of the log densities is a difference of squares.
    precision = np.linalg.inv(covariance)
    density = lambda center: -(sums - center) @ precision @ (sums - center) / 2  # noqa: E731
    expected = [density(mean + v) - density(mean) for v in own]
    for batch_size in (5, 64):
        found = gaussian_others(target, toys.generator(0), examples=400, batch_size=batch_size).scores
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_it_attains_what_a_normal_sum_of_others_allows():
    """Normal gradients and unknown others: AUC Phi(mu / sqrt 2), with mu^2 = v^T Sigma^-1 v of the true covariance."""
    coins, dim, count, others = toys.generator(5), 40, 4000, 20
    normal = lambda *shape: torch.randn(*shape, generator=coins, dtype=torch.float64)  # noqa: E731
    scale, own = torch.linspace(0.2, 1.5, dim, dtype=torch.float64), normal(dim) * 0.6
    public = scale * normal(4000, dim) + 0.3
    spread = ShrunkGaussian.of_sums(public, float(others), torch.full((dim,), 0.5, dtype=torch.float64))
    # Many updates, each with its own others and noise, of which one candidate took part in half.
    took_part = torch.arange(count) < count // 2
    rest = math.sqrt(others) * scale * normal(count, dim) + 0.3 * others
    sums = rest + 0.5 * normal(count, dim) + took_part[:, None] * own
    scores = (sums - others * public.mean(0)) @ spread.solved(own) - spread.squared_lengths(own[None]) / 2
    mu = float((own.square() / (others * scale.square() + 0.25)).sum().sqrt())
    assert 0.8 < mu < 3
    # The AUC of 2000 against 2000 has a standard deviation of at most 0.009.
    assert abs(toys.auc(scores, took_part) - stats.norm.cdf(mu / math.sqrt(2))) < 0.02


@pytest.mark.long
def test_knowing_the_public_beats_directions_alone_and_knowing_the_others_beats_it():
    aucs = {}
    for seed in range(4):
        target, member = toys.sparse_step(seed=seed, noise=0.3, joined=60)
        for name, one in (
            ("similar", gradient_similarity),
            ("gaussian", gaussian_others),
            ("informed", one_step_likelihood_ratio),
        ):
            aucs.setdefault(name, []).append(toys.auc(one(target, toys.generator(0)).scores, member))
    means = {name: sum(values) / len(values) for name, values in aucs.items()}
    assert means["similar"] + 0.01 < means["gaussian"] < means["informed"] - 0.01


def test_too_few_public_examples_and_bad_settings_are_refused():
    target, _ = toys.sparse_step(count=12, joined=4)
    assert target.population is not None
    one = toys.subset(target.population, torch.arange(300) == 3)
    with pytest.raises(NotApplicable, match="at least 2 public examples, got 1"):
        gaussian_others(dataclasses.replace(target, population=one))
    same = dataclasses.replace(one, ids=torch.arange(3), inputs=one.inputs.expand(3, -1), labels=one.labels.expand(3))
    with pytest.raises(NotApplicable, match="those of the public examples do not"):
        gaussian_others(dataclasses.replace(target, population=same))
    alone = dataclasses.replace(target, expected_batch=1.0, noise_std=torch.zeros_like(target.released))
    with pytest.raises(NotApplicable, match="must vary in every coordinate"):
        gaussian_others(alone)
    with pytest.raises(ValueError, match="examples must be at least 2, got 1"):
        gaussian_others(target, examples=1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        gaussian_others(target, batch_size=0)
