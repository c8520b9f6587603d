"""What is particular to the loss threshold; the duties of every attack are in test_every_attack.py."""

import math

import pytest
import torch

from leakbench.attacks.core import Examples, ModelAccess
from leakbench.attacks.loss_threshold import loss_threshold

from . import toys


def model(logits: torch.Tensor, labels: torch.Tensor) -> ModelAccess:
    """A model that answers row i of `logits` to input i."""
    candidates = Examples(
        ids=torch.arange(len(labels)) + 7, inputs=torch.arange(len(labels))[:, None].float(), labels=labels
    )
    return ModelAccess(
        logits=lambda inputs: logits[inputs[:, 0].long()],
        input_shape=(1,),
        classes=logits.shape[1],
        candidates=candidates,
    )


def test_the_score_is_minus_the_cross_entropy_by_hand():
    target = model(torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]]), torch.tensor([0, 1]))
    result = loss_threshold(target)
    torch.testing.assert_close(result.scores, torch.tensor([-math.log(2), -math.log(4)], dtype=torch.float64))
    assert result.ids.tolist() == [7, 8]
    assert not result.exact


def test_a_confident_model_makes_no_ties():
    """In float32 every loss below 1e-7 is 0 and all members tie."""
    target = model(torch.tensor([[20.0, 0.0], [25.0, 0.0], [30.0, 0.0]]), torch.zeros(3, dtype=torch.int64))
    scores = loss_threshold(target).scores
    assert (scores.diff() > 0).all()


def test_a_table_that_remembers_its_members_is_separated_perfectly():
    target, member = toys.model_target(memory=50.0)
    assert toys.auc(loss_threshold(target).scores, member) == 1.0


def test_the_batch_size_changes_nothing():
    target, _ = toys.model_target()
    assert torch.equal(loss_threshold(target, batch_size=7).scores, loss_threshold(target).scores)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        loss_threshold(target, batch_size=0)
