"""Picks among candidates: against closed forms and the density itself, and what nobody else is given."""

import importlib
import pkgutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from leakbench import attacks
from leakbench.attacks.core import (
    Access,
    AccessError,
    Examples,
    Knows,
    NotApplicable,
    Observation,
    Reconstruction,
    Requirements,
    attack,
    narrow,
)
from leakbench.attacks.rero import AT_ONCE, rero

from ..parameters import subtests
from . import toys


def update(table: Tensor, sought: int, noise_std: Tensor, *, seed: int = 0, **fields) -> Observation:
    """A release of one record whose contribution is a row of `table`; the prior's inputs are numbers of rows."""
    noise = noise_std * torch.randn(noise_std.shape, generator=toys.generator(seed), dtype=torch.float64)
    released = table[sought] + noise
    numbers = torch.arange(len(table))
    return Observation(
        **{
            "released": released,
            "simulate": lambda x, y: table[x[:, 0].long()].sum(0),
            "contributions": lambda x, y: table[x[:, 0].long()],
            "residual": lambda predicted: released - predicted,
            "logits": lambda x: x,
            "input_shape": (1,),
            "input_low": 0.0,
            "input_high": float(len(table)),
            "classes": 2,
            "step": 0,
            "expected_batch": 1.0,
            "noise_std": noise_std,
            "prior": Examples(ids=numbers, inputs=numbers[:, None].float(), labels=numbers % 2),
            "remainder": released,
            **fields,
        }
    )


def picked(target: Observation) -> int:
    result = rero(target)
    assert result.inputs.shape == (1, 1) and int(result.labels) == int(result.inputs) % 2
    return int(result.inputs)


def optimum(n: int, sigma: float) -> float:
    """Success of the most likely of n orthogonal candidates of norm 1."""
    density = lambda x: stats.norm.pdf(x) * stats.norm.cdf(x + 1 / sigma) ** (n - 1)  # noqa: E731 - an integrand
    return integrate.quad(density, -10, 10)[0]


@pytest.mark.parametrize(("n", "sigma"), [(10, 1.0), (5, 0.5)])
def test_orthogonal_candidates_are_picked_as_often_as_the_integral_says_and_never_above_the_bound(n, sigma):
    runs, std = 400, torch.full((n,), sigma, dtype=torch.float64)
    table = torch.eye(n, dtype=torch.float64)
    hits = sum(picked(update(table, run % n, std, seed=run)) == run % n for run in range(runs))
    expected, bound = optimum(n, sigma), stats.norm.cdf(stats.norm.ppf(1 / n) + 1 / sigma)
    assert 1 / n + 0.1 < expected < bound
    # A fresh seed is off by so much once in a million; half or one and a half of the noise is told from it.
    assert stats.binomtest(hits, runs, expected).pvalue > 1e-6
    assert stats.binomtest(hits, runs, optimum(n, 2 * sigma)).pvalue < 1e-6
    assert stats.binomtest(hits, runs, optimum(n, sigma / 2)).pvalue < 1e-6
    assert stats.binom.sf(hits - 1, runs, bound) > 1e-6


def test_the_most_likely_candidate_is_picked_whatever_norms_and_noise():
    """Norms from 0.3 to 6 and noise of another size on each coordinate: the density of the remainder decides."""
    draw = toys.generator(0)
    table = (
        torch.randn(3 * AT_ONCE + 1, 6, generator=draw, dtype=torch.float64) * torch.logspace(-0.5, 0.5, 25)[:, None]
    )
    std = torch.logspace(-1, 1, 6, dtype=torch.float64)
    right, naive, unwhitened, runs = 0, 0, 0, 150
    for run in range(runs):
        target = update(table, run % len(table), std, seed=run)
        density = stats.norm.logpdf(target.released.numpy(), table.numpy(), std.numpy()).sum(axis=1)
        assert picked(target) == density.argmax()
        right += density.argmax() == run % len(table)
        # What is left out where the second term is: large candidates are favoured.
        naive += int((table @ (target.released / std**2)).argmax()) == run % len(table)
        unwhitened += int((table @ target.released - table.square().sum(1) / 2).argmax()) == run % len(table)
    assert right > naive + 5 * np.sqrt(runs) / 2 and right > unwhitened + 5 * np.sqrt(runs) / 2


