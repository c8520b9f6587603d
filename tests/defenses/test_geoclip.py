"""What is particular to GeoClip: the space it clips in, how that follows releases, and the noise that it saves."""

import math

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from leakbench.defenses.core import (
    Context,
    GradientLess,
    Offset,
    Stretched,
    Subspace,
    poisson,
    predict,
    release,
    seeded,
)
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.geoclip import geoclip

from ..parameters import subtests
from . import duties


def released(defense, draw_rows, *, steps, seed=0):
    """Squared distance of each update from the mean of its rows, and the state after the last."""
    context = Context(step=0, steps=steps, dim=20, expected_batch=200.0, noise_multiplier=defense.calibrated_multiplier)
    noise, state, errors = seeded(seed), defense.start(context), []
    for step in range(steps):
        context = context.at(step)
        state, plan = defense.plan(state, context)
        rows = draw_rows(step)
        out = release(defense, rows, context, noise=noise, state=state)
        update = plan.post(out.total / 200)
        state = defense.observe(state, context, out.noisy, update)
        errors.append(float((update - rows.mean(dim=0)).square().sum()))
    return errors, state


def anisotropic(step):
    """Two directions of variance 1, askew to the axes, and eighteen of 1e-4; the mean lies along the first."""
    draw = torch.Generator().manual_seed(7)
    axes = torch.linalg.qr(torch.randn(20, 20, generator=draw)).Q
    spread = torch.tensor([1.0] * 2 + [0.01] * 18)
    rows = torch.randn(200, 20, generator=torch.Generator().manual_seed(step)) * spread
    return rows @ axes.T + 0.2 * axes[:, 0]


def test_where_nothing_moves_it_is_dp_sgd_to_the_same_noise_draw():
    one = duties.trained(geoclip(clip_norm=0.5, rank=3, noise_multiplier=1.3, mean_decay=1.0, covariance_decay=1.0))
    other = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=1.3))
    torch.testing.assert_close(duties.parameters(one), duties.parameters(other), rtol=1e-6, atol=1e-6)


def test_the_first_step_is_one_of_dp_sgd():
    one = duties.trained(geoclip(clip_norm=0.5, noise_multiplier=1.3), steps=1)
    other = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=1.3), steps=1)
    torch.testing.assert_close(duties.parameters(one), duties.parameters(other), rtol=1e-6, atol=1e-6)


def test_a_plan_by_hand():
    """Variances 16, 1 and (twice) 1/4 in units of C^2 / 4: roots 4, 1, 1/2, 1/2, whose mean is 3/2."""
    state = {
        "mean": torch.tensor([1.0, 0.0, 0.0, 2.0]),
        "directions": torch.eye(4)[:, [2, 0]],
        "variances": [16.0, 1.0],
        "rest": 0.25,
    }
    defense = geoclip(clip_norm=3.0, rank=2, gamma=0.6, noise_multiplier=1.0)
    _, plan = defense.plan(state, Context(step=5, steps=9, dim=4))
    (block,) = plan.blocks
    assert isinstance(block.codec, Stretched) and isinstance(block.query, GradientLess)
    assert isinstance(plan.post, Offset) and plan.post.vector is state["mean"] and block.query.vector is state["mean"]
    factors = torch.tensor([math.sqrt(0.4), math.sqrt(0.8), math.sqrt(0.1), math.sqrt(0.8)])
    torch.testing.assert_close(block.codec.encode(torch.eye(4)), torch.diag(factors))
    # E |M (g - a)|^2 = gamma C^2 for the covariance that it was made of
    variances = torch.tensor([1.0, 0.25, 16.0, 0.25]) * 9.0 / 4
    assert float((factors.square() * variances).sum()) == pytest.approx(0.6 * 9.0)


def test_no_other_space_of_as_much_clipping_has_less_noise():
    """Theorem 2: tr (M^T M)^-1 is least, by the method's factors against others that meet the same constraint."""
    variances = torch.tensor([16.0, 1.0, 0.25, 0.25], dtype=torch.float64)
    state = {"mean": torch.zeros(4), "directions": torch.eye(4)[:, :2], "variances": [16.0, 1.0], "rest": 0.25}
    (block,) = geoclip(rank=2, noise_multiplier=1.0).plan(state, Context(step=5, steps=9, dim=4))[1].blocks
    found = torch.diagonal(block.codec.encode(torch.eye(4))).double()
    least = float((found**-2).sum())
    for seed in range(200):
        other = found * torch.exp(0.3 * torch.randn(4, generator=torch.Generator().manual_seed(seed)))
        other *= ((found.square() * variances).sum() / (other.square() * variances).sum()).sqrt()
        assert float((other**-2).sum()) > least


def test_the_covariance_is_the_moving_average_of_releases_less_the_noise():
    """Algorithm 1 written out, with as many directions as dimensions; sigma^2 C^2 / (B m^2) is the noise's part."""
    defense, dim, batch = geoclip(clip_norm=2.0, rank=5, covariance_decay=0.8, noise_multiplier=0.3), 5, 10.0
    context = Context(step=0, steps=9, dim=dim, expected_batch=batch, noise_multiplier=0.3)
    state = {"mean": torch.zeros(dim), "directions": torch.eye(dim), "variances": [1.0] * dim, "rest": 1.0}
    mean, covariance = torch.zeros(dim), torch.eye(dim, dtype=torch.float64) * 4.0 / dim
    for step in range(9):
        stretch = defense.plan(state, context)[1].blocks[0].codec.encode(torch.eye(dim)).double()
        update = torch.randn(dim, generator=torch.Generator().manual_seed(step))
        centred = (update - mean).double()
        noise = 0.3**2 * 4.0 / batch * torch.linalg.inv(stretch @ stretch)
        covariance = 0.8 * covariance + 0.2 * (batch * torch.outer(centred, centred) - noise)
        mean = 0.99 * mean + 0.01 * update
        state = defense.observe(state, context.at(step), (), update)
        torch.testing.assert_close(state["mean"], mean)
        own = torch.tensor(state["variances"], dtype=torch.float64) * 4.0 / dim
        directions = state["directions"].double()
        torch.testing.assert_close(directions @ torch.diag(own) @ directions.T, covariance, rtol=1e-4, atol=1e-4)


