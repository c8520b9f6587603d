"""Results of attacks and the truth come together in one place."""

import pytest
import torch

from leakbench import audit
from leakbench.attacks.core import MembershipScores, Reconstruction

MEMBERSHIP = MembershipScores(ids=torch.tensor([7, 3, 5, 9]), scores=torch.tensor([4.0, 3, 2, 1]).double(), exact=True)
PICTURE = torch.linspace(0, 1, 192).reshape(1, 3, 8, 8)
RECONSTRUCTION = Reconstruction(inputs=PICTURE, labels=torch.tensor([1]), objective=0.25)


def membership_truth(*members: int) -> audit.GroundTruth:
    return audit.GroundTruth(members=torch.tensor(members), candidates=torch.tensor([3, 5, 7, 9]))


def test_membership_is_matched_by_id_not_by_position():
    assert audit.score(MEMBERSHIP, membership_truth(3, 7, 100))["auc"].value == 1.0
    assert audit.score(MEMBERSHIP, membership_truth(9, 5))["auc"].value == 0.0


def test_scores_of_others_than_those_asked_about_are_refused():
    """20,000 made-up non-members below the true ones would be an AUC of almost 1."""
    made_up = torch.arange(20_000) + 100
    scores = torch.cat([MEMBERSHIP.scores, torch.zeros(len(made_up)).double()])
    padded = MembershipScores(ids=torch.cat([MEMBERSHIP.ids, made_up]), scores=scores, exact=False)
    with pytest.raises(ValueError, match="of the 4 candidates, each once, got 20004: 20000 are of no candidate, and 0"):
        audit.score(padded, membership_truth(3, 5))
    few = MembershipScores(ids=MEMBERSHIP.ids[:2], scores=MEMBERSHIP.scores[:2], exact=False)
    with pytest.raises(ValueError, match="got 2: 0 are of no candidate, and 2 candidates have no score"):
        audit.score(few, membership_truth(3, 5))


def test_a_truth_says_who_was_asked_about():
    with pytest.raises(ValueError, match="members and candidates must be given together"):
        audit.GroundTruth(members=torch.tensor([3, 7]))


def test_scores_that_watch_what_they_are_compared_with_see_no_truth():
    seen = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), settings=None):
            seen.extend(one for one in arguments if isinstance(one, torch.Tensor) and not isinstance(one, cls))
            return super().__torch_function__(function, types, arguments, settings or {})

    watching = MembershipScores(ids=MEMBERSHIP.ids.as_subclass(Watching), scores=MEMBERSHIP.scores, exact=False)
    truth = membership_truth(3, 5)
    seen.clear()
    with pytest.raises(TypeError, match="ids must be a plain tensor, got Watching"):
        audit.score(watching, truth)
    assert not seen


def test_a_pool_of_pictures_is_no_reconstruction():
    pool = torch.cat([PICTURE, 1 - PICTURE])
    many = Reconstruction(inputs=pool, labels=torch.tensor([1, 1]), objective=0.0)
    with pytest.raises(ValueError, match="at most as many as the batch has examples, 1, got 2"):
        audit.score(many, audit.GroundTruth(inputs=PICTURE, labels=torch.tensor([1])))


def test_a_reconstruction_is_compared_with_its_own_inputs_and_the_floor():
    truth = audit.GroundTruth(inputs=PICTURE, labels=torch.tensor([1]), floor=torch.full((3, 8, 8), 0.5))
    metrics = audit.score(RECONSTRUCTION, truth)
    mse, floor = metrics["mse"].value, metrics["psnr_floor"].value
    assert mse == 0.0
    assert floor == pytest.approx(float(-10 * (PICTURE - 0.5).square().mean().log10()), abs=1e-3)
    assert metrics["objective"].value == 0.25
    bare = audit.score(RECONSTRUCTION, audit.GroundTruth(inputs=PICTURE, labels=torch.tensor([1])))
    assert "psnr_floor" not in bare or bare["psnr_floor"].value is None


def test_labels_that_were_given_are_no_success():
    told = audit.GroundTruth(inputs=PICTURE, labels=torch.tensor([1]), labels_given=True)
    found = audit.GroundTruth(inputs=PICTURE, labels=torch.tensor([1]), labels_given=False)
    assert audit.score(RECONSTRUCTION, told)["label_accuracy"].value is None
    assert audit.score(RECONSTRUCTION, found)["label_accuracy"].value == 1.0


def test_a_truth_about_something_else_is_refused():
    with pytest.raises(ValueError, match="about membership, it has no inputs"):
        audit.score(RECONSTRUCTION, membership_truth(1))
    with pytest.raises(ValueError, match="about reconstruction, it has no members"):
        audit.score(MEMBERSHIP, audit.GroundTruth(inputs=PICTURE, labels=torch.tensor([1])))
