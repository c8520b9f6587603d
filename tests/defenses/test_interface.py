"""The interface carries methods it was not written for: ranking, adaptive clipping, gradient differences.

Each is written against the public core only, as a file of its own would be, and is held to the duties of the
catalogue. What is particular to it follows.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from defenses.core import (
    Block,
    Complement,
    Context,
    Defense,
    Everything,
    GradientDifference,
    Layout,
    NormWithin,
    Offset,
    StepPlan,
    Subspace,
    clip,
    full,
    poisson,
    predict,
    release,
    seeded,
    train,
)
from defenses.dp_sgd import dp_sgd
from defenses.sgd import sgd

from . import duties

# --- ranked sparsification: Zhu & Blaschko, TMLR 2023 -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Drops the coordinates whose accumulated release of the epoch before is smallest.

    The noise on dropped coordinates is part of the release, though not of the update: the ranking sees S + xi with the
    one xi of the step, as the complement of the dropped coordinates releases it.
    """

    clip_norm: float
    final_sparsity: float

    def start(self, context):
        nothing = torch.zeros(context.dim, device=context.device)
        return {"epoch": 0, "dropped": nothing[:0].long(), "seen": nothing}

    def plan(self, state, context):
        if context.epoch != state["epoch"]:
            sparsity = self.final_sparsity * context.epoch / max(1, context.epochs - 1)
            smallest = state["seen"].abs().argsort()[: int(sparsity * context.dim)]
            state = {"epoch": context.epoch, "dropped": smallest, "seen": torch.zeros_like(state["seen"])}
        axes = torch.eye(context.dim, device=context.device)[:, state["dropped"].sort().values]
        kept = Complement(Subspace.of(axes))
        return state, StepPlan(Block(codec=kept, bound=clip(self.clip_norm)))

    def observe(self, state, context, noisy, update):
        return state | {"seen": state["seen"] + noisy[0] / context.expected_batch}


def ranked(noise_multiplier):
    return Defense(Ranked(clip_norm=0.5, final_sparsity=0.6), noise_multiplier)


# --- adaptive clipping: Andrew et al., NeurIPS 2021 -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """Moves the clip norm towards a quantile of the gradient norms, read off a noisy count of short ones."""

    clip_norm: float
    share: float
    quantile: float = 0.5
    rate: float = 0.2
    lowest: float = 1e-3
    highest: float = 1e3

    def start(self, context):
        return self.clip_norm

    def plan(self, state, context):
        gradients = Block(codec=Everything(context.dim), bound=clip(state), share=1 - self.share)
        count = Block(codec=Everything(1), bound=clip(0.5), share=self.share, query=NormWithin(state), updates=False)
        return state, StepPlan(gradients, count)

    def observe(self, state, context, noisy, update):
        short = float(noisy[1]) / context.expected_batch + 0.5
        moved = state * math.exp(-self.rate * (short - self.quantile))
        return min(max(moved, self.lowest), self.highest)


def adaptive_clipping(noise_multiplier, *, count_noise=None, **settings):
    """The count's noise in examples decides its share: 1 / sigma^2 = 1 / z^2 + 1 / (2 count_noise)^2."""
    share = 1 / 16 if count_noise is None else (noise_multiplier / (2 * count_noise)) ** 2
    return Defense(AdaptiveClipping(clip_norm=0.5, share=share, **settings), noise_multiplier)


# --- DIFF2: Murata & Suzuki, arXiv:2302.03884 -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Diff2:
    """Releases gradient differences at the same examples and adds them up, with restarts."""

    clip_norm: float
    smoothness: float
    restart: int

    def start(self, context):
        return None

    def plan(self, state, context):
        moved = 0.0 if state is None else float((context.parameters - state["earlier"]).norm())
        # Where nothing moved the increment is zero for all data and there is nothing to release: start anew.
        if state is None or context.step % self.restart == 0 or moved == 0:
            return state, StepPlan(Block(codec=Everything(context.dim), bound=clip(self.clip_norm)))
        change = Block(
            codec=Everything(context.dim),
            bound=clip(self.smoothness * moved),
            query=GradientDifference(state["earlier"]),
        )
        return state, StepPlan(change, post=Offset(state["estimate"]))

    def observe(self, state, context, noisy, update):
        return {"estimate": update, "earlier": context.parameters}