def test_the_first_direction_is_the_first_release_and_the_rest_what_is_beside_it():
    """Of [3, 0, 4] at B = 2 and C = 1, in units of 1/3: 150 along it, and 50 in each of three coordinates."""
    defense = geoclip(clip_norm=1.0, rank=1, covariance_decay=0.9, noise_multiplier=0.0)
    context = Context(step=0, steps=2, dim=3, expected_batch=2.0)
    state = defense.observe(defense.start(context), context, (), torch.tensor([3.0, 0.0, 4.0]))
    torch.testing.assert_close(state["directions"].abs()[:, 0], torch.tensor([0.6, 0.0, 0.8]))
    assert state["variances"] == pytest.approx([0.9 + 0.1 * 150])
    assert state["rest"] == pytest.approx(0.9 + 0.1 * 50)


def test_the_rest_keeps_its_variance_whatever_the_noise():
    """Without its part taken off, the noise of 20 dimensions would double the variance in a dozen steps."""

    def isotropic(step):
        return torch.randn(200, 20, generator=torch.Generator().manual_seed(step)) / math.sqrt(20)

    _, state = released(geoclip(rank=0, gamma=0.2, highest=1e6, noise_multiplier=5.0), isotropic, steps=150)
    assert 0.5 < state["rest"] < 2.0


def test_under_noise_alone_the_variance_errs_in_a_step_by_what_the_caveat_says():
    dim, batch, sigma, decay = 2000, 100.0, 3.0, 0.99
    defense = geoclip(rank=1, covariance_decay=decay, noise_multiplier=sigma)
    context = Context(step=0, steps=1, dim=dim, expected_batch=batch, noise_multiplier=sigma)
    draws, found = torch.Generator().manual_seed(0), []
    for _ in range(400):
        update = sigma * torch.randn(dim, generator=draws) / batch
        found.append(defense.observe(defense.start(context), context, (), update)["rest"] - decay)
    errors = torch.tensor(found)
    expected = (1 - decay) * sigma**2 * math.sqrt(2 * dim) / batch
    assert abs(float(errors.mean())) < 5 * expected / 20
    assert float(errors.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * 400))


@pytest.mark.long
def test_on_anisotropic_gradients_its_error_is_a_fraction_of_that_of_dp_sgd_at_any_clip_norm():
    ours, state = released(geoclip(rank=4, noise_multiplier=2.0), anisotropic, steps=250)
    assert state["rest"] < 0.1 < 1.0 < state["variances"][1]
    others = [
        sum(released(dp_sgd(clip_norm=c, noise_multiplier=2.0), anisotropic, steps=20)[0]) / 20
        for c in (0.1, 0.3, 0.5, 1.0, 2.0, 4.0)
    ]
    assert sum(ours[-50:]) / 50 < 0.25 * min(others)


def test_a_stretched_codec_is_undone_and_its_factors_are_refused():
    draw = torch.Generator().manual_seed(0)
    bases = tuple(
        torch.linalg.qr(torch.randn(n, k, generator=draw, dtype=torch.float64)).Q for n, k in ((4, 2), (3, 1))
    )
    subspace = Subspace(bases, ((1, 5), (6, 9)), 10)
    codec = Stretched(subspace, torch.tensor([2.0, 0.5, 30.0], dtype=torch.float64), 0.25)
    rows = torch.randn(3, 10, generator=draw, dtype=torch.float64)
    for row, values in zip(rows, codec.encode(rows), strict=True):
        torch.testing.assert_close(codec.decode(values), row)
    along = torch.zeros(10, dtype=torch.float64)
    along[6:9] = bases[1][:, 0]
    torch.testing.assert_close(codec.encode(along.unsqueeze(0)), 30 * along.unsqueeze(0))
    for factors, rest in (([1.0], 1.0), ([1.0, 0.0, 1.0], 1.0), ([1.0] * 3, 0.0), ([1.0, math.inf, 1.0], 1.0)):
        with pytest.raises(ValueError, match="must be"):
            Stretched(subspace, torch.tensor(factors), rest)


def test_its_epsilon_is_that_of_dp_accounting():
    claim = predict(geoclip(noise_multiplier=0.83), sampling=poisson(0.013), steps=217).claim(3e-6)
    accountant = PLDAccountant()
    event = dp_event.PoissonSampledDpEvent(0.013, dp_event.GaussianDpEvent(0.83))
    accountant.compose(dp_event.SelfComposedDpEvent(event, 217))
    assert claim.epsilon == pytest.approx(accountant.get_epsilon(3e-6), rel=1e-3)


@subtests(
    ("name", "value"),
    [
        ("rank", -1),
        ("gamma", 0.0),
        ("gamma", math.nan),
        ("mean_decay", 1.1),
        ("covariance_decay", -0.1),
        ("lowest", 0.0),
        ("lowest", 2.0),
        ("highest", 0.5),
    ],
)
def test_what_makes_no_sense_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}\b.* must be"):
        geoclip(**{name: value})
