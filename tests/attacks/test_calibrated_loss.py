"""What is particular to the calibrated loss; the duties of every attack are in test_every_attack.py."""

import dataclasses

import pytest
import torch

from leakbench.attacks.calibrated_loss import calibrated_loss
from leakbench.attacks.core import NotApplicable
from leakbench.attacks.loss_threshold import loss_threshold

from . import toys
from .test_lira import world


def test_scores_are_the_mean_loss_of_models_without_the_candidate_less_that_of_the_target():
    target, _ = toys.model_target(count=30)
    assert target.shadows is not None and target.candidates is not None
    labels = target.candidates.labels
    own = target.logits(target.candidates.inputs).double()
    for scaled in (False, True):
        found = calibrated_loss(target, shadows=6, scaled=scaled).scores
        for one in range(30):
            y, signals = labels[one], []
            for answer in (own[one], *target.shadows.logits[:6, one, 0].double()):
                p = answer.softmax(0)
                signals.append(float((p[y] / (p.sum() - p[y])).log() if scaled else p[y].log()))
            outside = [s for s, seen in zip(signals[1:], target.shadows.trained_on[:6, one], strict=True) if not seen]
            assert float(found[one]) == pytest.approx(signals[0] - sum(outside) / 3, abs=1e-6)


def test_it_sees_through_hardness_as_loss_alone_does_not():
    target, member = world(models=16, hardness=4.0)
    plain = toys.auc(loss_threshold(target).scores, member)
    scaled = toys.auc(calibrated_loss(target, scaled=True).scores, member)
    assert plain < 0.65 and scaled > 0.8
    assert plain + 0.05 < toys.auc(calibrated_loss(target).scores, member) < scaled


def test_views_that_were_not_asked_about_and_targets_that_diverged_are_refused():
    target, _ = toys.model_target(count=30)
    with pytest.raises(NotApplicable, match="2 views are asked for"):
        calibrated_loss(target, shadows=6, views=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        calibrated_loss(target, shadows=6, batch_size=0)
    diverged = dataclasses.replace(target, logits=lambda inputs: torch.full((len(inputs), toys.CLASSES), torch.nan))
    with pytest.raises(ValueError, match="logits of the target must be finite"):
        calibrated_loss(diverged, shadows=6)
