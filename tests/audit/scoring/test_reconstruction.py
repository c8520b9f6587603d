"""Reconstruction metrics on hand-made images: matching, PSNR, floors, and what is not measured."""

import builtins
import math
from typing import Literal

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from attacks.core import Reconstruction
from audit.scoring.reconstruction import match, psnr, score_reconstruction

IMAGES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([3, 1, 1, 7])


def score(
    inputs,
    truth=IMAGES,
    labels=LABELS,
    found_labels=None,
    status: Literal["ok", "failed"] = "ok",
    low=0.0,
    high=1.0,
    **settings,
):
    result = Reconstruction(
        inputs=inputs,
        labels=torch.zeros(len(inputs), dtype=torch.int64) if found_labels is None else found_labels,
        objective=math.nan if status == "failed" else 0.25,
        restarts=2,
        status=status,
    )
    return score_reconstruction(result, truth, labels, low=low, high=high, **settings)


def number(value):
    assert isinstance(value, float)
    return value


def without(monkeypatch, name):
    ordinary = builtins.__import__

    def importer(module, *arguments, **settings):
        if module.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return ordinary(module, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", importer)


def test_a_perfect_reconstruction_is_capped_and_says_so():
    metrics = score(IMAGES)
    assert metrics["psnr"].value == 120
    assert metrics["psnr"].detail[">=120"] == 4
    assert metrics["mse"].value == 0
    assert ">=120" not in score(IMAGES.clamp(max=0.5))["psnr"].detail


def test_the_order_of_the_reconstructions_does_not_matter():
    noisy = (IMAGES + 0.05 * torch.randn(IMAGES.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    assert score(noisy[[2, 0, 3, 1]])["psnr"] == score(noisy)["psnr"]


def test_matching_minimises_the_total_error_where_greedy_matching_does_not():
    truth = torch.tensor([[0.0], [0.5]])
    recovered, matched = match(torch.tensor([[0.45], [1.0]]), truth, None)
    assert recovered.tolist() == [
        [pytest.approx(0.45)],
        [1.0],
    ]  # greedy pairs 0.45 with 0.5 and pays 1 for the rest
    assert matched == 2


def test_an_error_of_a_tenth_is_20_db_whatever_the_units_of_the_inputs():
    truth = torch.full((2, 1, 12, 12), 0.5)
    for low, high in ((0.0, 1.0), (-1.0, 1.0), (-2.1, 2.6)):
        scale = high - low
        found = score((truth + 0.1) * scale + low, truth * scale + low, LABELS[:2], low=low, high=high)
        assert found["psnr"].value == pytest.approx(20.0, abs=1e-4)
        assert found["mse"].value == pytest.approx(0.01, abs=1e-6)


def test_what_leaves_the_box_is_clamped():
    truth = torch.ones(1, 3, 8, 8)
    assert score(truth + 5, truth, LABELS[:1])["mse"].value == 0


def test_the_psnr_is_the_mean_over_images_not_that_of_the_mean_error():
    truth = torch.zeros(2, 1, 4, 4)
    found = truth + torch.tensor([0.1, 0.01]).reshape(2, 1, 1, 1)
    assert score(found, truth, LABELS[:2])["psnr"].value == pytest.approx((20 + 40) / 2, abs=1e-3)
    np.testing.assert_allclose(psnr(np.array([1.0, 1e-4, 1e-13])), [0, 40, 120])


def test_one_image_has_no_interval_and_several_have_a_t_interval():
    one = score(IMAGES[:1] * 0.9, IMAGES[:1], LABELS[:1])["psnr"]
    assert (one.low, one.high, one.n, one.reason) == (None, None, 1, "one image")
    assert one.detail["restarts"] == 2
    several = score(IMAGES * 0.9)["psnr"]
    assert np.all(np.diff([number(several.low), number(several.value), number(several.high)]) > 0)
    assert np.all(np.diff([number(several.detail[key]) for key in ("min", "median", "max")]) >= 0)


def test_the_floor_is_the_psnr_of_an_image_anyone_could_guess():
    gray = torch.full((3, 16, 16), 0.5)
    expected = -10 * torch.log10((IMAGES - 0.5).square().mean(dim=(1, 2, 3))).mean()
    assert score(IMAGES, floor_image=gray)["psnr_floor"].value == pytest.approx(expected.item(), abs=1e-4)
    assert score(IMAGES)["psnr_floor"].value is None


def test_truths_that_were_not_reconstructed_score_at_the_floor():
    gray = torch.full((3, 16, 16), 0.5)
    metrics = score(IMAGES[[2]], floor_image=gray)
    floors = [score(IMAGES[[i]] * 0 + 0.5, IMAGES[[i]], LABELS[[i]])["psnr"] for i in (0, 1, 3)]
    assert metrics["psnr"].value == pytest.approx((sum(number(floor.value) for floor in floors) + 120) / 4)
    assert metrics["psnr"].detail["matched"] == 1
    with pytest.raises(ValueError, match=r"floor_image must be given .* got 1 for 4"):
        score(IMAGES[[2]])


def test_more_reconstructions_than_truths_are_refused_because_the_truth_would_pick_the_best():
    with pytest.raises(ValueError, match="at most as many as the batch has examples, 1, got 4: the truth would pick"):
        score(IMAGES, IMAGES[[1]], LABELS[[1]])


def test_labels_are_compared_as_a_multiset():
    assert score(IMAGES, found_labels=torch.tensor([1, 7, 1, 3]))["label_accuracy"].value == 1
    assert score(IMAGES, found_labels=torch.tensor([1, 1, 1, 1]))["label_accuracy"].value == 0.5
    given = score(IMAGES, found_labels=LABELS, labels_given=True)["label_accuracy"]
    assert (given.value, given.reason) == (None, "the attacker was given the labels")


def test_a_failed_attack_recovered_nothing():
    metrics = score(IMAGES, status="failed", floor_image=IMAGES[0])
    assert {name for name, metric in metrics.items() if metric.value is not None} == {"psnr_floor"}
    assert "only the random start" in str(metrics["psnr"].reason)


@pytest.mark.peers
def test_the_similarity_of_identical_images_is_one_and_that_of_negatives_below_zero():
    pytest.importorskip("torchmetrics")
    smooth = torch.linspace(0, 1, 16).expand(2, 1, 16, 16)
    assert score(smooth, smooth, LABELS[:2])["ssim"].value == pytest.approx(1)
    assert number(score(1 - smooth, smooth, LABELS[:2])["ssim"].value) < 0


@pytest.mark.peers
def test_the_similarity_is_that_of_an_11x11_gaussian_window_where_it_fits():
    pytest.importorskip("torchmetrics")
    noisy = (IMAGES + 0.2 * torch.randn(IMAGES.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    expected = []

    def blur(image):
        return gaussian_filter(image, 1.5, truncate=5 / 1.5)[5:-5, 5:-5]

    for a, b in zip(*(batch.double().numpy().reshape(-1, 16, 16) for batch in (noisy, IMAGES)), strict=True):
        m, k = blur(a), blur(b)
        v, w, c = blur(a * a) - m * m, blur(b * b) - k * k, blur(a * b) - m * k
        c1, c2 = 0.01**2, 0.03**2
        expected.append(((2 * m * k + c1) * (2 * c + c2) / ((m * m + k * k + c1) * (v + w + c2))).mean())
    assert score(noisy)["ssim"].value == pytest.approx(np.mean(expected), abs=1e-6)


def test_images_smaller_than_the_window_have_no_similarity():
    small = score(IMAGES[:, :, :8, :8], IMAGES[:, :, :8, :8])["ssim"]
    assert small.value is None
    assert "SSIM needs sides of at least 11 pixels, got 8x8" in str(small.reason)
    flat = score(IMAGES.flatten(1), IMAGES.flatten(1))
    assert "SSIM needs images [channels, height, width]" in str(flat["ssim"].reason)
    assert flat["psnr"].value == 120


def test_a_missing_extra_is_named(monkeypatch):
    without(monkeypatch, "torchmetrics")
    reason = score(IMAGES)["ssim"].reason
    assert reason == "SSIM needs torchmetrics, which is not installed: pip install 'leakbench[images]'"


def test_lpips_is_never_computed_without_weights(monkeypatch, tmp_path):
    large = torch.rand(1, 3, 32, 32)
    monkeypatch.delenv("LEAKBENCH_LPIPS_WEIGHTS", raising=False)
    assert "weights are not here" in str(score(large, large, LABELS[:1])["lpips"].reason)
    without(monkeypatch, "lpips")
    monkeypatch.setenv("LEAKBENCH_LPIPS_WEIGHTS", str(tmp_path / "alexnet.pth"))
    assert "LPIPS needs lpips, which is not installed" in str(score(large, large, LABELS[:1])["lpips"].reason)


@pytest.mark.peers
def test_lpips_uses_the_users_weights_and_records_their_checksum(tmp_path):
    pytest.importorskip("lpips")
    import torchvision  # pyright: ignore[reportMissingImports] -- comes with lpips

    path = tmp_path / "alexnet.pth"
    torch.manual_seed(0)
    torch.save(torchvision.models.alexnet(weights=None).state_dict(), path)
    large = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    same = score(large, large, LABELS[:2], lpips_weights=str(path))["lpips"]
    assert same.value == 0
    assert len(str(same.detail["weights_sha256"])) == 64
    first, again = (
        number(score(1 - large, large, LABELS[:2], lpips_weights=str(path))["lpips"].value) for _ in range(2)
    )
    assert first == again > 0
    torch.save({"other": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="must be those of torchvision's AlexNet"):
        score(large, large, LABELS[:2], lpips_weights=str(path))


def test_a_truth_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="inputs and labels must be the true batch"):
        score(IMAGES, IMAGES[:, :1])
    with pytest.raises(ValueError, match=r"low must be below high, got 1.0 and 1.0"):
        score(IMAGES, low=1.0)
