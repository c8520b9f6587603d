"""What is particular to RMIA; the duties of every attack are in test_every_attack.py."""

import dataclasses
import math

import pytest
import torch

from leakbench.attacks.core import Examples, ModelAccess, NotApplicable, Shadows, balanced_halves
from leakbench.attacks.core.membership.shadow_statistics import label_log_probability
from leakbench.attacks.rmia import GRID, best_slope, dominated, rmia, taylor_log_probability

from ..parameters import subtests
from . import toys


def world(
    *, models: int = 8, count: int = 60, public: int = 40, slope: float = 0.3, spread: float = 0.7, seed: int = 0
) -> tuple[ModelAccess, torch.Tensor]:
    """Two classes; the label's probability is p_out of each candidate without it, slope p_out + 1 - slope with it."""
    coins = toys.generator(seed)
    candidates, strangers = (
        Examples(
            ids=torch.arange(n), inputs=torch.arange(n)[:, None] + 1e6 * kind, labels=torch.zeros(n, dtype=torch.int64)
        )
        for kind, n in ((0, count), (1, public))
    )
    candidates, strangers = (dataclasses.replace(e, inputs=e.inputs.double()) for e in (candidates, strangers))
    trained = torch.cat([torch.rand(1, count, generator=coins) < 0.5, balanced_halves(count, models, coins)])
    hard = torch.rand(count, generator=coins, dtype=torch.float64) * 0.9 + 0.05
    p = torch.where(trained, slope * hard + 1 - slope, hard)
    odds = p.logit() + spread * torch.randn(trained.shape, generator=coins, dtype=torch.float64)
    of_public = 2 * torch.randn(1, public, generator=coins, dtype=torch.float64)
    of_public = of_public + spread * torch.randn(models + 1, public, generator=coins, dtype=torch.float64)
    answers, others = (torch.stack([odds, torch.zeros_like(odds)], dim=-1) for odds in (odds, of_public))

    def logits(inputs: torch.Tensor) -> torch.Tensor:
        number = inputs[:, 0].long()
        table = torch.cat([answers[0], others[0]])
        return table[torch.where(number >= 1_000_000, number - 1_000_000 + count, number)]

    target = ModelAccess(
        logits=logits,
        input_shape=(1,),
        classes=2,
        candidates=candidates,
        population=strangers,
        shadows=Shadows(logits=answers[1:, :, None], trained_on=trained[1:], population=others[1:]),
    )
    return target, trained[0]


def by_hand(target: ModelAccess, *, online: bool, a: float, gamma: float) -> list[float]:
    """The share of public examples, one pair at a time."""
    bank, candidates, public = target.shadows, target.candidates, target.population
    assert bank is not None and bank.population is not None and candidates is not None and public is not None
    p = lambda odds: 1 / (1 + math.exp(-odds))  # noqa: E731
    ratios = []
    for z in range(len(public)):
        out = sum(p(float(bank.population[m, z, 0])) for m in range(len(bank))) / len(bank)
        own = p(float(target.logits(public.inputs[z : z + 1])[0, 0]))
        ratios.append(own / (((1 + a) * out + 1 - a) / 2))
    shares = []
    for x in range(len(candidates)):
        of = [p(float(bank.logits[m, x, 0, 0])) for m in range(len(bank))]
        outside = [v for m, v in enumerate(of) if not bool(bank.trained_on[m, x])]
        mean = sum(of) / len(of) if online else ((1 + a) * sum(outside) / len(outside) + 1 - a) / 2
        own = p(float(target.logits(candidates.inputs[x : x + 1])[0, 0])) / mean
        shares.append(sum(own / r >= gamma for r in ratios) / len(ratios))
    return shares


@subtests("online, a, gamma", [(True, 0.3, 1.0), (False, 0.3, 1.0), (False, 0.8, 1.2), (False, 1.0, 0.9)])
def test_scores_are_the_paper_s_double_loop_up_to_what_breaks_its_ties(online, a, gamma):
    target, _ = world()
    found = rmia(target, shadows=8, online=online, a=a, gamma=gamma).scores
    # n scores of n + 1 steps: the refinement is less than one of them.
    steps = (found * 41).floor() / 40
    assert torch.allclose(steps, torch.tensor(by_hand(target, online=online, a=a, gamma=gamma), dtype=torch.float64))
    assert len(steps.unique()) > 5 and len(found.unique()) == len(found)


def test_the_score_rises_with_the_ratio_whatever_the_public_examples():
    ratio = torch.tensor([-700.0, -40.0, -39.0, -1e-6, 0.0, 1e-6, 40.0, 41.0, 700.0], dtype=torch.float64)
    for public in (torch.zeros(50), torch.linspace(-50, 50, 1000), torch.full((5,), 1e3)):
        scores = dominated(ratio, public.double(), gamma=1.0)
        assert (scores.diff() > 0).all() and scores.min() > 0 and scores.max() < 1


