"""Masks that are public before a run are those that the run has; of others nobody says anything."""

import pytest
import torch
from torch import nn

from leakbench.audit.plan.masks import public_masks
from leakbench.defenses.core import Coordinates, Layout, Recording, poisson, seeded, train
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.random_freeze import random_freeze
from leakbench.defenses.random_sparsification import random_sparsification

STEPS, SEED = 8, 5


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def masks(defense):
    cpu = torch.device("cpu")
    return public_masks(defense, Layout.of(model()), poisson(0.5), STEPS, seed=SEED, device=cpu)


@pytest.mark.parametrize("method", [random_sparsification, random_freeze])
def test_masks_are_those_of_the_run(method):
    defense = method(noise_multiplier=1.0)
    data = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    run = train(
        model(),
        data,
        defense,
        sampling=poisson(0.5),
        steps=STEPS,
        noise=seeded(0),
        seed=SEED,
        recording=Recording(observer="updates"),
    )
    found = masks(defense)
    assert len(found) == STEPS and any(one is not None for one in found)
    for step, mask in zip(run.transcript.steps, found, strict=True):
        assert step.plan is not None
        codec = step.plan.plan.blocks[0].codec
        assert isinstance(codec, Coordinates) and mask is not None and torch.equal(codec.kept, mask.kept)


@pytest.mark.parametrize("method", [dp_sgd, dpdr])
def test_where_there_is_no_mask_or_a_past_decides_nothing_is_said(method):
    assert masks(method(noise_multiplier=1.0)) == [None] * STEPS
