"""What is particular to modified entropy; the duties of every attack are in test_every_attack.py."""

import math

import pytest
import torch

from leakbench.attacks.core import Examples, ModelAccess
from leakbench.attacks.modified_entropy import modified_entropy

from . import toys


def model(logits: torch.Tensor, labels: torch.Tensor, public: int = 0) -> ModelAccess:
    """A model that answers row i of `logits` to input i; the last `public` rows are public examples."""
    inputs, ids = torch.arange(len(labels))[:, None].float(), torch.arange(len(labels))
    asked, known = slice(0, len(labels) - public), slice(len(labels) - public, None)
    return ModelAccess(
        logits=lambda inputs: logits[inputs[:, 0].long()],
        input_shape=(1,),
        classes=logits.shape[1],
        candidates=Examples(ids=ids[asked], inputs=inputs[asked], labels=labels[asked]),
        population=Examples(ids=ids[known], inputs=inputs[known], labels=labels[known]),
    )


def test_the_score_is_that_of_the_formula_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3]], dtype=torch.float64)
    scores = modified_entropy(model(p.log(), torch.tensor([0, 2])), calibrated=False).scores
    first = 0.3 * math.log(0.7) + 0.2 * math.log(0.8) + 0.1 * math.log(0.9)
    second = 0.7 * math.log(0.3) + 0.2 * math.log(0.8) + 0.5 * math.log(0.5)
    torch.testing.assert_close(scores, torch.tensor([first, second], dtype=torch.float64))


def test_a_sure_wrong_answer_scores_least_and_sure_ones_make_no_ties():
    """Entropy itself takes a sure wrong answer for a member's."""
    logits = torch.tensor([[30.0, 0.0], [40.0, 0.0], [0.0, 30.0], [0.1, 0.0]], dtype=torch.float64)
    scores = modified_entropy(model(logits, torch.zeros(4, dtype=torch.int64)), calibrated=False).scores
    assert scores.argsort().tolist() == [2, 3, 0, 1]
    assert scores.isfinite().all()
    shifted = modified_entropy(model(logits + 500, torch.zeros(4, dtype=torch.int64)), calibrated=False).scores
    torch.testing.assert_close(shifted, scores)


def test_classes_are_made_comparable_by_public_examples():
    """One class is easy for everybody: its non-members score above the members of a hard one."""
    coins = toys.generator(0)
    label = torch.randint(2, (1200,), generator=coins)
    member = torch.rand(1200, generator=coins) < 0.5
    member[600:] = False
    gap = 6.0 * label + 1.5 * member + torch.randn(1200, generator=coins)
    logits = torch.stack([torch.where(label == 0, gap, 0), torch.where(label == 1, gap, 0)], dim=1).double()
    target = model(logits, label, public=600)
    plain, calibrated = (
        toys.auc(modified_entropy(target, calibrated=one).scores, member[:600]) for one in (False, True)
    )
    # Phi(1.5 / sqrt 2) = 0.856 where each class is by itself; n = 600, standard error 0.016.
    assert plain < 0.75 and abs(calibrated - 0.856) < 0.06


def test_a_class_without_public_examples_is_scored_by_all_of_them():
    logits = torch.zeros(5, 3)
    scores = modified_entropy(model(logits, torch.tensor([0, 1, 2, 0, 0]), public=2)).scores
    torch.testing.assert_close(scores, torch.zeros(3, dtype=torch.float64))


def test_the_batch_size_changes_nothing():
    target, _ = toys.model_target()
    assert torch.equal(modified_entropy(target, batch_size=7).scores, modified_entropy(target).scores)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        modified_entropy(target, batch_size=0)
