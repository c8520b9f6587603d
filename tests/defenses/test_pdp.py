"""What is particular to PDP-SGD: the projection comes after the noise, where PCDP's comes before the bound."""

import torch

from leakbench.defenses.core import Context, Layout, Project, ToyRows, release, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.pdp import pdp

LAYOUT = Layout(("a.weight", "b.weight"), ((5, 8), (20,)))
DIM = LAYOUT.dim
ROWS = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0))
CONTEXT = Context(step=0, steps=1, layout=LAYOUT, public=ToyRows(DIM))


def test_the_release_is_that_of_dp_sgd_to_the_same_draw():
    ours, theirs = pdp(clip_norm=0.7, rank=3, noise_multiplier=1.3), dp_sgd(clip_norm=0.7, noise_multiplier=1.3)
    releases = [release(defense, ROWS, CONTEXT, noise=seeded(1)).total for defense in (ours, theirs)]
    assert torch.equal(*releases)


def test_the_update_is_the_projection_of_the_release():
    _, plan = pdp(rank=3).plan(None, CONTEXT)
    assert isinstance(plan.post, Project)
    update = plan.post(ROWS[0])
    torch.testing.assert_close(plan.post(update), update)
    assert plan.post.subspace.size == 6
    assert update.norm() < 0.8 * ROWS[0].norm()


def test_a_full_rank_is_dp_sgd():
    _, plan = pdp(rank=40).plan(None, CONTEXT)
    torch.testing.assert_close(plan.post(ROWS[0]), ROWS[0], rtol=0, atol=0)


def test_it_is_pcdp_where_nothing_is_clipped_and_not_where_something_is():
    for clip_norm, alike in ((1e3, True), (0.5, False)):
        settings = {"clip_norm": clip_norm, "rank": 3, "noise_multiplier": 0.0}
        _, plan = pdp(**settings).plan(None, CONTEXT)
        ours = plan.post(release(pdp(**settings), ROWS, CONTEXT).total)
        theirs = release(pcdp(**settings), ROWS, CONTEXT).total
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5) is alike
