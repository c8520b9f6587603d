"""What is particular to DPDR: the split along the last release, its shares, and its way back to DP-SGD."""

import math

import pytest
import torch

from leakbench.defenses.core import (
    Complement,
    ConcatenatedCodec,
    Context,
    Everything,
    Layout,
    Subspace,
    clipped_sums,
    poisson,
    release,
    seeded,
)
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dpdr import dpdr

from ..parameters import long_but, subtests
from . import duties

TWO = Layout(("a.weight", "a.bias", "b.weight"), ((2,), (1,), (3,)))
ROWS = torch.randn(6, duties.DIM, generator=torch.Generator().manual_seed(3))


def context(step, layout=TWO, steps=20):
    return Context(step=step, steps=steps, layout=layout)


def after(defense, update, step=0, state=None):
    return defense.observe(state, context(step), (update,), update)


def plan_of(defense, state, step=1, layout=TWO):
    return defense.plan(state, context(step, layout))[1]


@pytest.mark.parametrize("switch_step", [0, 1])
def test_with_the_switch_at_the_first_step_it_is_dp_sgd(switch_step):
    early = duties.trained(dpdr(clip_norm=0.4, switch_step=switch_step, noise_multiplier=1.2))
    plain = duties.trained(dp_sgd(clip_norm=0.4, noise_multiplier=1.2))
    assert torch.equal(duties.parameters(early), duties.parameters(plain))
    assert early.ledger.entries == plain.ledger.entries


def test_it_is_one_block_at_first_two_until_the_switch_and_one_after():
    run = duties.trained(dpdr(switch_step=4, noise_multiplier=1.0))
    plans = [step.plan for step in run.transcript.steps]
    assert [len(plan.blocks) for plan in plans if plan] == [1, 2, 2, 2, 1, 1]
    assert run.state is None  # no use for a direction any more


def test_the_direction_is_the_unit_vector_of_the_update_in_every_layer():
    state = after(dpdr(), torch.tensor([3.0, 0.0, 4.0, 0.0, 0.0, -2.0]))
    torch.testing.assert_close(state, torch.tensor([0.6, 0.0, 0.8, 0.0, 0.0, -1.0]))


def test_a_tiny_update_still_has_a_direction():
    state = after(dpdr(), torch.tensor([3e-30, 0.0, 4e-30, 0.0, 0.0, -1e-40]))
    torch.testing.assert_close(state, torch.tensor([0.6, 0.0, 0.8, 0.0, 0.0, -1.0]))


def test_a_layer_that_did_not_move_keeps_its_direction_or_has_none():
    defense = dpdr()
    state = after(defense, torch.tensor([3.0, 0.0, 4.0, 0.0, 0.0, 0.0]))
    along = plan_of(defense, state).blocks[1].codec
    assert along.size == 1  # the second layer has no direction yet
    state = after(defense, torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 0.0]), step=1, state=state)
    torch.testing.assert_close(state, torch.tensor([0.6, 0.0, 0.8, 0.0, 1.0, 0.0]))
    assert plan_of(defense, state, step=2).blocks[1].codec.size == 2


def test_without_any_movement_the_next_step_is_plain():
    defense = dpdr()
    assert after(defense, torch.zeros(6)) is None
    assert len(plan_of(defense, None).blocks) == 1


def test_a_row_is_split_into_what_is_left_over_and_a_coefficient_a_layer():
    defense = dpdr()
    state = torch.tensor([0.6, 0.0, 0.8, 0.0, 0.0, -1.0])
    rest, along = (block.codec for block in plan_of(defense, state).blocks)
    row = torch.tensor([[10.0, 1.0, 5.0, 2.0, 3.0, 4.0]])
    torch.testing.assert_close(along.encode(row), torch.tensor([[10.0, -4.0]]))
    torch.testing.assert_close(rest.encode(row), torch.tensor([[4.0, 1.0, -3.0, 2.0, 3.0, 0.0]]))