def diff2(noise_multiplier):
    return Defense(Diff2(clip_norm=0.5, smoothness=2.0, restart=4), noise_multiplier)


# --- the duties of the catalogue --------------------------------------------------------------------------------

FACTORIES = {"ranked": ranked, "adaptive_clipping": adaptive_clipping, "diff2": diff2}
each = pytest.mark.parametrize("name", FACTORIES)


@each
@settings(max_examples=100)
@given(rows=duties.BATCHES, pick=st.integers(0, 10**6))
def test_removing_any_row_moves_the_sums_by_at_most_the_sensitivity(name, rows, pick):
    moments = duties.histories(FACTORIES[name])
    duties.check_bound(moments[pick % len(moments)].plan, rows)


@each
def test_some_row_fills_the_bound_of_every_block(name):
    for moment in duties.history(FACTORIES[name](1.0)):
        duties.check_bound_is_reached(moment.plan)


@each
def test_noise_has_its_scale_and_two_thirds_or_three_halves_of_it_are_rejected(name):
    duties.check_noise(FACTORIES[name])


@each
def test_a_step_is_one_gaussian_and_the_ledger_agrees_with_the_prediction(name):
    duties.check_ledger(FACTORIES[name])
    theirs = predict(dp_sgd(noise_multiplier=1.3), sampling=poisson(0.1), steps=5)
    assert predict(FACTORIES[name](1.3), sampling=poisson(0.1), steps=5).entries == theirs.entries


@each
def test_seeds_microbatches_and_empty_batches_behave(name):
    duties.check_seeds(FACTORIES[name])
    duties.check_microbatches(FACTORIES[name])
    duties.check_empty_batches(FACTORIES[name])


@each
def test_an_interrupted_run_goes_on_bit_for_bit(name, tmp_path):
    duties.check_interruptions(FACTORIES[name], tmp_path)
    duties.check_interruption_inside_a_step(FACTORIES[name], tmp_path)


@each
def test_without_a_noise_multiplier_nothing_is_released(name):
    duties.check_refusals(FACTORIES[name])


@pytest.mark.gpu
@each
def test_on_a_gpu_it_is_the_same_run(name, tmp_path):
    duties.check_device(FACTORIES[name], tmp_path, "cuda")


# --- what is particular ----------------------------------------------------------------------------------------


def dropped_in(step):
    codec = step.plan.blocks[0].codec
    assert isinstance(codec, Complement)
    return codec.subspace.bases[0].nonzero()[:, 0]


def test_ranking_drops_what_was_smallest_in_the_releases_of_the_epoch_before():
    run = duties.trained(ranked(1.0), momentum=0.0)
    steps = run.transcript.steps
    assert [len(dropped_in(step)) for step in steps] == [0, 0, 12, 12, 25, 25]  # thirds of 0.6 of 43
    for epoch in (1, 2):
        before = steps[2 * epoch - 2 : 2 * epoch]
        scores = torch.stack([step.noisy[0] / step.expected_batch for step in before if step.noisy]).sum(dim=0).abs()
        dropped = dropped_in(steps[2 * epoch])
        kept = torch.ones(duties.DIM, dtype=torch.bool).index_fill(0, dropped, False)
        assert scores[dropped].max() <= scores[kept].min()


def test_ranking_and_update_see_the_same_draw_and_dropped_coordinates_are_noise_alone():
    rows = 1e3 * torch.ones(4, duties.DIM)
    state = {"epoch": 1, "dropped": torch.arange(20), "seen": torch.zeros(duties.DIM)}
    context = Context(step=2, steps=6, steps_per_epoch=2, layout=duties.LAYOUT)

    def released(rows, sigma):
        return release(ranked(sigma), rows, context, state=state, noise=seeded(5))

    noisy, quiet = released(rows, 2.0), released(rows, 0.0)
    draw = duties.noise_of(5, duties.DIM, 2.0 * 0.5)
    torch.testing.assert_close(noisy.noisy[0] - quiet.noisy[0], draw)
    assert torch.equal(noisy.noisy[0][:20], released(torch.zeros(0, duties.DIM), 2.0).noisy[0][:20])  # no signal
    assert torch.equal(noisy.total[:20], torch.zeros(20))
    torch.testing.assert_close(noisy.total[20:], noisy.noisy[0][20:])  # one release, used twice


