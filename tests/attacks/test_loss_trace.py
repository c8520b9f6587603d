"""What is particular to the loss trace; the duties of every attack are in test_every_attack.py."""

import dataclasses

import numpy as np
import pytest
import torch

from leakbench.attacks.core import NotApplicable, SeenTranscript, Steps
from leakbench.attacks.loss_threshold import loss_threshold
from leakbench.attacks.loss_trace import loss_trace

from ..parameters import subtests
from . import toys


def by_hand(target: SeenTranscript, positions: list[int]) -> np.ndarray:
    """[models, candidates], by numpy."""
    asked, steps = target.candidates, list(target.steps)
    assert asked is not None and target.final is not None
    rows = []
    for model in [*(steps[position] for position in positions), target.final]:
        logits = model.logits(asked.inputs).double().numpy()
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        rows.append(-np.log(p[np.arange(len(p)), asked.labels.numpy()]))
    return np.array(rows)


@subtests("points, positions", [(20, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (2, [0, 6])])
def test_scores_are_the_drop_and_the_interquartile_range_of_the_losses(points, positions):
    target, _ = toys.learned_transcript(steps=7, count=30)
    trace = by_hand(target, positions)
    drop = loss_trace(target, points=points).scores.numpy()
    np.testing.assert_allclose(drop, trace[0] - trace[-1], atol=1e-6)
    low, high = np.percentile(trace, [25, 75], axis=0)
    found = loss_trace(target, points=points, statistic="iqr", batch_size=7).scores.numpy()
    np.testing.assert_allclose(found, high - low, atol=1e-6)


def test_the_drop_finds_members_that_the_last_loss_hides():
    target, member = toys.learned_transcript(steps=4)
    assert target.final is not None
    assert toys.auc(loss_trace(target).scores, member) > toys.auc(loss_threshold(target.final).scores, member) + 0.01


def test_steps_are_read_one_at_a_time_and_once():
    whole, _ = toys.learned_transcript(steps=5, count=30)
    made, passes = [], []

    def read():
        passes.append(1)
        for step in whole.steps:
            made.append(step)
            yield step

    lazy = dataclasses.replace(whole, steps=Steps(read, lambda: 5))
    assert torch.equal(loss_trace(lazy).scores, loss_trace(whole).scores)
    # One pass for the losses, and one that looks at the first step for what is offered, at most twice.
    assert len(made) <= 5 + 2


def test_a_single_model_diverged_ones_and_bad_settings_are_refused():
    target, _ = toys.learned_transcript(steps=1, count=30)
    assert loss_trace(target).scores.shape == (30,)
    with pytest.raises(NotApplicable, match="at least 2 models"):
        loss_trace(dataclasses.replace(target, final=None))
    broken = [dataclasses.replace(step, logits=lambda x: torch.full((len(x), 4), torch.nan)) for step in target.steps]
    diverged = dataclasses.replace(target, steps=broken)
    with pytest.raises(NotApplicable, match="training diverged"):
        loss_trace(diverged)
    with pytest.raises(ValueError, match="statistic must be drop or iqr, got 'mean'"):
        loss_trace(target, statistic="mean")
    with pytest.raises(ValueError, match="points must be at least 2"):
        loss_trace(target, points=1)
