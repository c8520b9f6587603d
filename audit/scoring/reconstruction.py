"""Metrics of reconstruction (gradient inversion) of images against the ground truth.

Images are compared on [0, 1]: the valid input range is rescaled to it, and values outside are clamped, except for
`mse_raw`. Reconstructions are matched to truths by the least total MSE (Hungarian method), so their order does not
matter. At most as many are accepted as there are truths: from more, the matching would pick the best by the truth, and
any pool of pictures would be a reconstruction.

Every PSNR is reported with two floors, because 0 dB is not a baseline: `psnr_floor`, the PSNR of the mean public image,
which anybody can guess without the update; and `psnr_match`, that of the best of as many public images as the attack
had restarts, chosen by the truth, because a search with many tries resembles some image by chance. An attack leaks
(`leak`) if it exceeds both significantly. A failed attack has no value in any of these metrics, which does not mean
safety.

SSIM: Wang, Bovik, Sheikh & Simoncelli, IEEE TIP 2004. LPIPS: Zhang et al., CVPR 2018, AlexNet, version 0.1.
Identifiability (`iip`): Yin et al., CVPR 2021, here by pixels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakbench.attacks.core import Reconstruction, checked_reconstruction
from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.record import Metric, Record

from .choice import choices_again
from .images import MSE_RESOLUTION, ImageValues, absent, summed_up
from .perceptual import lpips_values, ssim_values

NO_PUBLIC = "there are no public images to guess from"


def score_reconstruction(
    result: Reconstruction,
    inputs: Float[Tensor, "n *shape"],
    labels: Int[Tensor, " n"],
    *,
    low: float,
    high: float,
    floor_image: Float[Tensor, "*shape"] | None = None,
    public_images: Float[Tensor, "m *shape"] | None = None,
    other_images: Float[Tensor, "k *shape"] | None = None,
    labels_given: bool = False,
    lpips_weights: str | None = None,
) -> dict[str, Metric]:
    """Returns every reconstruction metric of an attack on a batch.

    Args:
        result: the attack's result; at most as many inputs as truths.
        inputs: the ground truth, in model-input units.
        labels: the true classes.
        low: pixel value of black, in model-input units.
        high: pixel value of white.
        floor_image: best guess without the update, such as the mean public image; the reconstruction assigned to
            unmatched truths.
        public_images: in an order independent of the truth; the best of a few for each truth is the second floor.
        other_images: images that the truth is distinguished from, chosen independently of it.
        labels_given: whether the attacker was given the labels; they then do not count as recovered.
        lpips_weights: file of AlexNet weights; see `lpips_values`.

    Returns:
        The metrics of kind "reconstruction"; an unmeasurable metric has no value but a reason.

    Raises:
        ValueError: shapes do not fit, the input range is empty, there are more inputs than truths, or truths stay
            unmatched without a floor image.
    """
    compared = compare(
        result,
        inputs,
        labels,
        low=low,
        high=high,
        floor_image=floor_image,
        match_images=best_match(public_images, inputs, result.restarts, low=low, high=high),
        other_images=other_images,
        labels_given=labels_given,
        lpips_weights=lpips_weights,
    )
    return summed_up([compared])


def compare(
    result: Reconstruction,
    inputs: Float[Tensor, "n *shape"],
    labels: Int[Tensor, " n"],
    *,
    low: float,
    high: float,
    floor_image: Float[Tensor, "*shape"] | None = None,
    match_images: Float[Tensor, "n *shape"] | None = None,
    other_images: Float[Tensor, "k *shape"] | None = None,
    labels_given: bool = False,
    lpips_weights: str | None = None,
) -> dict[str, ImageValues]:
    """Returns the metrics of a target, image by image.

    Args:
        result: the attack's result.
        inputs: the ground truth, in model-input units.
        labels: the true classes.
        low: pixel value of black, in model-input units.
        high: pixel value of white.
        floor_image: best guess without the update.
        match_images: result of `best_match`, an image per truth.
        other_images: images that the truth is distinguished from.
        labels_given: whether the attacker was given the labels.
        lpips_weights: file of AlexNet weights.

    Raises:
        ValueError: as in `score_reconstruction`.
    """
    result = _checked(result, inputs, labels, low, high)
    failed = result.status == "failed"
    image_values = compare_pictures(
        result.inputs, inputs, low=low, high=high, floor_image=floor_image, match_images=match_images, failed=failed
    )
    n = len(inputs)
    if match_images is not None:
        image_values["psnr_match"].detail.update(of=_tries(result.restarts))
    if failed:
        return {
            name: image_values.get(name, absent(n, _FAILED))
            for name, metric in METRICS.items()
            # These follow from the others, or from the ledger, or concern a choice among candidates.
            if metric.kind == "reconstruction" and name not in ("leak", "rero_bound", "prior_success")
        }
    pair = Matched.of(result.inputs, inputs, low=low, high=high, floor_image=floor_image)
    image_values["lpips"] = lpips_values(pair.recovered, pair.truth, lpips_weights)
    image_values["label_accuracy"] = _label_accuracy(result.labels, labels, labels_given)
    # The attack's objective is a single number for the whole batch.
    image_values["objective"] = ImageValues(
        n=len(result.inputs),
        values=np.array([result.objective]),
        reason="one number for the whole batch, by the attack's own measure",
        detail={} if result.residual_ratio is None else {"residual_ratio": result.residual_ratio},
    )
    image_values["iip"] = _identified(pair, other_images, low, high)
    image_values |= _claimed_by_attack(result, pair)
    for name in ("psnr", "mse"):
        image_values[name].detail.update(matched=len(pair.columns), restarts=result.restarts, status=result.status)
    return image_values


def compare_pictures(
    pictures: Tensor,
    inputs: Tensor,
    *,
    low: float,
    high: float,
    floor_image: Tensor | None,
    match_images: Tensor | None,
    failed: bool,
) -> dict[str, ImageValues]:
    """Returns the metrics that follow from pictures alone, which `--verify` recomputes.

    Args:
        pictures: at most as many reconstructions as truths, in model-input units.
        inputs: the ground truth, in the same units.
        low: pixel value of black.
        high: pixel value of white.
        floor_image: best guess without the update.
        match_images: the best public match of each truth.
        failed: whether the attack failed; only the floors exist then, which are properties of the batch.
    """
    n, truth = len(inputs), unit(inputs, low, high)
    guesses = {
        "psnr_floor": None if floor_image is None else unit(floor_image, low, high).expand_as(truth),
        "psnr_match": None if match_images is None else unit(match_images, low, high),
    }
    floors = {
        name: absent(n, NO_PUBLIC) if guess is None else _decibels(_mse(guess, truth))
        for name, guess in guesses.items()
    }
    if failed:
        return floors
    pair = Matched.of(pictures, inputs, low=low, high=high, floor_image=floor_image)
    errors = _mse(pair.recovered, truth)
    main = _decibels(errors)
    gains = {
        gain: absent(n, NO_PUBLIC)
        if main.values is None or (floor := floors[name].values) is None
        else ImageValues(n=n, values=main.values - floor)
        for gain, name in (("gain_over_mean", "psnr_floor"), ("gain_over_match", "psnr_match"))
    }
    return {
        "psnr": main,
        "mse": ImageValues(n=n, values=errors),
        "mse_raw": ImageValues(n=n, values=_mse(pair.raw, _stretched(inputs, low, high))),
        "ssim": ssim_values(pair.recovered, truth),
        **gains,
        **floors,
    }


class Matched:
    """Reconstructions in the order of the truths they were matched to.

    Attributes:
        truth: true images on [0, 1].
        recovered: an image per truth, on [0, 1]; the floor if unmatched.
        raw: the same, rescaled but not clamped.
        rows: indices of the matched reconstructions ...
        columns: ... and of their truths.
    """

    def __init__(self, truth: Tensor, recovered: Tensor, raw: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Stores a finished matching; see `of`."""
        self.truth, self.recovered, self.raw, self.rows, self.columns = truth, recovered, raw, rows, columns

    @classmethod
    def of(cls, pictures: Tensor, inputs: Tensor, *, low: float, high: float, floor_image: Tensor | None) -> Matched:
        """Matches reconstructions to truths, both in model-input units."""
        truth = unit(inputs, low, high)
        floor = None if floor_image is None else unit(floor_image, low, high).expand_as(truth)
        recovered, rows, columns = match(unit(pictures, low, high), truth, floor)
        raw = recovered.clone()
        raw[columns] = _stretched(pictures, low, high)[rows]
        return cls(truth, recovered, raw, rows, columns)


