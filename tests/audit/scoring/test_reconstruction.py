"""Reconstruction metrics on hand-made images: matching, PSNR, floors, and what is not measured."""

import builtins
import math
from typing import Literal

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.ndimage import gaussian_filter

from leakbench.attacks.core import Reconstruction
from leakbench.audit.scoring.images import ImageValues, absent, gain_metric, share_metric, summed_up
from leakbench.audit.scoring.perceptual import ssim_values
from leakbench.audit.scoring.reconstruction import best_match, match, psnr, score_reconstruction
from leakbench.leaderboard.metrics import METRICS

from ...parameters import long_but

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
    recovered, rows, columns = match(torch.tensor([[0.45], [1.0]]), truth, None)
    assert recovered.tolist() == [
        [pytest.approx(0.45)],
        [1.0],
    ]  # greedy pairs 0.45 with 0.5 and pays 1 for the rest
    assert (rows.tolist(), columns.tolist()) == ([0, 1], [0, 1])


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
    known = {name for name, metric in METRICS.items() if metric.kind == "reconstruction"}
    assert metrics.keys() == known - {"rero_bound", "prior_success"}  # which the ledger gives
    assert metrics.keys() == score(IMAGES).keys()
    assert "only the random start" in str(metrics["psnr"].reason)


@pytest.mark.peers
def test_the_similarity_of_identical_images_is_one_and_that_of_negatives_below_zero():
    pytest.importorskip("torchmetrics")
    smooth = torch.linspace(0, 1, 16).expand(2, 1, 16, 16)
    assert score(smooth, smooth, LABELS[:2])["ssim"].value == pytest.approx(1)
    assert number(score(1 - smooth, smooth, LABELS[:2])["ssim"].value) < 0


@pytest.mark.peers
def test_the_similarity_of_a_close_copy_is_not_rounded_above_one():
    pytest.importorskip("torchmetrics")
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(200, 1, 16, 16, generator=generator, dtype=torch.float64)
    copies = truth + 1e-12 * torch.randn(truth.shape, generator=generator, dtype=torch.float64)
    values = ssim_values(copies, truth).values
    assert values is not None and values.max() == 1 and values == pytest.approx(1)


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


def result_of(inputs, **fields):
    return Reconstruction(
        inputs=inputs, labels=torch.zeros(len(inputs), dtype=torch.int64), objective=0.25, **{"restarts": 2, **fields}
    )


def scored(result, truth=IMAGES, **settings):
    return score_reconstruction(result, truth, LABELS[: len(truth)], low=0.0, high=1.0, **settings)


def test_what_the_attack_says_of_its_own_pixels_and_images_follows_them_to_their_truths():
    decided = torch.zeros(3, 3, 16, 16, dtype=torch.bool)
    decided[0], decided[1, 0] = True, True
    certified = torch.tensor([True, False, False])
    result = result_of(IMAGES[[2, 0, 1]], determined=decided, certified=certified)
    metrics = scored(result, floor_image=torch.full((3, 16, 16), 0.5))
    assert metrics["coverage"].value == pytest.approx((1 + 1 / 3) / 4)  # one truth is left without
    assert (metrics["certified"].value, metrics["certified"].detail["count"]) == (0.25, 1)
    assert metrics["certified"].detail["largest_mse_certified"] == 0
    silent = scored(result_of(IMAGES))
    assert silent["coverage"].value is silent["certified"].value is None
    assert "does not say which pixels" in str(silent["coverage"].reason)


def test_a_certificate_that_the_truth_contradicts_is_seen():
    wrong = scored(result_of(1 - IMAGES, certified=torch.ones(4, dtype=torch.bool)))["certified"]
    assert wrong.value == 1 and float(wrong.detail["largest_mse_certified"] or 0) > 0.1


