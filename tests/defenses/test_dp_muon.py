"""What is particular to DP-Muon: matrices of orthogonal rows, from the momentum of sums clipped matrix by matrix."""

import math

import pytest
import torch

from leakbench.defenses.core import Context, Layout, release, seeded
from leakbench.defenses.dp_muon import OrthogonalMomentum, dp_muon, orthogonal
from leakbench.defenses.dp_sgd import dp_sgd

from ..parameters import subtests

LAYOUT = Layout(("conv.weight", "conv.bias", "out.weight"), ((6, 2, 2, 2), (6,), (3, 20)))
ROWS = torch.randn(8, LAYOUT.dim, generator=torch.Generator().manual_seed(0))
CONTEXT = Context(step=0, steps=4, layout=LAYOUT, expected_batch=8.0)


@subtests("shape", [(4, 9), (9, 4), (5, 5), (1, 7)])
@subtests("degree", [1, 2, 3])
def test_all_singular_values_come_to_one_and_directions_stay(shape, degree):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = orthogonal(1e-6 * matrix, 25, degree)  # whatever its length
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(found, u @ v, rtol=1e-6, atol=1e-6)


def test_one_iteration_by_hand():
    # Singular values 0.6 and 0.8 of a Frobenius norm of 1, by 1.5 - 0.5 l of squares l at degree 1.
    found = orthogonal(torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64), 1, 1)
    expected = torch.diag(torch.tensor([0.6 * (1.5 - 0.18), 0.8 * (1.5 - 0.32)], dtype=torch.float64))
    torch.testing.assert_close(found, expected)
    assert torch.equal(orthogonal(torch.zeros(2, 3), 5, 2), torch.zeros(2, 3))


def test_a_bias_keeps_its_direction_alone_and_momentum_adds_up():
    post = OrthogonalMomentum(ROWS[0], 0.5, LAYOUT.shapes, 5, 2)
    moved = 0.5 * ROWS[0] + ROWS[1]
    torch.testing.assert_close(post.moved(ROWS[1]), moved)
    torch.testing.assert_close(post(ROWS[1])[48:54], moved[48:54] / moved[48:54].norm())
    kernel = moved[:48].view(6, 8)
    torch.testing.assert_close(post(ROWS[1])[:48].view(6, 8), orthogonal(kernel, 5, 2))


def test_the_state_is_the_momentum_of_what_was_released():
    defense = dp_muon(clip_norm=0.7, decay=0.8, noise_multiplier=1.0)
    state, total = defense.start(CONTEXT), torch.zeros(LAYOUT.dim)
    for step in range(3):
        context = CONTEXT.at(step)
        out = release(defense, ROWS, context, noise=seeded(step), state=state)
        state = defense.observe(state, context, out.noisy, out.total)
        total = 0.8 * total + out.total / 8
    torch.testing.assert_close(state, total)


def test_every_matrix_is_clipped_to_its_share_and_the_whole_as_by_dp_sgd():
    by_matrix = release(dp_muon(clip_norm=0.3, noise_multiplier=0.0), ROWS, CONTEXT).total
    expected = torch.cat(
        [
            (rows * (0.3 / math.sqrt(3) / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(dim=0)
            for rows in ROWS.split(list(LAYOUT.sizes), dim=1)
        ]
    )
    torch.testing.assert_close(by_matrix, expected)
    whole, plain = (
        dp_muon(clip_norm=0.3, clipping="whole", noise_multiplier=1.3),
        dp_sgd(clip_norm=0.3, noise_multiplier=1.3),
    )
    assert torch.equal(*(release(d, ROWS, CONTEXT, noise=seeded(1)).total for d in (whole, plain)))


def test_noise_of_every_coordinate_is_that_of_the_whole_clip_norm():
    plan = dp_muon(clip_norm=0.3, noise_multiplier=2.0).plan(torch.zeros(LAYOUT.dim), CONTEXT)[1].at(2.0)
    assert plan.stds == pytest.approx([0.6] * 3)
    assert math.hypot(*(block.bound.norm for block in plan.blocks)) == pytest.approx(0.3)


@subtests("settings", [{"decay": 1.0}, {"iterations": 0}, {"degree": 0}])
def test_what_makes_no_sense_is_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        dp_muon(**settings)
