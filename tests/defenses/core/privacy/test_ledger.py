"""What is charged, to which relation, and the way back from an epsilon to the noise."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from leakbench.defenses.clipped_sgd import clipped_sgd
from leakbench.defenses.core import (
    Block,
    Context,
    Defense,
    Engine,
    Everything,
    Ledger,
    Stateless,
    StepPlan,
    calibrate,
    clip,
    fixed,
    full,
    partition,
    poisson,
    predict,
    random_allocation,
    seeded,
    shuffle,
    train,
    truncated_poisson,
    unbounded,
)
from leakbench.defenses.core.gradients.executor import add_noise
from leakbench.defenses.core.plan.noise_correlation import StrategyRow, Tree
from leakbench.defenses.core.privacy.accounting import epsilon, gaussian_epsilon
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.core.privacy.ledger import Entry
from leakbench.defenses.core.randomness.discrete_gaussian import probabilities
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.noisy_sgd import noisy_sgd
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.sgd import sgd

from ....parameters import subtests
from ... import duties

DELTA = 1e-5
PLAN = StepPlan(Block(codec=Everything(4), bound=clip(1.0)))
LOOSE = StepPlan(Block(codec=Everything(4), bound=unbounded()))


def filled(sampling, steps, sigma=1.54):
    ledger = Ledger(sampling)
    for step in range(steps):
        ledger.record(PLAN.at(sigma), step=step)
    return ledger


def test_the_headline_run_costs_what_it_should_under_every_sampler():
    (steps,) = predict(dp_sgd(noise_multiplier=1.54), sampling=SAMPLERS[0], steps=2000).entries
    claims = {s.kind: Ledger(s, [replace(steps, sampling=s)]).claim(DELTA) for s in SAMPLERS}
    assert claims["poisson"].epsilon == pytest.approx(2.75, abs=0.006)
    assert claims["poisson"].epsilon_rdp == pytest.approx(3.00, abs=0.006)
    for kind in ("partition", "shuffle"):
        assert claims[kind].epsilon == pytest.approx(25.3, abs=0.05)
        assert claims[kind].relation == "zero_out"
    for kind in ("partition", "shuffle"):
        assert claims[kind].as_if_poisson == claims["poisson"].epsilon
    assert claims["poisson"].as_if_poisson is None
    assert claims["poisson"].relation == "add_remove"
    assert claims["poisson"].unit == "example"
    assert claims["poisson"].sample_rate == 0.02


SAMPLERS = (poisson(0.02), partition(0.02), shuffle(0.02))


def test_subsets_of_fixed_size_are_amplified_where_one_record_replaces_another():
    few = predict(dp_sgd(noise_multiplier=20.0), sampling=fixed(0.02), steps=100).claim(DELTA)
    everybody = predict(dp_sgd(noise_multiplier=20.0), sampling=full(), steps=100).claim(DELTA)
    assert everybody.epsilon == epsilon([Gaussian(1.0, 2.0, 1)], DELTA).value
    assert few.gaussians == (Gaussian(0.02, 10.0, 100, replaced=True),)  # over twice the bound
    assert (few.relation, everybody.relation) == ("replace_one", "add_remove")
    assert few.epsilon < everybody.epsilon / 10
    assert few.as_if_poisson is not None
    assert few.as_if_poisson < few.epsilon
    assert everybody.as_if_poisson is None


def test_everything_that_is_released_beside_subsets_of_fixed_size_is_charged_for_a_replacement():
    ledger = filled(fixed(0.1), 3)
    ledger.record(PLAN.at(8.0), step=0, one_off=True)
    ledger.record(PLAN.at(5.0), step=0, sampling=poisson(0.2), trial=True)
    claim = ledger.claim(DELTA)
    assert claim.relation == "replace_one"
    assert claim.gaussians == (
        Gaussian(0.1, 0.77, 3, replaced=True),
        Gaussian(1.0, 4.0, 1),
        Gaussian(0.2, 2.5, 1, replaced=True),
    )
    # What holds for one of them alone holds for no more than it did.
    one_offs = replace(ledger, entries=[entry for entry in ledger.entries if entry.one_off]).claim(DELTA)
    assert one_offs.epsilon == gaussian_epsilon(4.0, DELTA)
    assert one_offs.relation == "replace_one"
    assert claim.epsilon_at(DELTA, replaced=True) == claim.epsilon_at(DELTA) == claim.epsilon
    assert claim.tpr_at(0.01, replaced=True) == claim.tpr_at(0.01)
    assert claim.beta_at(0.01, replaced=True) == claim.beta_at(0.01)


def test_whoever_knows_a_subset_of_fixed_size_is_protected_by_its_noise_alone():
    known = filled(fixed(0.1), 3).knowing(1).claim(DELTA)
    assert known.relation == "replace_one"
    assert sorted(known.gaussians or ()) == [Gaussian(0.1, 0.77, 1, replaced=True)] * 2 + [Gaussian(1.0, 0.77, 1)]


def test_samples_that_replacement_is_not_known_to_amplify_are_charged_in_full():
    for sampling in (random_allocation(0.1), truncated_poisson(0.1, most=9, examples=60), partition(0.1)):
        ledger = Ledger(fixed(0.1))
        ledger.record(PLAN.at(2.0), step=0, sampling=sampling)
        assert ledger.claim(DELTA).gaussians == (Gaussian(1.0, 1.0, 1),)


@pytest.mark.parametrize("build", [dpdr, random_sparsification])
def test_every_bounded_method_costs_what_dp_sgd_costs(build):
    theirs = predict(dp_sgd(noise_multiplier=1.54), sampling=poisson(0.1), steps=50)
    ours = predict(build(noise_multiplier=1.54), sampling=poisson(0.1), steps=50)
    assert ours.entries == theirs.entries
    assert ours.claim(DELTA) == theirs.claim(DELTA)


def test_neighbouring_steps_of_one_price_are_one_entry():
    ledger = filled(poisson(0.1), 5)
    assert [(e.first, e.steps, e.noise_multiplier) for e in ledger.entries] == [(0, 5, 1.54)]
    ledger.record(PLAN.at(2.0), step=5)
    ledger.record(PLAN.at(1.54), step=6)
    assert [(e.first, e.steps) for e in ledger.entries] == [(0, 5), (5, 1), (6, 1)]
    assert ledger.steps == 7
    ledger.record(PLAN.at(1.54), step=9)  # not the next step: epochs are counted from an entry's first
    assert [(e.first, e.steps) for e in ledger.entries][2:] == [(6, 1), (9, 1)]


def test_no_epoch_of_a_partition_is_forgotten_or_charged_twice():
    # 25 steps of ten an epoch: three epochs, the last one begun.
    for steps, epochs in ((1, 1), (10, 1), (11, 2), (25, 3)):
        expected = epsilon([Gaussian(1.0, 1.54, epochs)], DELTA).value
        assert filled(partition(0.1), steps).claim(DELTA).epsilon == expected


def test_an_epoch_of_a_partition_costs_its_cheapest_protection():
    ledger = Ledger(partition(0.25))
    for step, sigma in enumerate([3.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]):
        ledger.record(PLAN.at(sigma), step=step)
    expected = epsilon([Gaussian(1.0, 1.0, 1), Gaussian(1.0, 3.0, 1)], DELTA).value
    assert ledger.claim(DELTA).epsilon == expected


def test_a_release_on_all_data_is_charged_beside_the_steps():
    ledger = Ledger(poisson(0.1))
    ledger.record(PLAN.at(8.0), step=0, sampling=full())
    for step in range(3):
        ledger.record(PLAN.at(1.54), step=step)
    expected = epsilon([Gaussian(1.0, 8.0, 1), Gaussian(0.1, 1.54, 3)], DELTA).value
    assert ledger.claim(DELTA).epsilon == expected
    assert ledger.claim(DELTA).relation == "add_remove"


def test_two_samplers_with_epochs_of_their_own_are_charged_both():
    ledger = Ledger(partition(0.5))
    ledger.record(PLAN.at(1.0), step=0)
    ledger.record(PLAN.at(1.0), step=1, sampling=shuffle(0.25))
    assert ledger.claim(DELTA).epsilon == epsilon([Gaussian(1.0, 1.0, 2)], DELTA).value


def test_the_relation_of_two_samplers_is_the_one_that_holds_for_both():
    ledger = filled(poisson(0.5), 2)
    ledger.record(PLAN.at(1.0), step=2, sampling=fixed(0.5))
    assert ledger.claim(DELTA).relation == "replace_one"
    ledger = filled(poisson(0.5), 2)
    ledger.record(PLAN.at(1.0), step=2, sampling=partition(0.5))
    assert ledger.claim(DELTA).relation == "zero_out"


def test_one_unbounded_or_noiseless_step_voids_the_claim():
    for plan, sigma, reason in (
        (LOOSE, 1.0, "one example's contribution is not bounded"),
        (PLAN, 0.0, "no noise is added"),
    ):
        ledger = filled(poisson(0.1), 9)
        ledger.record(plan.at(sigma), step=9)
        proved = ledger.claim(DELTA)
        assert proved.epsilon == proved.epsilon_rdp == math.inf
        assert proved.reason == reason
        assert proved.as_if_poisson is None
        assert any(f"no guarantee ({reason})" in words for words in proved.events)


@pytest.mark.parametrize("build", [sgd(), clipped_sgd(clip_norm=1.0), noisy_sgd(noise_multiplier=1.54)])
def test_what_proves_nothing_says_why(build):
    proved = predict(build, sampling=poisson(0.02), steps=20).claim(DELTA)
    assert proved.epsilon == math.inf
    assert proved.reason


def test_events_are_told_in_words():
    assert filled(poisson(0.02), 3).claim(DELTA).events == (
        "3 x Gaussian, noise 1.54 on a Poisson sample of rate 0.02",
    )
    assert "each record at most once in 50 steps" in filled(partition(0.02), 3).claim(DELTA).events[0]
    assert "drawn without replacement, 0.02 of the records" in filled(fixed(0.02), 3).claim(DELTA).events[0]


def test_shares_that_sum_to_one_up_to_rounding_keep_one_price():
    blocks = [Block(codec=Everything(2), bound=clip(float(i + 1)), share=0.1) for i in range(10)]
    ledger = Ledger(poisson(0.1))
    ledger.record(StepPlan(*blocks).at(1.3), step=0)
    ledger.record(PLAN.at(1.3), step=1)
    assert [(e.steps, e.noise_multiplier) for e in ledger.entries] == [(2, 1.3)]


class LooseLater(Stateless):
    """Drops its bound after some steps."""

    def plan(self, context):
        bound = clip(1.0) if context.step < 5 else unbounded()
        return StepPlan(Block(codec=Everything(context.dim), bound=bound))


def test_a_prediction_sees_a_bound_that_is_dropped_on_the_way():
    assert predict(Defense(LooseLater(), 1.0), sampling=poisson(0.1), steps=5).claim(DELTA).reason == ""
    assert predict(Defense(LooseLater(), 1.0), sampling=poisson(0.1), steps=6).claim(DELTA).epsilon == math.inf
    with pytest.raises(ValueError, match="'loose_later' proves no epsilon at any noise multiplier"):
        calibrate(Defense(LooseLater()), epsilon=3.0, delta=DELTA, sampling=poisson(0.1), steps=6)


def test_a_prediction_counts_steps_that_it_did_not_run():
    ledger = predict(dp_sgd(noise_multiplier=1.0), sampling=poisson(0.1), steps=2_345)
    assert ledger.steps == 2_345
    assert len(ledger.entries) == 1


def test_a_prediction_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    predict(dpdr(noise_multiplier=1.0), sampling=poisson(0.1), steps=5)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("target", "sampling", "steps"),
    [
        (3.0, poisson(0.1), 30),
        (0.1, poisson(0.1), 100),
        (8.0, full(), 5),
        pytest.param(3.0, poisson(0.02), 2000, marks=pytest.mark.slow),
        pytest.param(8.0, poisson(0.05), 500, marks=pytest.mark.slow),
        (3.0, partition(0.1), 40),
        (1.0, full(), 10),
        (1.0, fixed(0.5), 10),
        (3.0, fixed(0.01), 500),
    ],
)
def test_calibration_hits_its_target_from_the_private_side(target, sampling, steps):
    calibrated = calibrate(dp_sgd(clip_norm=0.7), epsilon=target, delta=DELTA, sampling=sampling, steps=steps)
    reached = predict(calibrated, sampling=sampling, steps=steps).claim(DELTA).epsilon
    assert target * (1 - 2e-3) <= reached <= target
    assert calibrated.method == dp_sgd(clip_norm=0.7).method


def test_calibration_replaces_the_noise_and_nothing_else():
    old = dpdr(noise_multiplier=99.0, share=0.1)
    new = calibrate(old, epsilon=3.0, delta=DELTA, sampling=poisson(0.1), steps=30)
    assert (new.method, new.name) == (old.method, old.name)
    assert old.noise_multiplier == 99.0
    plain = calibrate(dp_sgd(), epsilon=3.0, delta=DELTA, sampling=poisson(0.1), steps=30)
    assert new.noise_multiplier == plain.noise_multiplier


@subtests(
    ("defense", "message"),
    [
        (sgd(), "'sgd' proves no epsilon"),
        (clipped_sgd(clip_norm=1.0), "'clipped_sgd' proves no epsilon: it adds no noise"),
        (noisy_sgd(), "'noisy_sgd' proves no epsilon at any noise multiplier: one example's contribution"),
    ],
)
def test_what_proves_nothing_cannot_be_calibrated(defense, message):
    with pytest.raises(ValueError, match=message):
        calibrate(defense, epsilon=3.0, delta=DELTA, sampling=poisson(0.02), steps=10)


@subtests("target", [0.0, -1.0, math.inf, math.nan])
def test_an_epsilon_that_is_none_is_refused(target):
    with pytest.raises(ValueError, match="epsilon must be a positive finite number, got"):
        calibrate(dp_sgd(), epsilon=target, delta=DELTA, sampling=poisson(0.02), steps=10)


def test_runs_without_steps_and_uncalibrated_defenses_predict_nothing():
    with pytest.raises(ValueError, match="steps must be from 1 to 1000000 for a prediction, got 0"):
        predict(dp_sgd(noise_multiplier=1.0), sampling=poisson(0.1), steps=0)
    with pytest.raises(ValueError, match="noise_multiplier of 'dp_sgd' must be set"):
        predict(dp_sgd(), sampling=poisson(0.1), steps=1)
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got 2\.0"):
        predict(dp_sgd(noise_multiplier=1.0), sampling=poisson(0.1), steps=1).claim(2.0)


class WithStart:
    """Releases something once before training, as pre-pruning does."""

    def __init__(self, own: float) -> None:
        self.own = own

    def start(self, context: Context) -> object:
        (noisy,) = context.release(StepPlan(Block(codec=Everything(context.dim), bound=clip(1.0))).at(self.own))
        return noisy

    def plan(self, state: object, context: Context) -> tuple[object, StepPlan]:
        return state, StepPlan(Block(codec=Everything(context.dim), bound=clip(1.0)))

    def observe(self, state: object, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> object:
        return state


def test_a_release_of_its_own_is_charged_on_all_the_data_and_is_no_step():
    defense = Defense(WithStart(own=4.0), noise_multiplier=1.5)
    ledger = predict(defense, sampling=poisson(0.1), steps=20)
    assert ledger.steps == 20 and [entry.one_off for entry in ledger.entries] == [True, False]
    alone = epsilon([Gaussian(1.0, 4.0, 1), Gaussian(0.1, 1.5, 20)], DELTA)
    assert ledger.claim(DELTA).epsilon == pytest.approx(alone.value)
    run = train(duties.network(), duties.DATA, defense, sampling=poisson(0.1), steps=20, noise=seeded(0))
    assert run.ledger.entries == ledger.entries


NO_MULTIPLIERS = [-1.0, math.nan, math.inf, -math.inf, 1e-200, 1e-7, 1e10]
no_multiplier = pytest.mark.parametrize("sigma", NO_MULTIPLIERS)


@no_multiplier
def test_a_multiplier_that_draws_no_noise_is_never_charged_as_if_it_did(sigma):
    """Whatever takes a multiplier takes 0, for which nothing is proved, or a number of a size that is really drawn."""
    plan = StepPlan(Block(codec=Everything(4), bound=clip(1.0)))
    message = r"noise_multiplier must be 0 for no noise, or in \[1e-06, 1e\+09\], got"
    ledger = Ledger(full())
    with pytest.raises(ValueError, match=message):
        ledger.record(plan.at(sigma), step=0)
    assert ledger.entries == []
    with pytest.raises(ValueError, match=message):
        dp_sgd(noise_multiplier=sigma)
    with pytest.raises(ValueError, match=message):
        plan.blocks[0].noise_std(sigma)
    with pytest.raises(ValueError, match=message):
        add_noise(plan.at(sigma), [torch.zeros(4, dtype=torch.float64)], seeded(0), torch.float32)
    with pytest.raises(ValueError, match=message):
        Engine(duties.network(), noise=seeded(0)).run(plan.at(sigma), *duties.DATA)
    with pytest.raises(ValueError, match=message):
        predict(Defense(WithStart(own=sigma), 1.0), sampling=poisson(0.1), steps=2)
    with pytest.raises(ValueError, match=message):
        train(duties.network(), duties.DATA, Defense(WithStart(own=sigma), 1.0), sampling=poisson(0.1), steps=2)
    with pytest.raises(ValueError, match=message):
        Entry(0, 1, sigma, full())


def test_no_noise_at_all_proves_nothing_wherever_it_is_asked_for():
    plan = StepPlan(Block(codec=Everything(4), bound=clip(1.0)))
    for zero in (0, 0.0, -0.0):
        ledger = Ledger(full())
        ledger.record(plan.at(zero), step=0)
        assert ledger.claim(DELTA).epsilon == math.inf
    with pytest.raises(ValueError, match="an event without noise must have no noise multiplier"):
        Entry(0, 1, 0.0, full())


def test_exact_noise_is_an_event_of_its_own_and_costs_no_less():
    plan = StepPlan(Block(codec=Everything(4), bound=clip(1.0)))
    claims = []
    for exact in (False, True):
        ledger = Ledger(poisson(0.1))
        for step in range(50):
            ledger.record(plan.at(1.3), step=step, exact=exact)
        claims.append(ledger.claim(DELTA))
    assert claims[0].events[0].startswith("50 x Gaussian, noise 1.3")
    assert claims[1].events[0].startswith("50 x discrete Gaussian, noise 1.3")
    # The accountant itself moves by more than the 1e-12 that separates the two.
    assert claims[0].epsilon * (1 - 1e-9) <= claims[1].epsilon <= claims[0].epsilon * (1 + 1e-9)
    alone = [Ledger(full()), Ledger(full())]
    for ledger, exact in zip(alone, (False, True), strict=True):
        ledger.record(plan.at(1.3), step=0, exact=exact)
    assert alone[0].claim(DELTA).epsilon < alone[1].claim(DELTA).epsilon


@pytest.mark.parametrize(("scale", "shift"), [(4.0, 3), (10.0, 17), (31.0, 20)])
def test_one_dimension_of_discrete_gaussian_noise_costs_no_more_than_is_charged(scale, shift):
    # On a grid so coarse that everything can be added up, with the 8 that the ledger's lemma takes off the variance.
    integers = np.arange(-400, 400)
    out, joined = probabilities(integers, scale), probabilities(integers - shift, scale)
    charged = gaussian_epsilon(math.sqrt(scale**2 - 8) / shift, DELTA)
    spent = float(np.maximum(joined - math.exp(charged) * out, 0).sum())
    assert spent <= DELTA
    same = gaussian_epsilon(scale / shift, DELTA)  # on a finer grid the two are one
    assert float(np.maximum(joined - math.exp(same * 0.97) * out, 0).sum()) > DELTA


@pytest.mark.long
@subtests("delta", [1e-12, 1e-5])
@subtests("epsilon_", [1e-3, 0.01, 3.0, 300.0, 1000.0])
@subtests("sampling", [full(), shuffle(0.1), partition(0.1)])
def test_without_amplification_any_epsilon_is_calibrated_at_once(sampling, epsilon_, delta):
    steps = 20
    found = calibrate(dp_sgd(), epsilon=epsilon_, delta=delta, sampling=sampling, steps=steps)
    claim = predict(found, sampling=sampling, steps=steps).claim(delta)
    assert epsilon_ * (1 - 1e-4) - 2e-9 <= claim.epsilon <= epsilon_
    assert "closed form" in claim.accountant


@pytest.mark.parametrize(("epsilon_", "delta"), [(1e-8, 1e-5), (1e-9, 1e-5), (1e-10, 1e-6), (1e-5, 1e-12)])
def test_an_epsilon_below_what_rounding_up_adds_is_calibrated_at_once(epsilon_, delta):
    found = calibrate(dp_sgd(), epsilon=epsilon_, delta=delta, sampling=full(), steps=1)
    assert predict(found, sampling=full(), steps=1).claim(delta).epsilon <= epsilon_
    # About where delta is all that two Gaussians differ by, 0.4 / sigma.
    assert found.noise_multiplier is not None
    assert found.noise_multiplier * delta < 1.01 / math.sqrt(2 * math.pi)


@pytest.mark.parametrize(("epsilon_", "delta"), [(0.01, 1e-12), (300.0, 1e-5)])
def test_with_amplification_small_and_large_epsilons_are_calibrated_too(epsilon_, delta):
    found = calibrate(dp_sgd(), epsilon=epsilon_, delta=delta, sampling=poisson(0.3), steps=2)
    claim = predict(found, sampling=poisson(0.3), steps=2).claim(delta)
    assert 0.9 * epsilon_ <= claim.epsilon <= epsilon_


def test_calibration_leaves_a_release_of_its_own_as_it_is():
    found = calibrate(Defense(WithStart(own=4.0)), epsilon=3.0, delta=DELTA, sampling=poisson(0.1), steps=20)
    claimed = predict(found, sampling=poisson(0.1), steps=20).claim(DELTA).epsilon
    assert 2.98 < claimed <= 3.0
    with pytest.raises(ValueError, match=r"epsilon must be above .*, which releases of their own spend"):
        calibrate(Defense(WithStart(own=0.5)), epsilon=3.0, delta=DELTA, sampling=poisson(0.1), steps=20)


@pytest.mark.long
def test_a_release_of_its_own_whose_noise_follows_the_defenses_cannot_be_calibrated():
    """It would be charged what it costs at noise multiplier 1: 8.4 where 8 was wanted."""

    class Following(WithStart):
        def start(self, context: Context) -> object:
            self.own = 2 * context.noise_multiplier
            return super().start(context)

    with pytest.raises(ValueError, match=r"of 'following' must keep their noise .*, got \[2\.0\] at 1 and \[1\.33"):
        calibrate(Defense(Following(1.0)), epsilon=8.0, delta=DELTA, sampling=poisson(0.02), steps=500)


class LooseMuchLater(Stateless):
    def plan(self, context: Context) -> StepPlan:
        bound = clip(1.0) if context.step < 2500 else unbounded()
        return StepPlan(Block(codec=Everything(context.dim), bound=bound))


def test_a_prediction_looks_at_every_step():
    claim = predict(Defense(LooseMuchLater(), noise_multiplier=1.0), sampling=poisson(0.01), steps=3000).claim(DELTA)
    assert claim.epsilon == math.inf and "not bounded" in claim.reason
    with pytest.raises(ValueError, match="steps must be from 1 to 1000000 for a prediction, got 1000001"):
        predict(dp_sgd(noise_multiplier=1.0), sampling=poisson(0.01), steps=1_000_001)


def in_stream(position, length=8):
    return StepPlan(Block(codec=Everything(4), bound=clip(1.0)), correlated=StrategyRow(Tree(length), position)).at(1.0)


def test_a_stream_of_correlated_noise_is_not_charged_in_parts_that_share_noise():
    # One step with noise of its own between two of a stream: as two streams they would be charged as if they had
    # nothing in common, with 1 + 1 in place of what the tree's columns share.
    ledger = Ledger(full())
    ledger.record(in_stream(0), step=0)
    ledger.record(PLAN.at(1.0), step=1)
    with pytest.raises(ValueError, match=r"step 2, at position 1 .* must follow .*, and step 1 is none of it"):
        ledger.record(in_stream(1), step=2)
    ledger.record(in_stream(0), step=2)  # a stream that begins anew shares nothing
    with pytest.raises(ValueError, match=r"step 3, at position 1 .* must follow"):
        ledger.record(in_stream(1, length=4), step=3)
    ledger.record(in_stream(1), step=3)


def test_a_release_of_its_own_takes_no_place_in_a_stream():
    ledger = Ledger(full())
    for trial in (False, True):
        with pytest.raises(ValueError, match="must have independent noise, got correlated noise"):
            ledger.record(in_stream(0), step=0, one_off=not trial, trial=trial)
    assert not ledger.entries
