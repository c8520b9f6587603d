"""What is particular to BaVarIA, and its conjugate prior; the duties of every attack are in test_every_attack.py."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakbench.attacks.bavaria import bavaria
from leakbench.attacks.core import Examples, ModelAccess, NotApplicable, Shadows, balanced_halves
from leakbench.attacks.core.membership.conjugate_prior import ConjugatePrior, Summary, fitted_prior
from leakbench.attacks.lira import lira
from leakbench.attacks.rmia import rmia

from . import toys
from .test_lira import world


def overfitted(*, models: int, count: int = 3000, seed: int = 0) -> tuple[ModelAccess, torch.Tensor]:
    """Members are answered alike surely; strangers by how hard they are, with spreads that differ between them."""
    coins = toys.generator(seed)
    normal = lambda *shape: torch.randn(*shape, generator=coins, dtype=torch.float64)  # noqa: E731
    hard, public = 2 + 2.5 * normal(count), 200
    spread = (0.4 * normal(count)).exp()
    trained = torch.cat([torch.rand(1, count, generator=coins) < 0.5, balanced_halves(count, models, coins)])
    lifted = torch.nn.functional.softplus(hard - 3) + 3
    odds = torch.where(trained, lifted + 0.7 * spread * normal(*trained.shape), hard + spread * normal(*trained.shape))
    strangers = 2 + 2.5 * normal(1, public) + normal(models + 1, public)
    answers, others = (torch.stack([o, torch.zeros_like(o)], dim=-1) for o in (odds, strangers))
    table = torch.cat([answers[0], others[0]])
    examples = [
        Examples(
            ids=torch.arange(n),
            inputs=first + torch.arange(n)[:, None].double(),
            labels=torch.zeros(n, dtype=torch.int64),
        )
        for first, n in ((0, count), (count, public))
    ]
    target = ModelAccess(
        logits=lambda inputs: table[inputs[:, 0].long()],
        input_shape=(1,),
        classes=2,
        candidates=examples[0],
        population=examples[1],
        shadows=Shadows(logits=answers[1:, :, None], trained_on=trained[1:], population=others[1:]),
    )
    return target, trained[0]


@pytest.mark.long
def test_with_four_references_offline_it_is_at_least_rmia_and_that_at_least_lira():
    aucs, at_low_rates = [], []
    for seed in range(2):
        target, member = overfitted(models=8, seed=seed)
        scores = [one(target, shadows=8, online=False).scores for one in (lira, rmia, bavaria)]
        aucs.append([toys.auc(s, member) for s in scores])
        at_low_rates.append([found_at(s, member, 0.01) for s in scores])
    (by_lira, by_rmia, by_bavaria), low = np.mean(aucs, axis=0), np.mean(at_low_rates, axis=0)
    assert by_lira < by_rmia < by_bavaria - 0.01
    assert low[2] > max(low[:2])


@pytest.mark.long
def test_online_with_few_models_it_is_at_least_lira_with_either_variance():
    for models in (4, 8, 16):
        target, member = overfitted(models=models)
        best = toys.auc(bavaria(target, shadows=models).scores, member)
        for variance in ("pooled", "per_example") if models > 4 else ("pooled",):
            assert best > toys.auc(lira(target, shadows=models, variance=variance).scores, member)


def found_at(scores: torch.Tensor, member: torch.Tensor, rate: float) -> float:
    threshold = scores[~member].sort(descending=True).values[int(rate * int((~member).sum()))]
    return float((scores[member] > threshold).double().mean())


@pytest.mark.long
@pytest.mark.parametrize("online", [True, False])
def test_with_many_models_it_attains_the_auc_of_the_exact_parameters(online):
    target, member = world(models=256)
    best = stats.norm.cdf(1.5 / math.sqrt(2))
    # The AUC of 2000 against 2000 has a standard deviation of 0.0061 here.
    assert abs(toys.auc(bavaria(target, shadows=256, online=online).scores, member) - best) < 0.02


def drawn(
    count: int, each: int, *, location: float, kappa: float, alpha: float, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(3)
    variance = stats.invgamma.rvs(alpha, scale=beta, size=count + 1, random_state=random)
    mean = random.normal(location, np.sqrt(variance / kappa))
    values = random.normal(mean, np.sqrt(variance), (each + 1, count + 1))
    return torch.tensor(values[:each, :count]), torch.tensor(values[each, :count])


@pytest.mark.long
def test_the_prior_is_recovered_from_many_subjects_and_predicts_as_it_says():
    values, following = drawn(20_000, 4, location=1.5, kappa=0.4, alpha=3.0, beta=2.0)
    seen = Summary.of(values, torch.ones_like(values, dtype=torch.bool))
    prior = fitted_prior(seen, torch.ones(20_000, 1, dtype=torch.float64))
    assert float(prior.location[0]) == pytest.approx(1.5, abs=0.05)
    assert float(prior.kappa) == pytest.approx(0.4, rel=0.05)
    assert float(prior.alpha) == pytest.approx(3.0, rel=0.1) and float(prior.beta) == pytest.approx(2.0, rel=0.1)
    then = prior.predicted(seen)
    uniform = stats.t.cdf(following, then.freedom, then.location, then.scale)
    assert stats.kstest(uniform, "uniform").pvalue > 0.01
    # Variances of four values of one's own are too sure of themselves.
    own = (following - seen.mean) / (seen.squares / 3).sqrt() / math.sqrt(1 + 1 / 4)
    assert stats.kstest(stats.norm.cdf(own), "uniform").pvalue < 1e-6


@pytest.mark.long
def test_the_likelihood_that_is_maximised_is_the_integral_over_means_and_variances():
    values = torch.tensor([[0.3], [1.1], [-0.4]], dtype=torch.float64)
    prior = ConjugatePrior(*(torch.tensor(x, dtype=torch.float64) for x in ([0.5], 0.7, 2.0, 1.5)))
    found = prior.log_marginal(Summary.of(values, torch.ones_like(values, dtype=torch.bool)))
    mean, log_variance = np.meshgrid(np.linspace(-40, 40, 4001), np.linspace(-4, 8, 601))
    variance = np.exp(log_variance)
    joint = stats.invgamma.pdf(variance, 2.0, scale=1.5) * stats.norm.pdf(mean, 0.5, np.sqrt(variance / 0.7))
    for value in values[:, 0].numpy():
        joint = joint * stats.norm.pdf(value, mean, np.sqrt(variance))
    expected = (joint * variance).sum() * (80 / 4000) * (12 / 600)
    assert float(found) == pytest.approx(math.log(expected), abs=1e-3)


def test_scores_are_the_ratio_of_scipys_densities_of_the_posteriors():
    target, _ = world(models=8, count=40)
    bank = target.shadows
    assert bank is not None and target.candidates is not None
    odds, own = bank.logits[:, :, 0, 0], target.logits(target.candidates.inputs)[:, 0]
    fits = {}
    for side in (False, True):
        seen = Summary.of(odds, bank.trained_on == side)
        at = fits[False][1] if side else None
        columns = [torch.ones(40, dtype=torch.float64), *([] if at is None else [at, at**2])]
        prior = fitted_prior(seen, torch.stack(columns, dim=1))
        densities, where = [], []
        for one in range(40):
            x = odds[bank.trained_on[:, one] == side, one].numpy()
            kappa, n = float(prior.kappa), len(x)
            m0, alpha, beta = float(prior.location[one]), float(prior.alpha) + n / 2, float(prior.beta)
            beta += ((x - x.mean()) ** 2).sum() / 2 + kappa * n * (x.mean() - m0) ** 2 / (2 * (kappa + n))
            where.append((kappa * m0 + x.sum()) / (kappa + n))
            scale = math.sqrt(beta * (kappa + n + 1) / (alpha * (kappa + n)))
            densities.append(stats.t.logpdf(float(own[one]), 2 * alpha, where[-1], scale))
        fits[side] = (densities, torch.tensor(where, dtype=torch.float64))
    expected = torch.tensor(fits[True][0]) - torch.tensor(fits[False][0])
    assert torch.allclose(bavaria(target, shadows=8).scores, expected.double(), atol=2e-4)


@pytest.mark.long
def test_offline_one_candidate_s_own_members_answers_hardly_count():
    target, _ = world(models=8, count=400)
    bank = target.shadows
    assert bank is not None
    raised = bank.logits.clone()
    raised[bank.trained_on[:, 7], 7, :, 0] += 5.0
    changed = dataclasses.replace(target, shadows=dataclasses.replace(bank, logits=raised))
    moved = {
        online: float(
            (bavaria(changed, shadows=8, online=online).scores - bavaria(target, shadows=8, online=online).scores)[7]
        )
        for online in (True, False)
    }
    assert abs(moved[True]) > 1 > 20 * abs(moved[False])


@pytest.mark.long
def test_models_that_all_answer_alike_give_finite_scores_and_too_few_are_refused():
    target, _ = world(models=8, spread=0.0, count=20)
    assert bavaria(target, shadows=8).scores.isfinite().all()
    with pytest.raises(NotApplicable, match="take more shadows"):
        bavaria(target, shadows=2)


def test_the_prior_is_found_on_a_plateau_of_the_likelihood_too():
    # Of these values alpha grows without end, and a search that stopped there had kappa 7,000.
    coins = torch.Generator().manual_seed(57)
    middle = 0.4 * torch.randn(60, generator=coins, dtype=torch.float64)
    values = middle + torch.randn(2, 60, generator=coins, dtype=torch.float64)
    seen = Summary.of(values, torch.ones(2, 60, dtype=torch.bool))
    found = fitted_prior(seen, torch.ones(60, 1, dtype=torch.float64))
    # No prior of one variance for all, alpha as good as infinite, is likelier.
    hypers = np.array([(k, 1e8, v * 1e8) for k in np.geomspace(1, 1e4, 60) for v in np.linspace(0.5, 2, 31)])
    tried = [ConjugatePrior(found.location, *hyper) for hyper in torch.from_numpy(hypers)]
    best = max(float(prior.log_marginal(seen).mean()) for prior in tried)
    assert float(found.log_marginal(seen).mean()) > best - 1e-7
    assert 50 < float(found.kappa) < 120


@pytest.mark.long
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_in_other_units_and_from_another_zero_log_odds_have_the_same_scores(factor):
    target, _ = world(models=8, count=60)
    bank, logits = target.shadows, target.logits
    assert bank is not None
    moved = dataclasses.replace(
        target,
        shadows=dataclasses.replace(bank, logits=factor * (bank.logits + torch.tensor([1e4, 0.0]))),
        logits=lambda inputs: factor * (logits(inputs) + torch.tensor([1e4, 0.0])),
    )
    before, after = (bavaria(one, shadows=8).scores for one in (target, moved))
    assert torch.allclose(after, before, atol=0.02)


@pytest.mark.long
def test_capped_log_odds_have_the_same_scores_in_every_order():
    """Of variances of 0 the likelihood had several maxima, and the order of the candidates chose among them."""
    coins = torch.Generator().manual_seed(3)
    values = (1.2 * torch.randn(400, generator=coins) + torch.randn(4, 400, generator=coins)).clamp(max=1.0).double()
    chosen = torch.rand(4, 400, generator=coins).argsort(dim=0) < 2
    order = torch.randperm(400, generator=coins)
    fits = []
    for where in (torch.arange(400), order):
        seen = Summary.of(values[:, where], chosen[:, where])
        features = torch.stack([torch.ones(400).double(), values.mean(0)[where], values.mean(0)[where] ** 2], dim=1)
        prior = fitted_prior(seen, features)
        fits.append(prior.predicted(seen).log_density(torch.zeros(400).double()))
    assert torch.allclose(fits[0][order], fits[1], atol=1e-4)


@pytest.mark.parametrize("nearer", [1.0, 1e-4])
def test_subjects_that_differ_far_more_than_models_do_are_told_as_well(nearer):
    """As of a pretrained model that was trained for a few steps: units of the spread of all hid that of each."""
    coins = torch.Generator().manual_seed(8)
    count, models = 600, 33
    spread = (0.7 * torch.randn(count, generator=coins, dtype=torch.float64)).exp()
    trained = torch.rand(models, count, generator=coins) < 0.5
    noise = torch.randn(models, count, generator=coins, dtype=torch.float64)
    alike = 2.5 * torch.randn(count, generator=coins, dtype=torch.float64)
    odds = alike + nearer * spread * (1.5 * trained + noise)
    target, _ = world(models=models - 1, count=count)
    bank = target.shadows
    assert bank is not None
    answers = torch.stack([odds, torch.zeros_like(odds)], dim=-1)
    changed = dataclasses.replace(
        target,
        logits=lambda inputs: answers[0][inputs[:, 0].long()],
        shadows=dataclasses.replace(bank, logits=answers[1:, :, None], trained_on=trained[1:]),
    )
    assert toys.auc(bavaria(changed, shadows=32).scores, trained[0]) > 0.84
