"""What is particular to posterior freeze: the mask comes after the noise."""

import pytest
import torch

from leakbench.defenses.core import Context, Coordinates, Keep, release, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.posterior_freeze import posterior_freeze
from leakbench.defenses.random_sparsification import random_sparsification

ROWS = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))


def test_after_the_noise_the_release_is_that_of_dp_sgd_and_the_update_is_masked():
    context = Context(step=9, steps=10, dim=50)
    ours = posterior_freeze(clip_norm=0.7, final_sparsity=0.8, noise_multiplier=1.3)
    plan = ours.plan(None, context)[1]
    released = release(ours, ROWS, context, noise=seeded(1)).total
    assert torch.equal(
        released, release(dp_sgd(clip_norm=0.7, noise_multiplier=1.3), ROWS, context, noise=seeded(1)).total
    )
    assert isinstance(plan.post, Keep)
    before = random_sparsification(clip_norm=0.7, final_sparsity=0.8).plan(None, context)[1].blocks[0].codec
    assert isinstance(before, Coordinates)
    assert torch.equal(plan.post.coordinates.kept, before.kept) and len(before.kept) == 10
    update = plan.post(released)
    assert torch.equal(update[before.kept], released[before.kept]) and int((update != 0).sum()) == 10


def test_what_is_kept_of_an_example_is_never_longer_than_where_it_is_masked_first():
    context = Context(step=9, steps=10, dim=50)
    after = posterior_freeze(clip_norm=0.7, final_sparsity=0.8, noise_multiplier=0.0)
    before = random_sparsification(clip_norm=0.7, final_sparsity=0.8, noise_multiplier=0.0)
    post = after.plan(None, context)[1].post
    for row in (ROWS * torch.logspace(-3, 2, 8).unsqueeze(1)).split(1):
        masked_after = post(release(after, row, context).total)
        masked_before = release(before, row, context).total
        assert masked_after.norm() <= masked_before.norm() * (1 + 1e-6) <= row.norm() * (1 + 1e-5)
        cosine = torch.nn.functional.cosine_similarity(masked_after, masked_before, dim=0)
        assert float(cosine) == pytest.approx(1.0, abs=1e-5)  # one direction


def test_a_cooling_of_fewer_than_no_epochs_is_refused():
    with pytest.raises(ValueError, match="cooling_epochs must be at least 0, got -1"):
        posterior_freeze(cooling_epochs=-1)