@pytest.mark.parametrize(("sigma", "count_noise"), [(1.0, 2.0), (1.5, 1.0), (0.7, 10.0)])
def test_gradients_pay_for_the_count_by_the_formula_of_the_paper(sigma, count_noise):
    defense = adaptive_clipping(sigma, count_noise=count_noise)
    gradients, count = defense.plan(0.5, Context(step=0, steps=1, dim=4))[1].blocks
    assert count.noise_std(sigma) == pytest.approx(count_noise)
    assert gradients.noise_std(sigma) == pytest.approx((sigma**-2 - (2 * count_noise) ** -2) ** -0.5 * 0.5)
    whitened = [block.noise_std(sigma) / block.bound.sensitivity for block in (gradients, count)]
    assert sum(w**-2 for w in whitened) == pytest.approx(sigma**-2)


def test_a_count_that_would_spend_the_whole_step_is_refused():
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got"):
        adaptive_clipping(1.0, count_noise=0.4).plan(0.5, Context(step=0, steps=1, dim=4))


def test_the_clip_norm_settles_at_the_quantile_of_the_norms():
    defense = adaptive_clipping(0.0, rate=0.2, quantile=0.75)
    rows = torch.eye(100) * torch.arange(1.0, 101.0)
    state = 1.0
    for step in range(400):
        context = Context(step=step, steps=400, dim=100, expected_batch=100.0)
        out = release(defense, rows, context, state=state)
        state = defense.observe(state, context, out.noisy, out.total)
    assert state == pytest.approx(75, abs=1)


def test_one_step_of_the_clip_norm_by_hand():
    # Two of four norms are within 1: a fraction of 0.5, against a wanted 0.9.
    rows = torch.tensor([[0.5, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    defense = adaptive_clipping(0.0, rate=0.2, quantile=0.9)
    context = Context(step=0, steps=1, dim=2, expected_batch=4.0)
    out = release(defense, rows, context, state=1.0)
    assert float(out.noisy[1]) == 0.0
    torch.testing.assert_close(out.total, torch.tensor([1.5, 2.0]))  # the count is no part of it
    assert defense.observe(1.0, context, out.noisy, out.total) == pytest.approx(math.exp(0.2 * 0.4))


def test_differences_without_noise_or_clipping_add_up_to_the_gradient():
    loose = Defense(Diff2(clip_norm=1e6, smoothness=1e6, restart=100), 0.0)
    run = train(duties.network(), duties.DATA, loose, sampling=full(), steps=8, lr=0.5)
    plain = train(duties.network(), duties.DATA, sgd(), sampling=full(), steps=8, lr=0.5)
    torch.testing.assert_close(duties.parameters(run), duties.parameters(plain), rtol=1e-4, atol=1e-5)


def test_the_bound_of_a_difference_is_the_distance_between_released_iterates():
    run = duties.trained(diff2(1.0), momentum=0.0)
    steps = run.transcript.steps
    for i, step in enumerate(steps):
        assert step.plan
        block = step.plan.blocks[0]
        if i % 4 == 0:
            assert block.bound.norm == 0.5
        else:
            moved = float((step.parameters - steps[i - 1].parameters).norm())
            assert block.bound.norm == pytest.approx(2.0 * moved)
            assert isinstance(block.query, GradientDifference)
            assert torch.equal(block.query.earlier, steps[i - 1].parameters)


def test_where_nothing_moved_a_difference_starts_anew():
    defense = diff2(1.0)
    context = Context(step=1, steps=5, layout=Layout.flat(3), parameters=torch.ones(3))
    state = {"estimate": torch.ones(3), "earlier": torch.ones(3)}
    plan = defense.plan(state, context)[1]
    assert plan.blocks[0].bound.norm == 0.5
    assert torch.equal(plan.post(torch.zeros(3)), torch.zeros(3))