def test_a_population_that_is_all_alike_gives_the_rank_of_the_ratio():
    target, _ = world(public=10)
    assert target.population is not None and target.shadows is not None
    same = dataclasses.replace(target.population, inputs=torch.full((10, 1), 1e6, dtype=torch.float64))
    bank = dataclasses.replace(target.shadows, population=torch.zeros(8, 10, 2))
    constant = dataclasses.replace(target, population=same, shadows=bank)
    for online in (True, False):
        expected = rmia(target, shadows=8, online=online).scores.argsort()
        assert torch.equal(rmia(constant, shadows=8, online=online).scores.argsort(), expected)


def test_offline_nothing_is_read_of_models_that_were_trained_on_the_candidate():
    target, _ = world()
    bank = target.shadows
    assert bank is not None
    other = bank.logits.masked_fill(bank.trained_on[..., None, None], 7.0)
    changed = dataclasses.replace(target, shadows=dataclasses.replace(bank, logits=other))
    assert torch.equal(rmia(target, shadows=8, online=False).scores, rmia(changed, shadows=8, online=False).scores)
    assert not torch.equal(rmia(target, shadows=8).scores, rmia(changed, shadows=8).scores)


def test_a_is_tuned_on_shadow_models_to_what_lifts_members():
    chosen = {}
    for slope in (0.1, 0.9):
        target, _ = world(models=8, count=3000, slope=slope, spread=0.05)
        bank = target.shadows
        assert bank is not None
        log_p = bank.logits.double().log_softmax(-1)[..., 0]
        # One model at a time: the others but its twin as references.
        means = []
        for a in GRID:
            aucs = []
            for one in range(8):
                rest = [m for m in range(8) if m // 2 != one // 2]
                out = (~bank.trained_on[rest]).double()
                p_out = (out * log_p[rest, :, 0].exp()).sum(0) / out.sum(0)
                ratio = log_p[one, :, 0] - (((1 + a) * p_out + 1 - a) / 2).log()
                aucs.append(toys.auc(ratio, bank.trained_on[one]))
            means.append(sum(aucs) / len(aucs))
        chosen[slope] = best_slope(log_p, bank.trained_on)
        assert max(means) - means[GRID.index(chosen[slope])] < 1e-9
        fixed, tuned = (rmia(target, shadows=8, online=False, a=chosen[slope], tuned=t).scores for t in (False, True))
        assert torch.equal(fixed, tuned)
    assert chosen[0.1] < chosen[0.9]


def test_too_few_public_examples_and_bad_settings_are_refused():
    target, _ = world()
    few, _ = world(public=9)
    with pytest.raises(NotApplicable, match="at least 10 public examples, got 9"):
        rmia(few, shadows=8)
    assert target.shadows is not None
    silent = dataclasses.replace(target, shadows=dataclasses.replace(target.shadows, population=None))
    with pytest.raises(NotApplicable, match="what shadow models answer about the public examples"):
        rmia(silent, shadows=8)
    with pytest.raises(NotApplicable, match="at least 4 shadow models in pairs"):
        rmia(target, shadows=2, online=False, tuned=True)
    for name, value in (("gamma", 0.0), ("gamma", math.nan), ("temperature", -1.0), ("temperature", math.inf)):
        with pytest.raises(ValueError, match=f"{name} must be positive and finite"):
            rmia(target, shadows=8, **{name: value})  # type: ignore[arg-type]  # a float, for whichever setting
    for a in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"a must be in \[0, 1\]"):
            rmia(target, shadows=8, a=a)
    with pytest.raises(ValueError, match="terms must be even"):
        rmia(target, shadows=8, terms=3)
    with pytest.raises(ValueError, match="margin must be at least 0"):
        rmia(target, shadows=8, margin=0.6)
    assert rmia(target, shadows=8, terms=4, margin=0.6).scores.isfinite().all()


def test_the_taylor_softmax_is_the_softmax_where_the_series_is_long_and_a_hand_worked_one_else():
    logits = torch.randn(3, 5, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 1])
    long = taylor_log_probability(logits, labels, 40, 0.0)
    torch.testing.assert_close(long, label_log_probability(logits, labels), atol=1e-12, rtol=0)
    # 1 + x + x^2 / 2: of logits 2 (the label, less a margin of 1) and 0, 2.5 and 1.
    one = taylor_log_probability(torch.tensor([[[2.0, 0.0]]]), torch.tensor([0]), 2, 1.0)
    assert math.exp(float(one)) == pytest.approx(2.5 / 3.5)
    # Where the softmax is 1 to the last digit a longer logit is still told from a shorter one.
    far = torch.tensor([[[800.0, 0.0]], [[1600.0, 0.0]]])
    first, second = taylor_log_probability(far, torch.tensor([0, 0]), 4, 0.6)[:, 0].tolist()
    assert first < second < 0 and label_log_probability(far, torch.tensor([0, 0])).abs().max() == 0
