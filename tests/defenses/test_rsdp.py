"""What is particular to RSDP-SGD: random sparsification without cooling."""

import pytest
import torch

from leakbench.defenses.core import Context, Coordinates, release, seeded
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.rsdp import rsdp

ROWS = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))


def kept(defense, step):
    codec = defense.plan(None, Context(step=step, steps=12, steps_per_epoch=3, dim=50))[1].blocks[0].codec
    assert isinstance(codec, Coordinates)
    return codec.kept


def test_as_many_coordinates_are_dropped_in_the_first_step_as_in_the_last_and_others_each_epoch():
    defense = rsdp(sparsity=0.3)
    assert [kept(defense, step).numel() for step in (0, 5, 11)] == [35, 35, 35]
    assert torch.equal(kept(defense, 3), kept(defense, 5))
    assert not torch.equal(kept(defense, 2), kept(defense, 3))


def test_it_is_random_sparsification_without_cooling_to_the_same_draw():
    ours = rsdp(clip_norm=0.7, sparsity=0.4, noise_multiplier=1.3)
    theirs = random_sparsification(clip_norm=0.7, final_sparsity=0.4, cooling=False, noise_multiplier=1.3)
    context = Context(step=7, steps=12, steps_per_epoch=3, dim=50)
    totals = [release(defense, ROWS, context, noise=seeded(1)).total for defense in (ours, theirs)]
    assert torch.equal(*totals)


@pytest.mark.parametrize("sparsity", [-0.1, 1.0])
def test_a_fraction_that_keeps_nothing_or_is_none_is_refused(sparsity):
    with pytest.raises(ValueError, match=rf"sparsity must be in \[0, 1\), got {sparsity}"):
        rsdp(sparsity=sparsity)