def test_without_noise_the_nearest_is_picked_and_coordinates_without_noise_decide_first():
    table = torch.tensor([[0.0, 0.0, 4.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0 + 1e-9, 0.0, 9.0]]).double()
    none = torch.zeros(3, dtype=torch.float64)
    assert [picked(update(table, one, none)) for one in range(3)] == [0, 1, 2]
    assert rero(update(table, 1, none)).objective == 0
    # The last coordinate alone is noisy, and says 9 of what is 0: the others leave the third and the fourth.
    noisy = torch.tensor([0.0, 0.0, 1.0]).double()
    shown = torch.tensor([1.0, 0.0, 8.0]).double()
    assert picked(update(table, 2, noisy, released=shown, remainder=shown)) == 3
    shown = torch.tensor([0.0, 1.0, 9.0]).double()
    assert picked(update(table, 1, noisy, released=shown, remainder=shown)) == 1


def test_the_objective_is_half_the_squared_distance_in_units_of_the_noise():
    table, std = torch.eye(3, dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3]).double()
    target = update(table, 1, std, seed=4)
    left = (target.released - table[picked(target)]) / std
    assert rero(target).objective == pytest.approx(float(left.square().sum() / 2))


@subtests("count", [1, 3])
@subtests("space", ["dense", "masked", "projected"])
def test_real_updates_give_the_record_away_in_any_space_once_the_others_are_known(count, space):
    dim = toys.parameters_of_conv_net()
    encoder = {
        "dense": torch.eye(dim),
        "masked": torch.eye(dim)[torch.rand(dim, generator=toys.generator(5)) < 0.3],
        "projected": torch.linalg.qr(torch.randn(dim, 20, generator=toys.generator(6)))[0].T,
    }[space]
    seen, batch = toys.conv_step(encoder, count=count, clip_norm=1.0)
    own = seen.contributions(batch.inputs, batch.labels)
    prior = toys.among_others(toys.subset(batch, torch.tensor([0])))
    left = seen.released.double() - own[1:].sum(0)
    target = replace(seen, prior=prior, remainder=left, noise_std=torch.zeros(len(encoder)).double())
    assert torch.equal(rero(target).inputs, batch.inputs[:1].to(prior.inputs))


def test_other_attacks_are_not_given_candidates_and_know_no_remainder():
    target, _ = toys.update_target(net="linear")
    names = [one.name for one in pkgutil.iter_modules(attacks.__path__) if one.name != "core"]
    methods = [getattr(importlib.import_module(f"leakbench.attacks.{name}"), name) for name in names]
    assert [one.name for one in methods if Knows.PRIOR in one.requires.knows] == ["rero"]
    for one in methods:
        if one.name == "rero" or one.target is not Observation:
            continue
        view = narrow(target, one.requires)
        with pytest.raises(AccessError, match=r"Knows\.PRIOR"):
            _ = view.prior
        if Knows.OTHERS not in one.requires.knows:
            with pytest.raises(AccessError, match=r"Knows\.OTHERS"):
                _ = view.remainder
        assert "prior" not in vars(view)
    # And this one has nothing beside what it declares: neither labels nor the batch's size.
    view = narrow(target, rero.requires)
    for field in ("labels", "batch_size", "population"):
        with pytest.raises(AccessError):
            getattr(view, field)


def test_labels_of_the_batch_and_a_prior_are_never_known_together():
    with pytest.raises(TypeError, match=r"told must not know both the labels of the batch and a prior"):

        @attack(access=Access.UPDATE, knows=Knows.LABELS | Knows.PRIOR)
        def told(target: Observation, coins: torch.Generator) -> Reconstruction:
            """Would rule out whoever has another label."""
            raise AssertionError

    # What a target offers may hold both: attacks are given what they declare.
    both = Requirements(access=Access.UPDATE, knows=Knows.LABELS | Knows.PRIOR | Knows.OTHERS | Knows.DEFENSE)
    assert rero.check(both) is None


def test_what_does_not_fit_is_refused():
    table, std = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    by_chance = replace(update(table, 0, std), sample_rate=0.5, participation="independent")
    with pytest.raises(NotApplicable, match="has to be known"):
        rero(by_chance)
    with pytest.raises(ValueError, match="prior must have at least 2 candidates to choose from, got 1"):
        update(table[:1], 0, std)
    with pytest.raises(ValueError, match=r"remainder must be finite .*, got \[2\] for \[3\]"):
        update(table, 0, std, remainder=torch.ones(2))
    with pytest.raises(ValueError, match="remainder must be finite"):
        update(table, 0, std, remainder=torch.full((3,), torch.nan))
    with pytest.raises(AccessError, match="candidates of which one is the record that is sought"):
        rero(replace(update(table, 0, std), prior=None))
