"""What is particular to quantile regression; the duties of every attack are in test_every_attack.py."""

import dataclasses

import pytest
import torch

from leakbench.attacks.core import Examples, ModelAccess, NotApplicable
from leakbench.attacks.core.membership.query_scores import logit_gap
from leakbench.attacks.loss_threshold import loss_threshold
from leakbench.attacks.quantile_regression import quantile_regression

from . import toys


def world(*, spread: float, seed: int = 0, count: int = 1000) -> tuple[ModelAccess, torch.Tensor]:
    """A model that is surer of some inputs than of others, visibly, and surer of members by one deviation."""
    coins = toys.generator(seed)
    inputs = torch.rand(2 * count, 3, generator=coins)
    member = torch.rand(2 * count, generator=coins) < 0.5
    member[count:] = False
    noise = torch.randn(2 * count, generator=coins)
    gap = spread * (inputs[:, 0] > 0.5) + member + noise
    answer = {tuple(x): g for x, g in zip(inputs.tolist(), gap.tolist(), strict=True)}

    def logits(asked: torch.Tensor) -> torch.Tensor:
        own = torch.tensor([answer[tuple(x)] for x in asked.tolist()], dtype=torch.float64)
        return torch.stack([own, torch.zeros_like(own)], dim=1)

    ids, labels = torch.arange(2 * count), torch.zeros(2 * count, dtype=torch.int64)
    sides = [Examples(ids=ids[s], inputs=inputs[s], labels=labels[s]) for s in (slice(count), slice(count, None))]
    return ModelAccess(logits=logits, input_shape=(3,), classes=2, candidates=sides[0], population=sides[1]), member[
        :count
    ]


@pytest.mark.long
def test_what_strangers_like_it_get_is_taken_off():
    target, member = world(spread=8.0)
    by_loss = toys.auc(loss_threshold(target).scores, member)
    by_regression = toys.auc(quantile_regression(target, toys.generator(0)).scores, member)
    # Phi(1 / sqrt 2) = 0.760 with the true means; the loss sees a mixture whose halves do not overlap: 0.63.
    assert by_loss < 0.66 and by_regression > 0.72


@pytest.mark.long
def test_coins_decide_the_regression_and_nothing_else():
    target, _ = world(spread=1.0, count=200)
    first, again = (quantile_regression(target, toys.generator(3)).scores for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(quantile_regression(target, toys.generator(3), batch_size=7).scores, first)


def test_the_logit_gap_is_log_odds_and_survives_a_certain_model():
    log_p = torch.tensor([[0.8, 0.1, 0.1]], dtype=torch.float64).log()
    assert logit_gap(log_p, torch.tensor([0])).item() == pytest.approx(torch.tensor(4.0).log().item())
    sure = torch.tensor([[90.0, 0.0, 0.0], [100.0, 0.0, 0.0]], dtype=torch.float64).log_softmax(dim=1)
    gaps = logit_gap(sure, torch.tensor([0, 0]))
    assert gaps.isfinite().all() and gaps[1] - gaps[0] == pytest.approx(10)


def test_too_few_public_examples_and_bad_settings_are_refused():
    target, _ = world(spread=1.0, count=50)
    public = target.population
    assert public is not None
    few = Examples(ids=public.ids[:9], inputs=public.inputs[:9], labels=public.labels[:9])
    with pytest.raises(NotApplicable, match="at least 10 public examples, got 9"):
        quantile_regression(dataclasses.replace(target, population=few))
    with pytest.raises(ValueError, match="trees must be at least 1, got 0"):
        quantile_regression(target, trees=0)
