"""What is particular to LiRA; the duties of every attack are in test_every_attack.py."""

import dataclasses
import math

import pytest
import torch
from scipy import stats

from leakbench.attacks.core import Examples, ModelAccess, NotApplicable, Shadows, balanced_halves
from leakbench.attacks.lira import lira
from leakbench.attacks.loss_threshold import loss_threshold

from . import toys


def world(
    *, models: int, shift: float = 1.5, spread: float = 1.0, hardness: float = 3.0, count: int = 4000, seed: int = 0
) -> tuple[ModelAccess, torch.Tensor]:
    """Log odds that are normal over trainings, about a mean of each candidate that is `shift` higher for members."""
    coins = toys.generator(seed)
    ids = torch.arange(count)
    labels = torch.zeros(count, dtype=torch.int64)
    candidates = Examples(ids=ids, inputs=ids[:, None].float(), labels=labels)
    mean = hardness * torch.randn(count, generator=coins, dtype=torch.float64)
    trained = torch.cat([torch.rand(1, count, generator=coins) < 0.5, balanced_halves(count, models, coins)])
    noise = spread * torch.randn(trained.shape, generator=coins, dtype=torch.float64)
    odds = mean + shift * trained + noise
    answers = torch.stack([odds, torch.zeros_like(odds)], dim=-1)
    target = ModelAccess(
        logits=lambda inputs: answers[0][inputs[:, 0].long()],
        input_shape=(1,),
        classes=2,
        candidates=candidates,
        shadows=Shadows(logits=answers[1:, :, None], trained_on=trained[1:]),
    )
    return target, trained[0]


@pytest.mark.parametrize("online", [True, False])
def test_with_many_models_it_attains_the_auc_of_the_exact_parameters(online):
    # The offline score is affine in the online one where variances are equal, so both attain the optimum.
    target, member = world(models=256)
    best = stats.norm.cdf(1.5 / math.sqrt(2))
    found = toys.auc(lira(target, shadows=256, online=online, variance="pooled").scores, member)
    # The AUC of 2000 against 2000 has a standard deviation of 0.0061 here; 128 models cost about 1/128 of the shift.
    assert abs(found - best) < 0.02
    assert toys.auc(loss_threshold(target).scores, member) < 0.7 < best


def test_few_models_are_helped_by_a_pooled_variance_of_residuals():
    target, member = world(models=16)
    pooled = toys.auc(lira(target, variance="pooled").scores, member)
    each = toys.auc(lira(target, variance="per_example").scores, member)
    assert pooled > each + 0.01
    # Hardness is no spread over trainings: ten times of it changes nothing that is pooled rightly.
    harder, member = world(models=16, hardness=30.0)
    assert toys.auc(lira(harder, variance="pooled").scores, member) == pytest.approx(pooled, abs=1e-9)


def test_the_rule_of_the_variance_turns_at_64_models():
    for models, rule in ((62, "pooled"), (64, "per_example")):
        target, _ = world(models=models, count=50)
        by_rule, named = (lira(target, shadows=models, variance=v).scores for v in ("auto", rule))
        assert torch.equal(by_rule, named)


def test_scores_are_the_ratio_of_scipys_densities():
    target, _ = world(models=8, count=6)
    assert target.shadows is not None and target.candidates is not None
    odds, member = target.shadows.logits[:, :, 0, 0].numpy(), target.shadows.trained_on.numpy()
    own = target.logits(target.candidates.inputs)[:, 0].numpy()
    means, residuals = {}, {True: [], False: []}
    for side in (True, False):
        for one in range(6):
            seen = odds[member[:, one] == side, one]
            means[side, one] = seen.mean()
            residuals[side].append(((seen - seen.mean()) ** 2).sum())
    spread = {side: math.sqrt(sum(parts) / (6 * 3)) for side, parts in residuals.items()}
    expected = [
        stats.norm.logpdf(own[one], means[True, one], spread[True])
        - stats.norm.logpdf(own[one], means[False, one], spread[False])
        for one in range(6)
    ]
    found = lira(target, shadows=8, variance="pooled").scores
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64))


def test_models_that_all_answer_alike_give_finite_scores():
    target, _ = world(models=8, spread=0.0, count=20)
    assert lira(target, shadows=8).scores.isfinite().all()


def test_too_few_models_views_and_bad_settings_are_refused():
    target, _ = world(models=8, count=20)
    with pytest.raises(NotApplicable, match="10 shadow models are asked for, and there are answers of 8"):
        lira(target, shadows=10)
    with pytest.raises(ValueError, match="shadows must be an even number"):
        lira(target, shadows=3)
    with pytest.raises(NotApplicable, match="2 views are asked for"):
        lira(target, shadows=8, views=2)
    with pytest.raises(ValueError, match="variance must be auto, per_example or pooled, got 'own'"):
        lira(target, shadows=8, variance="own")
    with pytest.raises(NotApplicable, match="at least 2 shadow models"):
        lira(target, shadows=2, variance="per_example")
    with pytest.raises(NotApplicable, match="take more shadows"):
        lira(target, shadows=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        lira(target, shadows=8, batch_size=0)
    assert target.candidates is not None
    with pytest.raises(ValueError, match="same candidates"):
        dataclasses.replace(target, candidates=toys.subset(target.candidates, torch.arange(20) < 10))
