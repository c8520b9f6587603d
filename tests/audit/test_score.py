"""Results of attacks and the truth come together in one place."""

import pytest
import torch

import audit
from attacks.core import MembershipScores, Reconstruction

MEMBERSHIP = MembershipScores(ids=torch.tensor([7, 3, 5, 9]), scores=torch.tensor([4.0, 3, 2, 1]).double(), exact=True)
PICTURE = torch.linspace(0, 1, 192).reshape(1, 3, 8, 8)
RECONSTRUCTION = Reconstruction(inputs=PICTURE, labels=torch.tensor([1]), objective=0.25)


def test_membership_is_matched_by_id_not_by_position():
    metrics = audit.score(MEMBERSHIP, audit.GroundTruth(members=torch.tensor([3, 7, 100])))
    assert metrics["auc"].value == 1.0
    assert audit.score(MEMBERSHIP, audit.GroundTruth(members=torch.tensor([9, 5])))["auc"].value == 0.0


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
        audit.score(RECONSTRUCTION, audit.GroundTruth(members=torch.tensor([1])))
    with pytest.raises(ValueError, match="about reconstruction, it has no members"):
        audit.score(MEMBERSHIP, audit.GroundTruth(inputs=PICTURE, labels=torch.tensor([1])))
