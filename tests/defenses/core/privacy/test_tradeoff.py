"""What a claim allows tests of membership: against closed forms, likelihood-ratio tests, other accountants."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull
from scipy.stats import norm

from leakbench.defenses.core import (
    Ledger,
    calibrate,
    full,
    poisson,
    predict,
    random_allocation,
    shuffle,
    truncated_poisson,
)
from leakbench.defenses.core.privacy import accounting, pld, tradeoff
from leakbench.defenses.core.privacy.accounting import rdp_divergences
from leakbench.defenses.core.privacy.events import Gaussian, merged
from leakbench.defenses.core.privacy.tradeoff import NOTHING_PROVED, TradeOff, of_events, of_pair
from leakbench.defenses.dp_ftrl import dp_ftrl
from leakbench.defenses.dp_sgd import dp_sgd

from ....parameters import subtests

DELTA = 1e-5
RATES = [0.0, 1e-12, 1e-6, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999, 1 - 1e-9, 1.0]


def by_pld(events, interval=1e-4):
    """The curve of the losses alone, without the closed form that helps it."""
    epsilons, deltas = pld.curve(merged(events), interval)
    return TradeOff("losses alone", epsilons=epsilons, deltas=np.minimum.accumulate(deltas))


def claimed(sigma, sampling, steps, delta=DELTA):
    return predict(dp_sgd(clip_norm=1.0, noise_multiplier=sigma), sampling=sampling, steps=steps).claim(delta)


@subtests("mu", [1e-3, 0.1, 1.0, 3.0, 30.0])
def test_a_gaussian_has_its_closed_forms(mu):
    claim = claimed(2 / mu, full(), 4)  # four steps are one Gaussian of half the noise
    for alpha in RATES:
        exact = norm.cdf(norm.isf(alpha) - mu)
        assert claim.beta_at(alpha) <= exact and claim.beta_at(alpha) == pytest.approx(exact, rel=1e-8)
        assert claim.tpr_at(alpha) >= norm.sf(norm.isf(alpha) - mu) * (1 - 1e-12)
    assert claim.advantage >= 2 * norm.cdf(mu / 2) - 1
    assert claim.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-6)
    assert claim.trade_off.auc == pytest.approx(norm.cdf(mu / math.sqrt(2)), rel=1e-6)
    assert claim.delta_at(claim.epsilon) <= DELTA * (1 + 1e-9)
    assert claim.delta_at(claim.epsilon) == pytest.approx(DELTA, rel=1e-2) or claim.epsilon == 0


@pytest.mark.parametrize(
    ("mu", "known"), [(0.5, [0.638163, 0.0047956, 0.033899]), (2.0, [0.921350, 0.137805, 0.372081])]
)
def test_losses_on_a_grid_come_to_the_closed_form_of_a_gaussian_from_above(mu, known):
    curve = by_pld([Gaussian(1.0, 1 / mu, 1)])
    for found, exact in zip([curve.auc, curve.tpr_at(0.001), curve.tpr_at(0.01)], known, strict=True):
        assert found == pytest.approx(exact, rel=2e-5)
    for alpha in RATES:
        exact = norm.sf(norm.isf(alpha) - mu)
        assert exact * (1 - 1e-12) <= curve.tpr_at(alpha) <= exact * (1 + 1e-5) + 3e-9
        assert curve.beta_at(alpha) <= norm.cdf(norm.isf(alpha) - mu)


def least_errors(rate, sigma, alphas):
    """Misses of the best test of one sampled Gaussian in either order, with tests drawn by lot between the two.

    The likelihood ratio rises in the release, so tests are thresholds; who may choose the order may also toss a coin
    for it, which makes the curve convex.
    """
    x = np.linspace(-9, 9 + 1 / sigma, 100_001)
    absent, present = norm.sf(x), (1 - rate) * norm.sf(x) + rate * norm.sf(x - 1 / sigma)
    points = np.concatenate([np.stack([absent, 1 - present], 1), np.stack([1 - present, absent], 1), [[0, 1], [1, 0]]])
    hull = ConvexHull(points)
    # Facets below: their outward normals point down. Each is a line that no test lies under.
    lines = hull.equations[hull.equations[:, 1] < -1e-12]
    values = -(lines[:, :1] * np.asarray(alphas) + lines[:, 2:]) / lines[:, 1:2]
    return values.max(axis=0)


@pytest.mark.long
@subtests(("rate", "sigma"), [(0.1, 0.5), (0.02, 1.0), (0.5, 2.0), (0.9, 0.7), (1e-3, 0.6)])
def test_one_sampled_step_is_the_likelihood_ratio_test_in_both_orders(rate, sigma):
    claim = claimed(sigma, poisson(rate), 1)
    rates = np.concatenate([RATES, np.linspace(0, 1, 51)])
    found = np.array([claim.beta_at(alpha) for alpha in rates.tolist()])
    exact = least_errors(rate, sigma, rates)
    assert (found <= exact + 1e-9).all() and found == pytest.approx(exact, abs=2e-7)
    x = np.linspace(-15, 15 + 1 / sigma, 400_001)
    gap = rate * np.abs(norm.pdf(x - 1 / sigma) - norm.pdf(x))
    assert claim.advantage == pytest.approx(float(gap.sum() * (x[1] - x[0]) / 2), rel=1e-5)


def test_no_test_of_a_simulated_run_does_better_and_the_best_does_as_well():
    rate, sigma, steps, trials = 0.3, 1.0, 6, 400_000
    claim, draw = claimed(sigma, poisson(rate), steps), np.random.default_rng(0)

    def ratios(present):
        took_part = draw.random((trials, steps)) < rate if present else 0.0
        x = draw.standard_normal((trials, steps)) * sigma + took_part
        return np.logaddexp(math.log1p(-rate), math.log(rate) + (x - 0.5) / sigma**2).sum(axis=1)

    out, inside = np.sort(ratios(False)), ratios(True)
    for fpr in (0.001, 0.01, 0.1, 0.5):
        found = float((inside > np.quantile(out, 1 - fpr)).mean())
        noise = 5 * math.sqrt(found * (1 - found) / trials + 9 * fpr / trials)
        assert found - noise <= claim.tpr_at(fpr) <= found + noise + 0.01 * found
        # Power: the pair of epsilon and delta alone allows far more.
        assert of_pair(claim.epsilon, DELTA).tpr_at(fpr) > claim.tpr_at(fpr) + noise


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(
    rate=st.floats(1e-3, 1.0),
    sigma=st.floats(0.7, 20.0),
    count=st.integers(1, 60),
    alpha=st.one_of(st.sampled_from(RATES), st.floats(0, 1)),
)
def test_every_answer_is_on_the_private_side_and_they_agree(rate, sigma, count, alpha):
    events = [Gaussian(rate, sigma, count)]
    curve = of_events(events, DELTA)
    plain = norm.cdf(norm.isf(alpha) - math.sqrt(count) / sigma)
    # Sampling helps, and a coin's toss is always there.
    assert plain * (1 - 1e-8) <= curve.beta_at(alpha) <= 1 - alpha + 1e-12
    assert curve.tpr_at(alpha) == pytest.approx(1 - curve.beta_at(alpha), abs=1e-8)
    assert alpha <= curve.tpr_at(alpha) * (1 + 1e-12) and curve.tpr_at(alpha) - alpha <= curve.advantage + 1e-8
    # Its own inverse: both orders are covered.
    if (back := curve.beta_at(alpha)) > 1e-3:  # else the curve is too steep for what float64 holds
        assert curve.beta_at(back) <= alpha + 1e-6
    # A second opinion on the same losses, by dp-accounting throughout.
    if rate < 1:
        one = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=rate, value_discretization_interval=1e-3, use_connect_dots=True
        )
        theirs = one.self_compose(count)
        for epsilon in (0.0, 0.37, 2.0):
            delta = float(theirs.get_delta_for_epsilon(epsilon))
            assert curve.delta_at(epsilon) <= delta * (1 + 1e-6) + 1e-12
            assert curve.beta_at(alpha) >= 1 - delta - math.exp(epsilon) * alpha - 1e-8


@settings(max_examples=60)
@given(epsilon=st.floats(0, 30), delta=st.floats(0, 0.9), rate=st.floats(0, 1), other=st.floats(0, 40))
def test_a_pair_alone_forbids_what_lies_below_two_lines(epsilon, delta, rate, other):
    curve = of_pair(epsilon, delta)
    exact = max(0.0, 1 - delta - math.exp(epsilon) * rate, math.exp(-epsilon) * (1 - delta - rate))
    assert exact - 3e-9 <= curve.beta_at(rate) <= exact + 1e-15
    corner = (1 - delta) / (1 + math.exp(epsilon))
    assert curve.auc == pytest.approx(1 - (1 - delta) ** 2 / (1 + math.exp(epsilon)), abs=1e-6)
    assert curve.advantage == pytest.approx(1 - 2 * corner, abs=1e-8)
    wanted = max(delta, 1 - corner - math.exp(other) * corner) if other < epsilon else delta
    assert curve.delta_at(other) == pytest.approx(wanted, abs=1e-8)


@pytest.mark.parametrize("tiny", [1e-300, 1e-15, 1e-12])
def test_a_tiny_delta_gives_no_epsilon_that_is_too_small(tiny):
    claim, plain = claimed(1.5, poisson(0.05), 200), claimed(1.5, full(), 200)
    assert claim.epsilon_at(DELTA) == claim.epsilon
    assert claim.epsilon < claim.epsilon_at(tiny) <= plain.epsilon_at(tiny)
    assert claim.trade_off.delta_at(claim.epsilon_at(tiny) * (1 + 1e-6)) <= max(tiny, 1e-11)
    sure = plain.epsilon_at(tiny)
    # log(upper tail - e^epsilon lower tail) by asymptotic series is below log(tiny) only from there on.
    mu = math.sqrt(200) / 1.5
    a, b = norm.logsf(sure / mu - mu / 2), norm.logsf(sure / mu + mu / 2) + sure
    assert a + math.log(-math.expm1(b - a)) <= math.log(tiny) + 1e-3


def test_without_a_guarantee_everything_is_allowed_and_without_a_release_nothing():
    silent = predict(dp_sgd(clip_norm=1.0, noise_multiplier=0.0), sampling=poisson(0.1), steps=3).claim(DELTA)
    assert silent.beta_at(0.0) == 0 and silent.tpr_at(0.0) == silent.tpr_at(1e-3) == silent.advantage == 1
    assert silent.delta_at(5.0) == 1 and silent.epsilon_at(0.1) == math.inf and silent.trade_off is NOTHING_PROVED
    assert silent.trade_off.auc == 1
    nobody = Ledger(full()).claim(DELTA)
    assert [nobody.tpr_at(a) for a in (0.0, 0.01, 1.0)] == pytest.approx([0.0, 0.01, 1.0])
    assert nobody.advantage == nobody.delta_at(0.0) == nobody.epsilon_at(1e-9) == 0
    assert nobody.trade_off.auc == pytest.approx(0.5)


def test_a_claim_without_its_events_answers_from_its_pair_alone():
    claim = claimed(1.5, poisson(0.05), 200)
    bare = replace(claim, gaussians=None)
    assert bare.trade_off.by == "its epsilon and delta alone" and claim.trade_off.by == "PLD, pessimistic"
    assert bare.advantage > 2 * claim.advantage and bare.tpr_at(0.01) > 2 * claim.tpr_at(0.01)
    assert bare.epsilon_at(1e-6) == math.inf and bare.epsilon_at(1e-4) <= claim.epsilon


def test_one_record_in_the_place_of_another_is_a_gaussian_of_twice_the_shift():
    claim = claimed(2.0, full(), 1)
    for alpha in (0.0, 1e-3, 0.1, 0.9):
        assert claim.beta_at(alpha, replaced=True) == pytest.approx(norm.cdf(norm.isf(alpha) - 1.0), rel=1e-7)
    sampled = claimed(1.0, poisson(0.1), 20)
    assert sampled.tpr_at(0.01, replaced=True) > 1.5 * sampled.tpr_at(0.01)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_an_epsilon_where_one_record_replaces_another_is_that_of_twice_the_shift_from_above(mu):
    claim = claimed(1 / mu, full(), 1)
    for delta in (1e-8, DELTA, 1e-2):
        exact = TradeOff("", mu=2 * mu).epsilon_at(delta)
        assert exact <= claim.epsilon_at(delta, replaced=True) <= exact + 0.0025
    # Group privacy of two gives 2 epsilon at a larger delta.
    at = (1 + math.exp(claim.epsilon)) * DELTA
    assert at >= 1 or claim.epsilon_at(at, replaced=True) <= 2 * claim.epsilon + 0.0025


@pytest.mark.long
def test_an_epsilon_where_one_record_replaces_another_holds_at_every_rate_of_a_sampled_run():
    claim = claimed(1.0, poisson(0.1), 50)
    epsilon = claim.epsilon_at(DELTA, replaced=True)
    assert claim.epsilon < epsilon < 3 * claim.epsilon
    rates = np.random.default_rng(0).uniform(-40, 0, 2000)
    short = [claim.tpr_at(a, replaced=True) - math.exp(epsilon) * a for a in np.exp(rates).tolist()]
    assert max(short) <= DELTA
    assert NOTHING_PROVED.epsilon_at(DELTA, replaced=True) == math.inf
    assert TradeOff("", mu=0.0).epsilon_at(DELTA, replaced=True) == 0
    assert of_pair(1.0, 1e-9).epsilon_at(1e-7, replaced=True) == pytest.approx(2.0, abs=0.003)


def test_several_ledgers_entries_compose():
    defense, sampling = dp_sgd(clip_norm=1.0, noise_multiplier=1.5), poisson(0.05)
    both = predict(defense, sampling=sampling, steps=100)
    alone = both.claim(DELTA)
    both.entries += predict(dp_sgd(clip_norm=1.0, noise_multiplier=4.0), sampling=full(), steps=1).entries
    together = both.claim(DELTA)
    assert together.tpr_at(0.01) > alone.tpr_at(0.01) and together.advantage > alone.advantage
    # As revealing as both, and no more than a release of the one after the other.
    assert together.advantage <= alone.advantage + (2 * norm.cdf(0.125) - 1)


@pytest.mark.parametrize("make", [dp_sgd, dp_ftrl], ids=lambda make: make.__name__)
def test_a_step_that_is_known_to_have_the_record_is_not_amplified_and_the_others_are_as_they_were(make):
    sampling = poisson(0.1)
    ledger = predict(make(clip_norm=1.0, noise_multiplier=2.0), sampling=sampling, steps=10)
    known, whole = ledger.knowing(9).claim(DELTA), ledger.claim(DELTA)
    plain = norm.sf(norm.isf(0.01) - math.sqrt(10) / 2)
    assert norm.sf(norm.isf(0.01) - 0.5) < known.tpr_at(0.01) and whole.tpr_at(0.01) <= known.tpr_at(0.01)
    if make is dp_sgd:
        assert known.gaussians is not None and sorted((g.sample_rate, g.count) for g in known.gaussians) == [
            (0.1, 9), (1.0, 1)
        ]  # fmt: skip
        assert whole.tpr_at(0.01) < known.tpr_at(0.01) < plain
        assert ledger.knowing(4).claim(DELTA).epsilon == known.epsilon
    # What no sampling amplifies is known already.
    fixed = predict(dp_sgd(clip_norm=1.0, noise_multiplier=2.0), sampling=shuffle(0.1), steps=10)
    assert fixed.knowing(9).entries == fixed.entries


@pytest.mark.parametrize(("sigma", "count"), [(20.0, 100), (2.0, 100), (10.0, 5000)])
def test_transforms_lose_nothing_that_would_make_a_bound_too_small(sigma, count):
    # As good as not sampled, and so in closed form; but composed by transforms.
    curve, mu = by_pld([Gaussian(1 - 1e-13, sigma, count)]), math.sqrt(count) / sigma
    for alpha in (10.0 ** np.arange(-18, 0, 0.5)).tolist():
        assert curve.tpr_at(alpha) >= norm.sf(norm.isf(alpha) - mu) * (1 - 1e-9)
        assert curve.beta_at(alpha) <= norm.cdf(norm.isf(alpha) - mu) * (1 + 1e-9)
    assert curve.auc == pytest.approx(norm.cdf(mu / math.sqrt(2)), abs=1e-6)
    assert curve.tpr_at(1e-9) == pytest.approx(norm.sf(norm.isf(1e-9) - mu), rel=1e-3)


@pytest.mark.parametrize(
    "sampling",
    [
        shuffle(0.1),
        random_allocation(0.1),
        pytest.param(truncated_poisson(0.1, most=6, examples=30), marks=pytest.mark.slow),
    ],
    ids=lambda s: s.kind,
)
def test_other_samplers_answer_from_their_own_losses(sampling):
    claim = claimed(1.2, sampling, 10 if sampling.kind != "truncated_poisson" else 1)
    one = norm.sf(norm.isf(0.01) - 1 / 1.2)
    # Who takes part once at most is at most as exposed as by one Gaussian, and amplification helps.
    assert 0.01 < claim.tpr_at(0.01) <= one * (1 + 1e-8)
    assert claim.delta_at(claim.epsilon) == pytest.approx(DELTA, rel=0.02)
    if sampling.kind == "random_allocation":
        assert claim.tpr_at(0.01) < 0.5 * one


def test_where_losses_take_too_long_the_answer_is_by_rdp_and_says_so(monkeypatch):
    monkeypatch.setattr(accounting, "_QUICK_EVENTS", 1)
    events = [Gaussian(0.05, 1.5 + i / 10, 20) for i in range(3)]
    exact = by_pld(events)
    monkeypatch.setattr(accounting, "pld_in_time", lambda *_: None)
    loose = of_events(events, 1.01e-5)  # another delta: no answer that was kept
    assert loose.by.startswith("RDP")
    for alpha in RATES:
        assert loose.beta_at(alpha) <= exact.beta_at(alpha) + 1e-9
    assert exact.tpr_at(0.01) < loose.tpr_at(0.01) < 2 * exact.tpr_at(0.01)
    assert exact.advantage < loose.advantage < 2.5 * exact.advantage
    epsilons, deltas = accounting.SOME_EPSILONS, rdp_divergences(merged(events))
    tight = np.array([exact.delta_at(epsilon) for epsilon in epsilons[:120]])
    assert (deltas[:120] >= tight - 1e-12).all()


@pytest.mark.long
def test_a_list_of_many_events_is_answered_by_a_process_of_its_own(monkeypatch):
    events = [Gaussian(0.05, 1.5 + i / 10, 20) for i in range(3)]
    exact = by_pld(events)
    monkeypatch.setattr(accounting, "_QUICK_EVENTS", 1)
    slow = of_events(events, 1.02e-5)
    assert slow.by.startswith("PLD")
    assert exact.tpr_at(0.01) - 1e-9 <= slow.tpr_at(0.01) <= exact.tpr_at(0.01) * 1.01
    assert slow.advantage == pytest.approx(exact.advantage, rel=1e-5)


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (poisson(0.05), {"advantage": 0.2}),
        (full(), {"tpr": 0.05, "fpr": 0.01}),
        pytest.param(poisson(0.05), {"tpr": 0.05, "fpr": 0.01}, marks=pytest.mark.slow),
        pytest.param(full(), {"advantage": 0.2}, marks=pytest.mark.slow),
    ],
)
def test_noise_is_found_for_an_advantage_and_for_a_true_positive_rate(wanted, sampling):
    made = calibrate(dp_sgd(clip_norm=1.0), sampling=sampling, steps=50, **wanted)
    assert made.noise_multiplier is not None

    def reached(factor):
        claim = claimed(made.noise_multiplier * factor, sampling, 50)
        return claim.advantage if "advantage" in wanted else claim.tpr_at(wanted["fpr"])

    limit = wanted.get("advantage", wanted.get("tpr"))
    assert reached(1.0) <= limit < reached(1 - 3e-3)


@subtests(
    ("wanted", "words"),
    [
        ({}, "one thing must be wanted"),
        ({"epsilon": 1.0}, "one thing must be wanted"),
        ({"epsilon": 1.0, "delta": DELTA, "advantage": 0.1}, "one thing must be wanted"),
        ({"tpr": 0.1}, "a limit must be an advantage, or tpr and fpr"),
        ({"advantage": 1.0}, r"advantage must be in \(0, 1\), got 1.0"),
        ({"tpr": 0.01, "fpr": 0.01}, "coins have a tpr of fpr"),
        ({"advantage": math.nan}, r"advantage must be in \(0, 1\), got nan"),
    ],
)
def test_what_cannot_be_wanted_is_refused(wanted, words):
    with pytest.raises(ValueError, match=words):
        calibrate(dp_sgd(clip_norm=1.0), sampling=poisson(0.1), steps=10, **wanted)


@subtests("ask", [lambda c: c.beta_at(1.5), lambda c: c.tpr_at(math.nan), lambda c: c.beta_at(-1e-9)])
def test_an_error_rate_that_is_none_is_refused(ask):
    with pytest.raises(ValueError, match=r"an error rate must be in \[0, 1\]"):
        ask(claimed(1.0, full(), 1))


def test_an_epsilon_below_0_and_a_delta_that_is_none_are_refused():
    claim = claimed(1.0, full(), 1)
    with pytest.raises(ValueError, match="epsilon must be at least 0, got -1"):
        claim.delta_at(-1.0)
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got 0"):
        claim.epsilon_at(0.0)
    with pytest.raises(ValueError, match="epsilons must rise"):
        TradeOff("", epsilons=np.array([1.0, 1.0]), deltas=np.array([0.1, 0.1]))
    assert tradeoff.of_pair(math.inf, DELTA) is NOTHING_PROVED


@pytest.mark.peers
def test_opacus_accountant_agrees_on_epsilon_and_delta():
    prv = pytest.importorskip("opacus.accountants")
    accountant = prv.PRVAccountant()
    accountant.history = [(1.2, 0.02, 500)]
    claim = claimed(1.2, poisson(0.02), 500)
    for delta in (1e-3, 1e-5, 1e-7):
        theirs = accountant.get_epsilon(delta, eps_error=0.01)
        assert claim.epsilon_at(delta) == pytest.approx(theirs, abs=0.03)
        assert claim.delta_at(theirs) <= delta * 1.01


def test_nobody_is_bounded_below_coins_at_the_smallest_numbers():
    curve = of_events([Gaussian(1.0, 1e9, 1)], 1e-5)
    assert all(curve.tpr_at(fpr) >= fpr for fpr in (5e-324, 1e-320, 1e-311, 1e-300, 0.5, 1 - 2**-53))


@subtests(("rate", "sigma"), [(1e-12, 50.0), (1e-12, 1.0), (1e-9, 1.0), (1e-6, 5.0), (1e-3, 0.3)])
def test_one_rare_step_is_not_below_its_closed_form_by_a_single_digit(rate, sigma):
    # (1 - q) N(0) + q N(1) against N(0): q times their distance. A grid's differences lose the last digits of it.
    exact = rate * math.erf(1 / (sigma * math.sqrt(8)))
    found = of_events([Gaussian(rate, sigma, 1)], DELTA)
    assert exact <= found.advantage <= exact * 1.001 + 2e-15
    assert found.auc >= 0.5 + 0.5 * exact * (1 - exact)


def test_far_out_a_delta_is_by_rdp_and_no_floor_of_transforms():
    events = [Gaussian(0.01, 1.0, 3000)]
    curve, epsilons = of_events(events, DELTA), np.array([0.0, 0.5, 3.0, 8.0, 15.0, 100.0, 400.0])
    found = [curve.delta_at(epsilon) for epsilon in epsilons]
    by_rdp = rdp_divergences(merged(events), epsilons)
    # Beyond PLD's grid between some epsilons, and there by chords.
    assert (np.diff(found) <= 0).all() and (found <= by_rdp * 3).all() and found[-1] > 0
    assert found[1] < 0.5 * by_rdp[1] and found[4] < 1e-30  # PLD where it is tight, and 6e-12 no more where it is not
    # Not below the truth of a single one of these steps, in closed form.
    one = Gaussian(0.01, 1.0, 1)
    threshold = math.log((math.exp(15) - 0.99) / 0.01) + 0.5
    tails = [0.5 * math.erfc((threshold - shift) / math.sqrt(2)) for shift in (0.0, 1.0)]
    exact = 0.99 * tails[0] + 0.01 * tails[1] - math.exp(15) * tails[0]
    assert 0 < exact <= min(of_events([one], DELTA).delta_at(15.0), found[4])


def test_who_takes_part_in_nothing_is_seen_by_no_test():
    # Almost without noise, whoever takes part is seen: the bound is reached.
    rate, steps = 1e-3, 10
    seen = 1 - (1 - rate) ** steps
    curve = of_events([Gaussian(rate, 1e-4, steps)], DELTA)
    assert curve.by.startswith("RDP")  # too large a loss for a grid
    assert seen <= curve.advantage <= seen * (1 + 1e-6)
    assert curve.delta_at(50.0) <= seen * (1 + 1e-6) and curve.epsilon_at(0.01) == 0.0
    assert curve.tpr_at(0.0) == 0.0 and seen <= curve.tpr_at(1e-300) <= seen * (1 + 1e-6)
    # Two groups of steps, and one that everybody takes part in.
    both = of_events([Gaussian(rate, 1e-4, steps), Gaussian(2e-3, 1e-4, 5)], DELTA)
    assert both.advantage == pytest.approx(1 - (1 - rate) ** steps * (1 - 2e-3) ** 5, rel=1e-6)
    assert of_events([Gaussian(rate, 1e-4, steps), Gaussian(1.0, 1e-4, 1)], DELTA).advantage == 1.0
    assert Gaussian(0.1, 1.0, 3, allocated=True).participation == 1.0


@pytest.mark.parametrize(("mu", "delta"), [(30.0, 1e-5), (100.0, 0.1), (5.0, 1e-200)])
def test_one_record_in_the_place_of_another_has_an_epsilon_where_rates_are_too_small_for_floats(mu, delta):
    found = of_events([Gaussian(1.0, 1 / mu, 1)], DELTA).epsilon_at(delta, replaced=True)
    exact = accounting.gaussian_epsilon(1 / (2 * mu), delta)  # rounded up by 1e-6
    assert exact * (1 - 2e-6) <= found <= exact * (1 + 1e-6)