def test_an_image_is_identified_where_it_is_nearer_to_its_truth_than_to_any_other():
    others = torch.rand(50, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    blurred = 0.5 * IMAGES + 0.5 * others[:4]  # as near to one of the others as to the truth
    near, off = 0.6 * IMAGES + 0.4 * others[:4], 0.4 * IMAGES + 0.6 * others[:4]
    metric = scored(result_of(near), other_images=others)["iip"]
    assert (metric.value, metric.detail["size_of_d"], metric.detail["reconstructions"]) == (1.0, 54, 4)
    assert metric.low == pytest.approx(0.025 ** (1 / 4)) and metric.high == 1
    assert scored(result_of(off), other_images=others)["iip"].value == 0
    assert scored(result_of(blurred[:1]), IMAGES[:1], other_images=IMAGES[:1])["iip"].value == 0  # a tie is no hit
    assert scored(result_of(IMAGES))["iip"].value is None
    # Both found the first truth: one of them is matched to the second, which it does not identify.
    assert scored(result_of(IMAGES[[0, 0]]), IMAGES[:2], other_images=others)["iip"].value == 0.5


@pytest.mark.long
def test_identification_by_chance_is_one_in_the_size_of_the_crowd():
    draw = torch.Generator().manual_seed(2)
    truth, others = torch.rand(400, 1, 4, 4, generator=draw), torch.rand(3, 1, 4, 4, generator=draw)
    hits = [
        number(scored(result_of(torch.rand(1, 1, 4, 4, generator=draw)), one[None], other_images=others)["iip"].value)
        for one in truth
    ]
    assert np.mean(hits) == pytest.approx(0.25, abs=0.07)


def test_errors_are_kept_without_clamping_too():
    truth = torch.ones(2, 3, 8, 8)
    metrics = scored(result_of(truth + 0.5), truth)
    assert (metrics["mse"].value, metrics["mse_raw"].value) == (0, pytest.approx(0.25))


def test_the_second_floor_is_the_best_of_as_many_public_images_as_there_were_restarts():
    public = torch.stack([IMAGES[0] * 0 + 0.5, IMAGES[0], IMAGES[1], IMAGES[2], IMAGES[0] * 0])
    one = scored(result_of(IMAGES[:1], restarts=1), IMAGES[:1], public_images=public)["psnr_match"]
    assert one.value == pytest.approx(float(-10 * (IMAGES[0] - 0.5).square().mean().log10()), abs=1e-3)
    two = scored(result_of(IMAGES[:1], restarts=2), IMAGES[:1], public_images=public)["psnr_match"]
    assert (two.value, two.detail["of"]) == (120, 2)
    chosen = best_match(public, IMAGES[[2, 1]], 2, low=0.0, high=1.0)
    assert chosen is not None and torch.equal(chosen[1], IMAGES[1])  # of the third and the fourth
    assert best_match(public, IMAGES, 999, low=0.0, high=1.0) is not None
    assert scored(result_of(IMAGES))["psnr_match"].value is None


def made(gains, floor=12.0):
    """Targets of one image with these PSNRs above both floors."""
    return [
        {
            name: ImageValues(n=1, values=np.array([value]))
            for name, value in (
                ("psnr", floor + gain),
                ("psnr_floor", floor),
                ("psnr_match", floor - 1),
                ("gain_over_mean", gain),
                ("gain_over_match", gain + 1),
            )
        }
        for gain in gains
    ]


def test_a_leak_exceeds_both_floors():
    assert summed_up(made([2.0, 3.0, 2.5, 4.0, 3.0, 1.0, 2.0]))["leak"].value == 1
    mixed = summed_up(made([-0.5, 0.5, -0.3, 0.4, -0.1, 0.2, 0.0]))  # above the match, not above the mean
    assert number(mixed["gain_over_match"].low) > 0 > number(mixed["gain_over_mean"].low)
    assert mixed["leak"].value == 0
    few = summed_up(made([30.0, 5.0]))["leak"]
    assert few.value is None and "undecided: 17.5 dB are gained, and 2 images are too few" in str(few.reason)
    one = summed_up(made([30.0]))["leak"]
    assert (one.value, one.reason) == (None, "one image: a paired test needs two or more")
    public = scored(result_of(IMAGES))["leak"]
    assert (public.value, public.reason) == (None, "there are no public images to guess from")


@pytest.mark.parametrize("n", long_but([2, 4], [2, 4, 6, 10]))
def test_a_guess_is_called_a_leak_as_rarely_as_promised_and_a_real_gain_is_found(n):
    draw = np.random.default_rng(n)
    runs = 250
    noise = draw.normal(size=(runs, n))
    false = np.mean([number(gain_metric(one).low) > 0 for one in noise])
    assert false <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / runs)
    # A gain as large as the one that is said to be detectable, with sd 1.
    one = math.sqrt(1 / n) * (stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1))
    found = np.mean([number(gain_metric(row + one).low) > 0 for row in noise])
    assert 0.65 < found < 0.95


def test_a_bootstrap_of_a_few_images_would_call_luck_a_leak():
    """Why fewer than six are left to Student: of four gains that are all positive no resample is negative."""
    lucky = gain_metric(np.array([0.1, 5.0, 0.3, 9.0]))
    assert number(lucky.low) < 0 and lucky.detail["method"] == "t interval"
    assert "bootstrap" in str(gain_metric(np.arange(6.0)).detail["method"])


def test_targets_are_counted_and_not_their_images():
    """Images of one update share its noise."""
    pair = {"psnr": ImageValues(n=2, values=np.array([10.0, 20.0]), detail={"matched": 2, "status": "ok"})}
    other = {"psnr": ImageValues(n=2, values=np.array([30.0, 50.0]), detail={"matched": 1, "status": "degraded"})}
    metric = summed_up([pair, other])["psnr"]
    assert (metric.value, metric.n) == (27.5, 2)
    assert [metric.detail[key] for key in ("min", "median", "max")] == [10, 25, 50]
    assert (metric.detail["matched"], metric.detail["status"]) == (3, "degraded")
    certain = share_metric([np.ones(5), np.ones(5)])
    assert certain.n == 2 and certain.low == pytest.approx(0.025**0.5)


def test_one_target_that_failed_leaves_no_mean_over_the_easy_ones():
    failed = {name: absent(1, "the attack failed") for name in ("psnr", "gain_over_mean", "gain_over_match")}
    floors = {name: made([1.0])[0][name] for name in ("psnr_floor", "psnr_match")}
    metrics = summed_up([*made([5.0, 6.0]), failed | floors])
    assert metrics["psnr"].value is metrics["leak"].value is None
    assert metrics["psnr_floor"].value == 12 and metrics["leak"].reason == "the attack failed"
