"""Canary alignment: coins of canaries are found through noise, other canaries and other records; nothing else is."""

from dataclasses import replace

import pytest
import torch

from leakbench.attacks.canary_alignment import canary_alignment
from leakbench.attacks.core import Controls, Examples, NotApplicable, SeenTranscript

from ..parameters import subtests
from . import toys

CANARIES, DIM, STEPS = 120, 160, 3


def shown(noise: float, *, share: float = 1.0, others: float = 0.0, length: float = 1.0, seed: int = 0):
    """A transcript of canaries in directions that overlap, and their coins; others add the same to every step."""
    coins = toys.generator(seed)
    directions = torch.randn(CANARIES, DIM, generator=coins)
    directions = length * directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    included = torch.rand(CANARIES, generator=coins) < 0.5
    bias = others * torch.randn(DIM, generator=coins)
    numbers = torch.arange(CANARIES).view(-1, 1, 1, 1).float()
    canaries = Examples(
        ids=torch.arange(CANARIES), inputs=numbers.expand(-1, 1, 4, 4).clone(), labels=torch.zeros(CANARIES).long()
    )
    public = Examples(ids=torch.arange(5), inputs=torch.full((5, 1, 4, 4), -1.0), labels=torch.zeros(5).long())
    step = toys.membership_step(seed=seed, noise=0.0, count=10)[0]

    def contributions(inputs, labels):
        number = inputs[:, 0, 0, 0].long()
        return torch.where((number >= 0)[:, None], directions[number.clamp(min=0)], bias / step.expected_batch)

    steps = []
    for index in range(STEPS):
        joined = included & (torch.rand(CANARIES, generator=coins) < share)
        sums = directions[joined].sum(dim=0) + bias + noise * torch.randn(DIM, generator=coins)
        fields = {
            "released": sums / step.expected_batch,
            "noise_std": torch.full((DIM,), noise),
            "contributions": contributions,
            "population": public,
            "candidates": canaries,
            "others_removed": None,
            "matched_filter": None,
            "sample_rate": share,
            "participation": "known" if share == 1 else "independent",
            "step": index,
        }
        steps.append(replace(step, **fields))
    return SeenTranscript(steps=steps, candidates=canaries, controls=Controls.CANARIES), included


def test_canaries_that_overlap_are_told_apart_exactly_where_there_is_no_noise():
    """By inner products alone they are not: each has a part of all others in it."""
    target, included = shown(0.0)
    scores = canary_alignment(target).scores
    assert scores[included].min() > scores[~included].max() + 0.4


@subtests("others", [0.0, 20.0])
@subtests("share, least, most", [(1.0, 0.86, 0.99), (0.7, 0.6, 0.95)])
def test_coins_are_found_through_noise_as_well_as_the_noise_allows(share, least, most, others):
    """What records add that are like public ones makes no difference."""
    aucs = []
    for seed in range(4):
        target, included = shown(0.7, share=share, others=others, seed=seed)
        aucs.append(toys.auc(canary_alignment(target).scores, included))
    assert least < sum(aucs) / len(aucs) < most  # Phi(sqrt(3) / 0.7 / sqrt(2)) = 0.96 of canaries by themselves


def test_coins_that_decided_nothing_are_not_found():
    aucs = []
    for seed in range(6):
        target, _ = shown(0.7, seed=seed)
        other = torch.rand(CANARIES, generator=toys.generator(seed + 50)) < 0.5
        aucs.append(toys.auc(canary_alignment(target).scores, other))
    assert abs(sum(aucs) / len(aucs) - 0.5) < 5 * 0.053 / 6**0.5


def test_canaries_that_contribute_nothing_are_not_scored():
    with pytest.raises(NotApplicable, match="no canary contributes anything"):
        canary_alignment(shown(0.7, length=0.0)[0])


def test_a_batch_of_nobody_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        canary_alignment(shown(0.7)[0], batch_size=0)