def decomposed(**settings):
    """A plan and its state with a direction in both layers of the small network."""
    defense = dpdr(**settings)
    state = defense.observe(None, context(0, duties.LAYOUT), (ROWS[0],), ROWS[0])
    return defense, state, plan_of(defense, state, layout=duties.LAYOUT)


def test_the_left_over_norm_is_pythagoras_and_orthogonal_to_the_direction():
    _, state, plan = decomposed()
    rest, coefficients = (block.codec.encode(ROWS) for block in plan.blocks)
    expected = ROWS.square().sum(dim=1) - coefficients.square().sum(dim=1)
    torch.testing.assert_close(rest.square().sum(dim=1), expected, rtol=1e-5, atol=1e-5)
    for start, stop in duties.LAYOUT.layers:
        inner = rest[:, start:stop] @ state[start:stop]
        assert (inner.abs() <= 1e-5 * ROWS.norm(dim=1)).all()


def test_unclipped_and_without_noise_the_two_parts_decode_to_the_plain_sum():
    defense, state, _ = decomposed(clip_norm=1e6, noise_multiplier=0.0)
    out = release(defense, ROWS, context(1, duties.LAYOUT), state=state)
    torch.testing.assert_close(out.total, ROWS.sum(dim=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_shares_of_the_precision_add_up_to_one_gaussian(share):
    _, _, plan = decomposed(clip_norm=0.3, clip_norm_along=2.0, share=share)
    rest, along = plan.blocks
    sigma = 1.7
    s_p, s_l = rest.noise_std(sigma) / 0.3, along.noise_std(sigma) / 2.0
    assert s_p == pytest.approx(sigma / math.sqrt(1 - share))
    assert s_l == pytest.approx(sigma / math.sqrt(share))
    assert s_p**-2 + s_l**-2 == pytest.approx(sigma**-2)


def test_both_parts_are_clipped_over_all_layers_at_once():
    # A clip of every layer to the full norm would make it sqrt(layers) times as sensitive.
    _, _, plan = decomposed(clip_norm=0.3)
    for block in plan.blocks:
        assert float(block.bound(block.codec.encode(1e5 * ROWS)).norm(dim=1).max()) <= 0.3 * (1 + 1e-6)


def test_the_second_clip_norm_is_the_first_unless_it_is_set():
    assert [b.bound.norm for b in decomposed(clip_norm=0.3)[2].blocks] == [0.3, 0.3]
    assert [b.bound.norm for b in decomposed(clip_norm=0.3, clip_norm_along=5.0)[2].blocks] == [0.3, 5.0]


@pytest.mark.parametrize("project_noise", [True, False])
def test_noise_of_the_left_over_part_along_the_direction_goes_only_if_it_is_projected(project_noise):
    defense, state, plan = decomposed(project_noise=project_noise, noise_multiplier=1.0)
    out = release(defense, ROWS, context(1, duties.LAYOUT), state=state, noise=seeded(4))
    assert isinstance(plan.blocks[0].codec, Complement)
    assert isinstance(plan.blocks[1].codec, Subspace)
    rest, coefficients = out.noisy
    for layer, (start, stop) in enumerate(duties.LAYOUT.layers):
        e = state[start:stop]
        stray = 0.0 if project_noise else float(rest[start:stop] @ e)
        assert float(out.total[start:stop] @ e) == pytest.approx(float(coefficients[layer]) + stray, abs=1e-4)


def test_a_direction_lives_where_the_layers_are():
    _, _, plan = decomposed()
    along = plan.blocks[1].codec
    assert isinstance(along, Subspace)
    assert along.spans == duties.LAYOUT.layers
    assert isinstance(plan_of(dpdr(), None).blocks[0].codec, Everything)


def test_its_epsilon_is_that_of_dp_sgd():
    ours = duties.trained(dpdr(noise_multiplier=1.3, share=0.4), sampling=poisson(0.25))
    plain = duties.trained(dp_sgd(noise_multiplier=1.3), sampling=poisson(0.25))
    assert ours.claim(1e-5) == plain.claim(1e-5)


@subtests(
    ("settings", "message"),
    [
        ({"share": 0.0}, r"share must be in \(0, 1\), got 0.0"),
        ({"share": 1.0}, r"share must be in \(0, 1\), got 1.0"),
        ({"switch_step": -1}, "switch_step must be at least 0, got -1"),
        ({"clip_norm": 0.0}, "norm must be a positive finite number"),
        ({"clip_norm_along": -1.0}, "clip_norm_along must be a positive finite number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        dpdr(**settings)


CLIPPINGS = ["global", "layer", "joint"]


def clipped_as(clipping, clip_norm=0.5, clip_norm_along=2.0):
    """The plan of a step with a direction in both layers."""
    defense = dpdr(clip_norm=clip_norm, clip_norm_along=clip_norm_along, share=0.2, clipping=clipping)
    state = torch.zeros(duties.DIM)
    for start, stop in duties.LAYOUT.layers:
        state[start:stop] = torch.nn.functional.normalize(torch.arange(1.0, stop - start + 1), dim=0)
    context = Context(step=1, steps=4, layout=duties.LAYOUT, parameters=torch.zeros(duties.DIM))
    return defense.plan(state, context)[1]


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_however_it_clips_a_step_moves_by_one_and_has_the_noise_of_its_parts(clipping):
    plan = clipped_as(clipping)
    rows = 100 * torch.randn(200, duties.DIM, generator=torch.Generator().manual_seed(0))
    duties.check_bound(plan, rows[:6])
    if clipping != "layer":  # there no one row is long enough in all four blocks
        duties.check_bound_is_reached(plan)
    # In gradient units: sigma C / sqrt(1 - share) on what is left over, sigma C' / sqrt(share) along the direction.
    rest, along = 1.5 * 0.5 / math.sqrt(0.8), 1.5 * 2.0 / math.sqrt(0.2)
    stds = plan.at(1.5).stds
    if clipping == "joint":
        codec = plan.blocks[0].codec
        assert isinstance(codec, ConcatenatedCodec)
        assert [std / factor for std, factor in zip(stds * 2, codec.factors, strict=True)] == pytest.approx(
            [rest, along]
        )
    else:
        assert stds == pytest.approx([rest, along] * (2 if clipping == "layer" else 1))


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_what_is_not_clipped_adds_up_to_the_gradient(clipping):
    plan = clipped_as(clipping, clip_norm=1e6, clip_norm_along=1e6)
    rows = torch.randn(5, duties.DIM, generator=torch.Generator().manual_seed(0))
    sums = clipped_sums(plan, [lambda _: rows], rows)
    total = sum(block.codec.decode(part) for block, part in zip(plan.blocks, sums, strict=True))
    torch.testing.assert_close(total, rows.sum(dim=0), rtol=1e-4, atol=1e-4)


def test_a_layer_has_its_part_of_both_clip_norms_and_not_all_of_them():
    """With the full clip norm for each of L layers, noise of sigma C would be worth sigma / sqrt(L)."""
    norms = [block.bound.norm for block in clipped_as("layer").blocks]
    assert norms == pytest.approx([0.5 / math.sqrt(2), 2.0 / math.sqrt(2)] * 2)
    assert clipped_as("layer").sensitivity == pytest.approx(1.0)


def test_clipped_jointly_a_record_that_is_long_in_one_part_alone_keeps_the_other():
    plan = clipped_as("joint")
    (block,) = plan.blocks
    assert isinstance(block.codec, ConcatenatedCodec)
    along = block.codec.codecs[1]
    row = along.decode(torch.tensor([0.3, 0.3])).unsqueeze(0)  # short, and along the direction alone
    torch.testing.assert_close(
        block.codec.decode(block.bound(block.codec.encode(row))[0]), row[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("clipping", long_but(["joint"], ["layer", "joint"]))
def test_it_trains_and_goes_on_after_an_interruption_however_it_clips(clipping, tmp_path):
    def factory(sigma):
        return dpdr(clip_norm=0.5, switch_step=4, share=0.3, clipping=clipping, noise_multiplier=sigma)

    duties.check_ledger(factory)
    duties.check_removal(factory, duties.PLAIN)
    duties.check_noise(factory)
    duties.check_interruption(factory, tmp_path)
