"""What is particular to adaptive clipping: what the count costs, and where the clip norm goes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leakbench.defenses.adaptive_clipping import adaptive_clipping
from leakbench.defenses.core import (
    Block,
    Context,
    Coordinates,
    Defense,
    Stateless,
    StepPlan,
    ToyRows,
    adapted,
    clip,
    partition,
    predict,
    release,
)
from leakbench.defenses.de_recipe import de_recipe
from leakbench.defenses.dp_adam_bc import dp_adam_bc
from leakbench.defenses.dp_ftrl import dp_ftrl
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.geoclip import geoclip
from leakbench.defenses.gep import gep
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.sgd import sgd

from ..parameters import subtests
from . import duties


class First(Stateless):
    """Releases the first coordinate."""

    def plan(self, context):
        codec = Coordinates(torch.tensor([0]), dim=context.dim)
        return StepPlan(Block(codec=codec, bound=clip(0.5)))


@pytest.mark.parametrize(("sigma", "count_noise"), [(1.0, 2.0), (1.5, 1.0), (0.7, 10.0)])
def test_gradients_pay_for_the_count_by_the_formula_of_the_paper(sigma, count_noise):
    """1 / sigma^2 = 1 / z^2 + 1 / (2 s_b)^2, with s_b in examples."""
    defense = adaptive_clipping(clip_norm=0.5, share=(sigma / (2 * count_noise)) ** 2)
    gradients, count = defense.plan({"norm": 0.5, "own": None}, Context(step=0, steps=1, dim=4))[1].blocks
    assert count.noise_std(sigma) == pytest.approx(count_noise)
    assert gradients.noise_std(sigma) == pytest.approx((sigma**-2 - (2 * count_noise) ** -2) ** -0.5 * 0.5)
    whitened = [block.noise_std(sigma) / block.bound.sensitivity for block in (gradients, count)]
    assert sum(w**-2 for w in whitened) == pytest.approx(sigma**-2)


def test_the_clip_norm_settles_at_the_quantile_of_the_norms():
    defense = adaptive_clipping(rate=0.2, quantile=0.75, noise_multiplier=0.0)
    rows = torch.eye(100) * torch.arange(1.0, 101.0)
    state = {"norm": 1.0, "own": None}
    for step in range(400):
        context = Context(step=step, steps=400, dim=100, expected_batch=100.0)
        out = release(defense, rows, context, state=state)
        state = defense.observe(state, context, out.noisy, out.total)
    assert state["norm"] == pytest.approx(75, abs=1)


@pytest.mark.long
def test_one_step_of_the_clip_norm_by_hand():
    # Two of four norms are within 1: a fraction of 0.5, against a wanted 0.9.
    rows = torch.tensor([[0.5, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    defense = adaptive_clipping(rate=0.2, quantile=0.9, noise_multiplier=0.0)
    context = Context(step=0, steps=1, dim=2, expected_batch=4.0)
    out = release(defense, rows, context, state={"norm": 1.0, "own": None})
    assert float(out.noisy[1]) == 0.0
    torch.testing.assert_close(out.total, torch.tensor([1.5, 2.0]))  # the count is no part of it
    assert defense.observe({"norm": 1.0, "own": None}, context, out.noisy, out.total)["norm"] == pytest.approx(
        math.exp(0.2 * 0.4)
    )


def test_the_clip_norm_stays_within_its_range_whatever_the_noise_of_a_count_is():
    defense = adaptive_clipping(lowest=0.5, highest=2.0)
    context = Context(step=0, steps=1, dim=2, expected_batch=1e-3)
    for count, end in ((1e6, 0.5), (-1e6, 2.0)):
        noisy = (torch.zeros(2), torch.tensor([count]))
        assert defense.observe({"norm": 1.0, "own": None}, context, noisy, torch.zeros(2))["norm"] == end


@pytest.mark.long
def test_at_rate_0_it_is_dp_sgd_at_the_noise_that_the_count_leaves():
    share = 0.19  # so that gradients have noise of sigma / 0.9
    ours = adaptive_clipping(clip_norm=0.5, rate=0.0, share=share, noise_multiplier=0.9)
    plan = ours.plan({"norm": 0.5, "own": None}, Context(step=3, steps=4, layout=duties.LAYOUT))[1]
    theirs = dp_sgd(clip_norm=0.5, noise_multiplier=1.0).plan(None, Context(step=3, steps=4, layout=duties.LAYOUT))[1]
    assert plan.at(0.9).stds[0] == pytest.approx(theirs.at(1.0).stds[0])
    assert duties.trained(ours).state["norm"] == 0.5


@subtests(
    "wrong",
    [
        {"share": 1.0},
        {"share": 0.0},
        {"quantile": 1.5},
        {"rate": -0.1},
        {"clip_norm": 2e3},
        {"lowest": 0.0},
        {"highest": 1e300},
    ],
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        adaptive_clipping(**wrong)


# --- of another method -----------------------------------------------------------------------------------------


def pcdp_adapted(noise_multiplier):
    inner = pcdp(rank=3, clip_norm=0.5, bound="normalize", noise_multiplier=noise_multiplier)
    return adapted(inner, share=0.2, rate=0.5)


def sparse_adapted(noise_multiplier):
    inner = random_sparsification(clip_norm=0.5, final_sparsity=0.8, noise_multiplier=noise_multiplier)
    return adapted(inner, share=0.2, rate=0.5)


BUILDERS = pytest.mark.parametrize("build", [pcdp_adapted, sparse_adapted])


@BUILDERS
@settings(max_examples=20)
@given(rows=duties.BATCHES, pick=st.integers(0, 10**6))
def test_of_another_method_no_row_moves_both_blocks_by_more_than_the_sensitivity(build, rows, pick):
    moments = duties.histories(build)
    duties.check_bound(moments[pick % len(moments)].plan, rows)


@BUILDERS
def test_of_another_method_a_run_is_charged_as_predicted_and_goes_on_where_it_stopped(build, tmp_path):
    duties.check_ledger(build)
    duties.check_interruption_inside_a_step(build, tmp_path)
    norms = {step.plan.blocks[0].bound.norm for step in duties.usual(build, None).transcript.steps if step.plan}
    assert len(norms) == duties.STEPS


def test_of_another_method_the_norms_that_count_are_those_of_what_it_releases():
    """Rows of length 1, of which the kept coordinate has k / 100: three quarters of these are within 0.75."""
    part = torch.arange(1.0, 101.0) / 100
    rows = torch.stack([part, (1 - part.square()).sqrt()], dim=1)
    defense = adapted(Defense(First(), 0.0), quantile=0.75)
    context = Context(step=0, steps=400, dim=2, expected_batch=100.0)
    state = defense.start(context)
    for _ in range(400):
        state = defense.plan(state, context)[0]
        out = release(defense, rows, context, state=state)
        state = defense.observe(state, context, out.noisy, out.total)
    assert state["norm"] == pytest.approx(0.75, abs=0.01)


def test_of_another_method_what_is_told_of_the_noise_is_that_of_its_own_block():
    told = []

    class Listening(First):
        def plan(self, context):
            told.append(context.noise_multiplier)
            return super().plan(context)

    context = Context(step=0, steps=1, dim=2, noise_multiplier=0.9)
    defense = adapted(Defense(Listening(), 0.9), share=0.19)
    plan = defense.plan(defense.start(context), context)[1]
    assert told == pytest.approx([1.0])
    assert plan.at(0.9).stds[0] == pytest.approx(1.0 * 0.5)


def test_what_has_no_one_bound_to_adapt_is_refused():
    context = Context(step=0, steps=2, dim=4, public=ToyRows(4), update=torch.ones(4))
    for inner in (gep(rank=1, noise_multiplier=1.0), sgd()):
        defense = adapted(inner)
        with pytest.raises(ValueError, match="must have one bounded block that updates"):
            defense.plan(defense.start(context), context)
    with pytest.raises(ValueError, match="clip_norm must lie between lowest and highest"):
        outside = adapted(dp_sgd(clip_norm=5.0), highest=1.0)
        outside.plan(outside.start(context), context)


def test_of_another_method_the_noise_stays_correlated():
    plain, with_count = dp_ftrl(noise_multiplier=1.0), adapted(dp_ftrl(noise_multiplier=1.0))
    ledgers = [predict(defense, sampling=partition(0.25), steps=6) for defense in (plain, with_count)]
    assert ledgers[0].entries == ledgers[1].entries
    assert [entry.row is not None for entry in ledgers[1].entries] == [True, True]


def one_step(defense, *, rows, steps=3):
    """Contexts, plans and states of some steps of a defense on the same rows, without noise being drawn."""
    context = Context(step=0, steps=steps, dim=rows.shape[1], expected_batch=10.0, noise_multiplier=2.0)
    state, seen = defense.start(context), []
    for step in range(steps):
        context = replace(context, step=step)
        state, plan = defense.plan(state, context)
        out = release(defense.with_noise(0.0), rows, context, state=state)
        seen.append((plan, out.total / 10.0))
        state = defense.observe(state, context, out.noisy, plan.post(out.total / 10.0))
    return seen


def test_what_a_method_computes_of_its_clip_norm_follows_it():
    rows = torch.full((10, 4), 1e-3)
    # A recipe that divides the update by the clip norm does so by that of the step.
    for plan, _ in one_step(adapted(de_recipe(noise_multiplier=2.0), rate=2.0, lowest=1e-6), rows=rows):
        assert plan.post.factor == pytest.approx(1 / plan.blocks[0].bound.norm)
    # Adam's correction takes off the average, by Adam's own weights, of the variances that were added.
    inner = dp_adam_bc(noise_multiplier=2.0, beta2=0.9)
    steps = one_step(adapted(inner, rate=2.0, share=0.2, lowest=1e-6), rows=rows)
    norms = [plan.blocks[0].bound.norm for plan, _ in steps]
    assert norms[0] == 1.0 and norms[2] < 0.2
    stds = [plan.at(2.0).stds[0] / 10.0 for plan, _ in steps]
    average = 0.0
    for step, ((plan, _), std) in enumerate(zip(steps, stds, strict=True)):
        average = 0.9 * average + 0.1 * std**2
        assert plan.post.noise_variance == pytest.approx(average / (1 - 0.9 ** (step + 1)))


def test_a_method_that_measures_in_units_of_its_clip_norm_is_refused():
    with pytest.raises(ValueError, match="the clip norm of GeoClip must stay what it is: differences are stretched"):
        adapted(geoclip(noise_multiplier=1.0))
