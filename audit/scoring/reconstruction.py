"""Metrics of reconstruction (gradient inversion): PSNR, MSE, SSIM, LPIPS and label accuracy of recovered images.

Images are compared on [0, 1]: the box of valid inputs is stretched to it, and what leaves it is clamped. They are
matched to truths by the least total MSE (Hungarian method), so that the order in which an attack returns them does not
matter. There are at most as many as truths: of more the matching would pick the best by the truth, and any pool of
pictures would be a reconstruction. Every PSNR has `psnr_floor` beside it, that of the mean public image, which anybody
can guess without the update: a PSNR above 0 dB is nothing, one above the floor is a leak.

SSIM: Wang, Bovik, Sheikh & Simoncelli, IEEE TIP 2004. LPIPS: Zhang et al., CVPR 2018, AlexNet, version 0.1.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.core import Reconstruction, checked_reconstruction
from leaderboard.metrics import METRICS, Better
from leaderboard.records.record import Metric

from .perceptual import lpips_metric, ssim_metric
from .utility import mean_metric

BETTER: dict[str, Better] = {
    metric.name: metric.better
    for metric in METRICS.values()
    if metric.kind == "reconstruction" and metric.over_attacks == "worst"
}
"""Metric that a failed attack has no value of -> which direction is good for the defender."""

MSE_RESOLUTION = 1e-12
"""A smaller MSE is a PSNR of 120 dB, reported as ">=120": it is below what float32 pixels can tell."""

ONE_IMAGE = "one image"
"""Reason of an absent interval: it would be over images."""


def score_reconstruction(
    result: Reconstruction,
    inputs: Float[Tensor, "n *shape"],
    labels: Int[Tensor, " n"],
    *,
    low: float,
    high: float,
    floor_image: Float[Tensor, "*shape"] | None = None,
    labels_given: bool = False,
    lpips_weights: str | None = None,
) -> dict[str, Metric]:
    """Every reconstruction metric of one attack on one batch.

    Args:
        result: what the attack returned; at most as many inputs as truths.
        inputs: the truth, in model-input units.
        labels: the true classes.
        low: pixel value that is black, in model-input units.
        high: pixel value that is white.
        floor_image: best guess without the update, as the mean public image; unmatched truths score as if it
            had been returned for them.
        labels_given: whether the attacker was told the labels; they are then nothing it recovered.
        lpips_weights: file of AlexNet weights; see `lpips_metric`.

    Returns:
        `psnr`, `mse`, `ssim`, `lpips`, `psnr_floor`, `label_accuracy`, `objective`; what cannot be measured
        has no value and says why.

    Raises:
        ValueError: shapes do not fit, the box is empty, there are more inputs than truths, or truths stay unmatched
            without a floor image.
    """
    result = _checked(result, inputs, labels, low, high)
    truth = _unit(inputs, low, high)
    # Measured also for a failed attack: it is a property of the batch.
    floor = None if floor_image is None else _unit(floor_image, low, high).expand_as(truth)
    floors = {"psnr_floor": _psnr_floor(floor, truth)}
    if result.status == "failed":
        reason = "the attack failed: it reached no finite objective, so its inputs are only the random start"
        return floors | {
            name: Metric(value=None, n=len(truth), better=better, reason=reason) for name, better in BETTER.items()
        }
    found = _unit(result.inputs, low, high)
    recovered, matched = match(found, truth, floor)
    errors = _mse(recovered, truth)
    metrics = {
        **_distances(errors, recovered, truth),
        "lpips": lpips_metric(recovered, truth, lpips_weights),
        "label_accuracy": _label_accuracy(result.labels, labels, labels_given),
        "objective": Metric(
            value=float(result.objective),
            n=len(found),
            better="higher",
            reason="one number for the whole batch, by the attack's own measure",
        ),
    }
    for name in ("psnr", "mse"):
        metrics[name].detail.update(matched=matched, restarts=result.restarts, status=result.status)
    return metrics | floors


def _checked(result: Reconstruction, inputs: Tensor, labels: Tensor, low: float, high: float) -> Reconstruction:
    """A copy of a result that is about this batch."""
    if not low < high:
        raise ValueError(f"low must be below high, got {low} and {high}")
    found = checked_reconstruction(result, len(inputs), inputs)
    if len(inputs) == 0 or len(labels) != len(inputs) or inputs.shape[1:] != found.inputs.shape[1:]:
        raise ValueError(
            f"inputs and labels must be the true batch, of the shape {list(found.inputs.shape)} that was "
            f"reconstructed, got {list(inputs.shape)} and {len(labels)} labels"
        )
    return found


def pictures_again(
    found: Tensor, inputs: Tensor, *, low: float, high: float, floor_image: Tensor | None, failed: bool
) -> dict[str, Metric]:
    """Recomputes, for `--verify`, the metrics that images alone give: `psnr_floor`, and `psnr`, `mse`, `ssim`.

    Args:
        found: at most as many reconstructions as truths, in model-input units.
        inputs: the truth, in the same units.
        low: pixel value that is black.
        high: pixel value that is white.
        floor_image: best guess without the update.
        failed: whether the attack failed; there is only the floor then.
    """
    truth = _unit(inputs, low, high)
    floor = None if floor_image is None else _unit(floor_image, low, high).expand_as(truth)
    metrics = {"psnr_floor": _psnr_floor(floor, truth)}
    if failed:
        return metrics
    recovered, _ = match(_unit(found, low, high), truth, floor)
    return metrics | _distances(_mse(recovered, truth), recovered, truth)


def match(
    found: Float[Tensor, "b *shape"],
    truth: Float[Tensor, "n *shape"],
    floor: Float[Tensor, "n *shape"] | None,
) -> tuple[Float[Tensor, "n *shape"], int]:
    """Gives each truth its reconstruction, by the least total MSE.

    Args:
        found: reconstructed images on [0, 1].
        truth: true images on [0, 1].
        floor: what stands in for truths that are left over; None refuses them.

    Returns:
        One image per truth, in the order of `truth`, and how many of them were matched.

    Raises:
        ValueError: fewer images than truths, and no floor.
    """
    if len(found) < len(truth) and floor is None:
        raise ValueError(
            "floor_image must be given when there are fewer reconstructions than truths, "
            f"got {len(found)} for {len(truth)}"
        )
    # Differences, and not |a|^2 - 2ab + |b|^2, which cancels to nothing where the match is good.
    cost = np.stack([_mse(found, true.expand_as(found)) for true in truth], axis=1)
    rows, columns = linear_sum_assignment(cost)
    # Truths without a match score as the floor does. Without a floor there are none, and the clone is overwritten.
    recovered = truth.clone() if floor is None else floor.clone()
    recovered[torch.as_tensor(columns)] = found[torch.as_tensor(rows)]
    return recovered, len(rows)


def psnr(errors: Float[ndarray, " n"]) -> Float[ndarray, " n"]:
    """Peak signal-to-noise ratio, dB, of images on [0, 1] with these mean squared errors; at most 120."""
    return -10 * np.log10(np.maximum(errors, MSE_RESOLUTION))


def _unit(images: Tensor, low: float, high: float) -> Tensor:
    # float64, so that stretching and squaring add no rounding to that of the pixels; on the CPU, where SciPy matches.
    return ((images.detach().cpu().double() - low) / (high - low)).clamp(0, 1)


def _mse(images: Tensor, truth: Tensor) -> ndarray:
    return (images - truth).square().flatten(1).mean(dim=1).numpy()


def _distances(errors: ndarray, recovered: Tensor, truth: Tensor) -> dict[str, Metric]:
    return {
        "psnr": _psnr(errors),
        "mse": mean_metric(errors, better="higher", one=ONE_IMAGE, least=0.0),
        "ssim": ssim_metric(recovered, truth),
    }


def _psnr(errors: ndarray) -> Metric:
    # The mean of decibels, and not the PSNR of the mean error, which the worst image would decide.
    metric = mean_metric(psnr(errors), better="lower", one=ONE_IMAGE, least=0.0, most=120.0)
    if capped := int((errors < MSE_RESOLUTION).sum()):
        metric.detail.update({">=120": capped})
    return metric


def _psnr_floor(floor: Tensor | None, truth: Tensor) -> Metric:
    if floor is None:
        return Metric(value=None, n=len(truth), better="lower", reason="there are no public images to guess from")
    return _psnr(_mse(floor, truth))


def _label_accuracy(found: Tensor, labels: Tensor, given: bool) -> Metric:
    if given:
        return Metric(value=None, n=len(labels), better="lower", reason="the attacker was given the labels")
    # As multisets: recovered labels are in no order, and a class may be in the batch twice.
    common = Counter(found.tolist()) & Counter(labels.tolist())
    value = sum(common.values()) / len(labels)
    return Metric(value=value, n=len(labels), better="lower", reason="labels of one batch are not independent")


def averaged(scored: list[dict[str, Metric]]) -> dict[str, Metric]:
    """Metrics over separate targets: means, with intervals over targets where there are two or more."""
    if len(scored) == 1:
        return scored[0]
    averaged = {}
    for name, first in scored[0].items():
        values = [metrics[name].value for metrics in scored]
        there = [value for value in values if value is not None]
        # A mean over the targets that worked would be one over the easy ones.
        if len(there) < len(values):
            missing = next(metrics[name] for metrics in scored if metrics[name].value is None)
            averaged[name] = missing
        else:
            averaged[name] = mean_metric(np.array(there), better=first.better, one=ONE_IMAGE)
    return averaged
