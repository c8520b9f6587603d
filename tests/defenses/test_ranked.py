"""What is particular to ranked sparsification: what it drops, and what one draw or two cost."""

import math

import pytest
import torch

from leakbench.defenses.core import Complement, Context, Coordinates, poisson, predict, release, seeded, shuffle
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.ranked import ranked

from . import duties


def dropped_in(step):
    codec = step.plan.blocks[-1].codec
    assert isinstance(codec, Complement) and isinstance(codec.subspace, Coordinates)
    return codec.subspace.kept


@pytest.mark.parametrize("fresh", [False, True])
def test_it_drops_what_was_smallest_in_the_releases_of_the_epoch_before(fresh):
    defense = ranked(clip_norm=0.5, final_sparsity=0.6, fresh_rank_noise=fresh, noise_multiplier=1.0)
    steps = duties.trained(defense, momentum=0.0).transcript.steps
    assert [len(dropped_in(step)) for step in steps] == [0, 0, 12, 12, 25, 25]  # thirds of 0.6 of 43
    for epoch in (1, 2):
        before = steps[2 * epoch - 2 : 2 * epoch]
        scores = torch.stack([step.noisy[-1] / step.expected_batch for step in before if step.noisy]).sum(dim=0).abs()
        dropped = dropped_in(steps[2 * epoch])
        kept = torch.ones(duties.DIM, dtype=torch.bool).index_fill(0, dropped, False)
        assert scores[dropped].max() <= scores[kept].min()


def test_the_cooling_may_end_before_the_run():
    defense = ranked(final_sparsity=0.6, cooling_epochs=2, noise_multiplier=1.0)
    steps = duties.trained(defense, momentum=0.0).transcript.steps
    assert [len(dropped_in(step)) for step in steps] == [0, 0, 25, 25, 25, 25]


STATE = {"epoch": 1, "dropped": torch.arange(20), "seen": torch.zeros(duties.DIM)}
CONTEXT = Context(step=2, steps=6, steps_per_epoch=2, layout=duties.LAYOUT)


def released(rows, sigma, **settings):
    defense = ranked(clip_norm=0.5, final_sparsity=0.6, noise_multiplier=sigma, **settings)
    return release(defense, rows, CONTEXT, state=STATE, noise=seeded(5))


def test_ranking_and_update_see_the_same_draw_and_dropped_coordinates_are_noise_alone():
    rows = 1e3 * torch.ones(4, duties.DIM)
    noisy, quiet = released(rows, 2.0), released(rows, 0.0)
    draw = duties.noise_of(5, duties.DIM, 2.0 * 0.5)
    torch.testing.assert_close(noisy.noisy[0] - quiet.noisy[0], draw)
    assert torch.equal(noisy.noisy[0][:20], released(torch.zeros(0, duties.DIM), 2.0).noisy[0][:20])  # no signal
    assert torch.equal(noisy.total[:20], torch.zeros(20))
    torch.testing.assert_close(noisy.total[20:], noisy.noisy[0][20:])  # one release, used twice


def test_a_draw_of_its_own_for_the_ranking_is_paid_for_with_noise():
    """Two Gaussians of multiplier sigma over one sum are worth sigma / sqrt(2); here each has sqrt(2) sigma."""
    defense = ranked(clip_norm=0.5, fresh_rank_noise=True, noise_multiplier=2.0)
    blocks = defense.plan(STATE, CONTEXT)[1].blocks
    assert [block.noise_std(2.0) for block in blocks] == pytest.approx([math.sqrt(2) * 2.0 * 0.5] * 2)
    assert [block.updates for block in blocks] == [True, False]
    out = released(torch.zeros(1, duties.DIM), 2.0, fresh_rank_noise=True)
    assert not torch.equal(out.noisy[0], out.noisy[1][20:])
    assert torch.equal(out.total[20:], out.noisy[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("sigma", "epochs", "once", "twice", "dealt_out"),
    [(1.54, 40, 2.75, 4.78, 25.27), pytest.param(1.81, 60, 2.75, 4.55, 26.72, marks=pytest.mark.slow)],
)
def test_the_figures_of_its_caveat_are_those_of_the_accountant(sigma, epochs, once, twice, dealt_out):
    def epsilon(multiplier, sampling):
        defense = dp_sgd(noise_multiplier=multiplier)
        return predict(defense, sampling=sampling, steps=50 * epochs).claim(1e-5).epsilon

    found = epsilon(sigma, poisson(0.02)), epsilon(sigma / math.sqrt(2), poisson(0.02)), epsilon(sigma, shuffle(0.02))
    assert found == pytest.approx((once, twice, dealt_out), abs=0.01)


def test_without_sparsity_it_is_dp_sgd_to_the_same_noise_draw():
    one, other = (
        duties.trained(defense)
        for defense in (
            ranked(clip_norm=0.5, final_sparsity=0.0, noise_multiplier=1.3),
            dp_sgd(clip_norm=0.5, noise_multiplier=1.3),
        )
    )
    torch.testing.assert_close(duties.parameters(one), duties.parameters(other), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"final_sparsity": 1.0}, r"final_sparsity must be in \[0, 1\), got 1.0"), ({"cooling_epochs": 0}, "at least 1")],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ranked(**settings)