def match(
    pictures: Float[Tensor, "b *shape"],
    truth: Float[Tensor, "n *shape"],
    floor: Float[Tensor, "n *shape"] | None,
) -> tuple[Float[Tensor, "n *shape"], Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Assigns a reconstruction to each truth, by the least total MSE.

    Args:
        pictures: reconstructed images on [0, 1].
        truth: true images on [0, 1].
        floor: images for unmatched truths; None refuses them.

    Returns:
        One image per truth, in the order of `truth`; and the matched indices of reconstructions and of truths.

    Raises:
        ValueError: fewer images than truths, and no floor.
    """
    if len(pictures) < len(truth) and floor is None:
        raise ValueError(
            "floor_image must be given when there are fewer reconstructions than truths, "
            f"got {len(pictures)} for {len(truth)}"
        )
    rows, columns = (torch.as_tensor(indices) for indices in linear_sum_assignment(_squares(pictures, truth).numpy()))
    # Unmatched truths score like the floor. Without a floor there are none, and the clone is overwritten.
    recovered = truth.clone() if floor is None else floor.clone()
    recovered[columns] = pictures[rows]
    return recovered, rows, columns


def best_match(
    public: Float[Tensor, "m *shape"] | None, inputs: Float[Tensor, "n *shape"], tries: int, *, low: float, high: float
) -> Float[Tensor, "n *shape"] | None:
    """Returns the best of some public images for each truth: the success of as many blind tries.

    Args:
        public: in an order independent of the truth; each truth takes the next ones, cyclically.
        inputs: the ground truth, in model-input units.
        tries: number for each truth; at least one, at most all.
        low: pixel value of black.
        high: pixel value of white.

    Returns:
        One public image per truth, in model-input units; None without public images.
    """
    if public is None or len(public) == 0:
        return None
    n, tries = len(inputs), min(_tries(tries), len(public))
    chosen = (torch.arange(n)[:, None] * tries + torch.arange(tries)) % len(public)
    public = public.detach().cpu()
    errors = (unit(public, low, high)[chosen] - unit(inputs, low, high)[:, None]).square().flatten(2).mean(dim=2)
    return public[chosen[torch.arange(n), errors.argmin(dim=1)]]


def _tries(restarts: int) -> int:
    return max(1, restarts)


def psnr(errors: Float[ndarray, " n"]) -> Float[ndarray, " n"]:
    """Returns the peak signal-to-noise ratio, dB, of images on [0, 1] with these mean squared errors; at most 120."""
    return -10 * np.log10(np.maximum(errors, MSE_RESOLUTION))


def unit(images: Tensor, low: float, high: float) -> Tensor:
    """Returns images rescaled to [0, 1] and clamped, in float64 on the CPU."""
    return _stretched(images, low, high).clamp(0, 1)


def _stretched(images: Tensor, low: float, high: float) -> Tensor:
    # float64, so that rescaling and squaring add no rounding to that of the pixels; on the CPU, where SciPy matches.
    return (images.detach().cpu().double() - low) / (high - low)


def _checked(result: Reconstruction, inputs: Tensor, labels: Tensor, low: float, high: float) -> Reconstruction:
    """Returns a copy of a result after checking that it fits this batch."""
    if not low < high:
        raise ValueError(f"low must be below high, got {low} and {high}")
    checked = checked_reconstruction(result, len(inputs), inputs)
    if len(inputs) == 0 or len(labels) != len(inputs) or inputs.shape[1:] != checked.inputs.shape[1:]:
        raise ValueError(
            f"inputs and labels must be the true batch, of the shape {list(checked.inputs.shape)} that was "
            f"reconstructed, got {list(inputs.shape)} and {len(labels)} labels"
        )
    return checked


def _mse(images: Tensor, truth: Tensor) -> ndarray:
    return (images - truth).square().flatten(1).mean(dim=1).numpy()


def _squares(images: Tensor, others: Tensor) -> Tensor:
    """Returns the mean squared difference of each image to each of `others`."""
    # By differences, because |a|^2 - 2ab + |b|^2 cancels catastrophically for good matches.
    distances = torch.cdist(images.flatten(1), others.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square() / images[0].numel() if len(images) else distances


def _decibels(errors: ndarray) -> ImageValues:
    # Image by image: the PSNR of the mean error would be dominated by the worst image.
    capped = int((errors < MSE_RESOLUTION).sum())
    return ImageValues(n=len(errors), values=psnr(errors), detail={">=120": capped} if capped else {})


def _label_accuracy(recovered: Tensor, labels: Tensor, granted: bool) -> ImageValues:
    if granted:
        return absent(len(labels), "the attacker was given the labels")
    # Compared as multisets: recovered labels have no order, and a class may be in the batch twice.
    common = Counter(recovered.tolist()) & Counter(labels.tolist())
    value = sum(common.values()) / len(labels)
    reason = "labels of one batch are not independent"
    return ImageValues(n=len(labels), values=np.array([value]), reason=reason)


def _identified(pair: Matched, others: Tensor | None, low: float, high: float) -> ImageValues:
    """Returns 1 for each reconstruction nearer to its truth than to any other image of D: all truths, and `others`."""
    if others is None or len(others) == 0:
        return absent(len(pair.truth), "there are no other images that the truth would have to be told from")
    if len(pair.rows) == 0:
        return absent(len(pair.truth), "nothing was reconstructed")
    reconstructions = pair.recovered[pair.columns]
    crowd = torch.cat([pair.truth, unit(others, low, high)])
    distances = _squares(reconstructions, crowd)
    own = distances[torch.arange(len(reconstructions)), pair.columns].clone()
    distances[torch.arange(len(reconstructions)), pair.columns] = torch.inf
    # Strictly nearer: an image equal to its truth and to another image identifies neither.
    hits = (own < distances.min(dim=1).values).double().numpy()
    detail: dict[str, float | int | str | None] = {"size_of_d": len(crowd), "reconstructions": len(reconstructions)}
    return ImageValues(n=len(reconstructions), values=hits, detail=detail)


def _claimed_by_attack(result: Reconstruction, pair: Matched) -> dict[str, ImageValues]:
    """Returns the attack's own statements: the fraction of pixels that the update determines, and certified images."""
    n = len(pair.truth)
    coverage = absent(n, "the attack does not say which pixels the update decides")
    certified = absent(n, "the attack proves none of its images, right or wrong")
    if result.determined is not None:
        shares = np.zeros(n)  # a truth without a reconstruction has no determined pixels
        shares[pair.columns.numpy()] = result.determined[pair.rows].cpu().flatten(1).double().mean(dim=1).numpy()
        coverage = ImageValues(n=n, values=shares)
    if result.certified is not None:
        flags = torch.zeros(n, dtype=torch.bool)
        flags[pair.columns] = result.certified[pair.rows].cpu()
        # A certificate contradicted by the truth is an error of the attack, and must be visible.
        errors = _mse(pair.raw, pair.truth)[flags.numpy()]
        worst = float(errors.max()) if len(errors) else None
        certified = ImageValues(n=n, values=flags.double().numpy(), detail={"largest_mse_certified": worst})
    return {"coverage": coverage, "certified": certified}


_FAILED = "the attack failed: it reached no finite objective, so its inputs are only the random start"


def again(record: Record, table: Any) -> dict[str, Metric]:
    """Recomputes, for `--verify`, the metrics of a record from its arrays."""
    if "picked" in table:
        return choices_again(record, table)
    if record.task.input_range is None or (shape := record.task.input_shape) is None:
        raise ValueError("its task has no shape and range of inputs")
    low, high = record.task.input_range

    def pictures(cells: Iterable[Any]) -> torch.Tensor:
        arrays = [np.asarray(cell, dtype=np.float32) for cell in cells if cell is not None]
        return torch.from_numpy(np.stack(arrays) if arrays else np.zeros((0, math.prod(shape)), "f4")).reshape(
            -1, *shape
        )

    def _all(images: torch.Tensor, rows: int) -> torch.Tensor | None:
        return images if len(images) == rows else None

    # The same image for all targets, in the first row.
    guess = pictures(table["floor"])
    scored = [
        compare_pictures(
            pictures(group["reconstruction"]),
            pictures(group["original"]),
            low=low,
            high=high,
            floor_image=guess[0] if len(guess) else None,
            # Without public images the column is empty.
            match_images=_all(pictures(group["public_match"]), len(group)),
            failed="failed" in record.flags,  # of at least one target: then there is no mean over all to compare
        )
        for _, group in table.groupby("target", sort=True)
    ]
    return summed_up(scored)
