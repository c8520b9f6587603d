"""Metrics of reconstruction (gradient inversion) of images against the truth.

Images are compared on [0, 1]: the box of valid inputs is stretched to it, and what leaves it is clamped, but for
`mse_raw`. They are matched to truths by the least total MSE (Hungarian method), so that the order in which an attack
returns them does not matter. There are at most as many as truths: of more the matching would pick the best by the
truth, and any pool of pictures would be a reconstruction.

Two floors stand beside every PSNR, because above 0 dB is nothing: `psnr_floor`, that of the mean public image, which
anybody can guess without the update; and `psnr_match`, that of the best of as many public images as the attack had
restarts, chosen by the truth, for a search that tries often looks like somebody by chance. An attack leaks (`leak`)
where it exceeds both significantly. A failed attack has no value in any of these, which is not safety.

SSIM: Wang, Bovik, Sheikh & Simoncelli, IEEE TIP 2004. LPIPS: Zhang et al., CVPR 2018, AlexNet, version 0.1.
Identifiability (`iip`): Yin et al., CVPR 2021, here by pixels.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakbench.attacks.core import Reconstruction, checked_reconstruction
from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.record import Metric

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
    """Every reconstruction metric of one attack on one batch.

    Args:
        result: what the attack returned; at most as many inputs as truths.
        inputs: the truth, in model-input units.
        labels: the true classes.
        low: pixel value that is black, in model-input units.
        high: pixel value that is white.
        floor_image: best guess without the update, as the mean public image; unmatched truths score as if it
            had been returned for them.
        public_images: in an order that no truth decided; of the first ones the best is the second floor.
        other_images: images that the truth has to be told from, chosen without looking at it.
        labels_given: whether the attacker was told the labels; they are then nothing it recovered.
        lpips_weights: file of AlexNet weights; see `lpips_values`.

    Returns:
        The metrics of kind "reconstruction"; what cannot be measured has no value and says why.

    Raises:
        ValueError: shapes do not fit, the box is empty, there are more inputs than truths, or truths stay unmatched
            without a floor image.
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
    """The metrics of one target, image by image.

    Args:
        result: what the attack returned.
        inputs: the truth, in model-input units.
        labels: the true classes.
        low: pixel value that is black, in model-input units.
        high: pixel value that is white.
        floor_image: best guess without the update.
        match_images: for each truth what `best_match` chose.
        other_images: images that the truth has to be told from.
        labels_given: whether the attacker was told the labels.
        lpips_weights: file of AlexNet weights.

    Raises:
        ValueError: as of `score_reconstruction`.
    """
    result = _checked(result, inputs, labels, low, high)
    failed = result.status == "failed"
    found = compare_pictures(
        result.inputs, inputs, low=low, high=high, floor_image=floor_image, match_images=match_images, failed=failed
    )
    n = len(inputs)
    if match_images is not None:
        found["psnr_match"].detail.update(of=_tries(result.restarts))
    if failed:
        return {
            name: found.get(name, absent(n, _FAILED))
            for name, metric in METRICS.items()
            # Those follow from the others, or from the ledger, or are about a choice among candidates.
            if metric.kind == "reconstruction" and name not in ("leak", "rero_bound", "prior_success")
        }
    pair = Matched.of(result.inputs, inputs, low=low, high=high, floor_image=floor_image)
    found["lpips"] = lpips_values(pair.recovered, pair.truth, lpips_weights)
    found["label_accuracy"] = _label_accuracy(result.labels, labels, labels_given)
    # What the attack minimised is one number for the whole batch.
    found["objective"] = ImageValues(
        n=len(result.inputs),
        values=np.array([result.objective]),
        reason="one number for the whole batch, by the attack's own measure",
        detail={} if result.residual_ratio is None else {"residual_ratio": result.residual_ratio},
    )
    found["iip"] = _identified(pair, other_images, low, high)
    found |= _claimed_by_attack(result, pair)
    for name in ("psnr", "mse"):
        found[name].detail.update(matched=len(pair.columns), restarts=result.restarts, status=result.status)
    return found


def compare_pictures(
    found: Tensor,
    inputs: Tensor,
    *,
    low: float,
    high: float,
    floor_image: Tensor | None,
    match_images: Tensor | None,
    failed: bool,
) -> dict[str, ImageValues]:
    """The metrics that pictures alone give, which `--verify` computes again.

    Args:
        found: at most as many reconstructions as truths, in model-input units.
        inputs: the truth, in the same units.
        low: pixel value that is black.
        high: pixel value that is white.
        floor_image: best guess without the update.
        match_images: for each truth the best public match.
        failed: whether the attack failed; there are only the floors then, which are properties of the batch.
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
    pair = Matched.of(found, inputs, low=low, high=high, floor_image=floor_image)
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
        recovered: one image a truth, on [0, 1]; the floor where none was matched.
        raw: the same, stretched and not clamped.
        rows: which reconstruction was matched ...
        columns: ... to which truth.
    """

    def __init__(self, truth: Tensor, recovered: Tensor, raw: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Holds a matching that was made; see `of`."""
        self.truth, self.recovered, self.raw, self.rows, self.columns = truth, recovered, raw, rows, columns

    @classmethod
    def of(cls, found: Tensor, inputs: Tensor, *, low: float, high: float, floor_image: Tensor | None) -> Matched:
        """Matches reconstructions to truths, both in model-input units."""
        truth = unit(inputs, low, high)
        floor = None if floor_image is None else unit(floor_image, low, high).expand_as(truth)
        recovered, rows, columns = match(unit(found, low, high), truth, floor)
        raw = recovered.clone()
        raw[columns] = _stretched(found, low, high)[rows]
        return cls(truth, recovered, raw, rows, columns)


def match(
    found: Float[Tensor, "b *shape"],
    truth: Float[Tensor, "n *shape"],
    floor: Float[Tensor, "n *shape"] | None,
) -> tuple[Float[Tensor, "n *shape"], Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Gives each truth its reconstruction, by the least total MSE.

    Args:
        found: reconstructed images on [0, 1].
        truth: true images on [0, 1].
        floor: what stands in for truths that are left over; None refuses them.

    Returns:
        One image per truth, in the order of `truth`; and which reconstructions went to which truths.

    Raises:
        ValueError: fewer images than truths, and no floor.
    """
    if len(found) < len(truth) and floor is None:
        raise ValueError(
            "floor_image must be given when there are fewer reconstructions than truths, "
            f"got {len(found)} for {len(truth)}"
        )
    rows, columns = (torch.as_tensor(one) for one in linear_sum_assignment(_squares(found, truth).numpy()))
    # Truths without a match score as the floor does. Without a floor there are none, and the clone is overwritten.
    recovered = truth.clone() if floor is None else floor.clone()
    recovered[columns] = found[rows]
    return recovered, rows, columns


def best_match(
    public: Float[Tensor, "m *shape"] | None, inputs: Float[Tensor, "n *shape"], tries: int, *, low: float, high: float
) -> Float[Tensor, "n *shape"] | None:
    """The best of some public images for each truth: what as many blind tries may come to.

    Args:
        public: in an order that no truth decided; each truth takes the next ones, from the start again at the end.
        inputs: the truth, in model-input units.
        tries: how many for each truth; at least one, at most all.
        low: pixel value that is black.
        high: pixel value that is white.

    Returns:
        One public image a truth, in model-input units; None without public images.
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
    """Peak signal-to-noise ratio, dB, of images on [0, 1] with these mean squared errors; at most 120."""
    return -10 * np.log10(np.maximum(errors, MSE_RESOLUTION))


def unit(images: Tensor, low: float, high: float) -> Tensor:
    """Images on [0, 1], in float64 on the CPU; what leaves the box is clamped."""
    return _stretched(images, low, high).clamp(0, 1)


def _stretched(images: Tensor, low: float, high: float) -> Tensor:
    # float64, so that stretching and squaring add no rounding to that of the pixels; on the CPU, where SciPy matches.
    return (images.detach().cpu().double() - low) / (high - low)


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


def _mse(images: Tensor, truth: Tensor) -> ndarray:
    return (images - truth).square().flatten(1).mean(dim=1).numpy()


def _squares(images: Tensor, others: Tensor) -> Tensor:
    """Mean squared difference of every image to every other one."""
    # By differences, and not |a|^2 - 2ab + |b|^2, which cancels to nothing where the match is good.
    distances = torch.cdist(images.flatten(1), others.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square() / images[0].numel() if len(images) else distances


def _decibels(errors: ndarray) -> ImageValues:
    # Image by image: their mean is not the PSNR of the mean error, which the worst image would decide.
    capped = int((errors < MSE_RESOLUTION).sum())
    return ImageValues(n=len(errors), values=psnr(errors), detail={">=120": capped} if capped else {})


def _label_accuracy(found: Tensor, labels: Tensor, given: bool) -> ImageValues:
    if given:
        return absent(len(labels), "the attacker was given the labels")
    # As multisets: recovered labels are in no order, and a class may be in the batch twice.
    common = Counter(found.tolist()) & Counter(labels.tolist())
    value = sum(common.values()) / len(labels)
    reason = "labels of one batch are not independent"
    return ImageValues(n=len(labels), values=np.array([value]), reason=reason)


def _identified(pair: Matched, others: Tensor | None, low: float, high: float) -> ImageValues:
    """1 for each reconstruction that is nearer to its truth than to any other image of D, truths of others included."""
    if others is None or len(others) == 0:
        return absent(len(pair.truth), "there are no other images that the truth would have to be told from")
    if len(pair.rows) == 0:
        return absent(len(pair.truth), "nothing was reconstructed")
    found = pair.recovered[pair.columns]
    crowd = torch.cat([pair.truth, unit(others, low, high)])
    distances = _squares(found, crowd)
    own = distances[torch.arange(len(found)), pair.columns].clone()
    distances[torch.arange(len(found)), pair.columns] = torch.inf
    # Strictly nearer: an image that is the same as its truth and as another one tells nobody apart.
    hits = (own < distances.min(dim=1).values).double().numpy()
    detail: dict[str, float | int | str | None] = {"size_of_d": len(crowd), "reconstructions": len(found)}
    return ImageValues(n=len(found), values=hits, detail=detail)


def _claimed_by_attack(result: Reconstruction, pair: Matched) -> dict[str, ImageValues]:
    """What the attack says of its own result: the share of pixels the update decides, and images that it proves."""
    n = len(pair.truth)
    coverage = absent(n, "the attack does not say which pixels the update decides")
    certified = absent(n, "the attack proves none of its images, right or wrong")
    if result.determined is not None:
        shares = np.zeros(n)  # of a truth without a reconstruction nothing is decided
        shares[pair.columns.numpy()] = result.determined[pair.rows].cpu().flatten(1).double().mean(dim=1).numpy()
        coverage = ImageValues(n=n, values=shares)
    if result.certified is not None:
        flags = torch.zeros(n, dtype=torch.bool)
        flags[pair.columns] = result.certified[pair.rows].cpu()
        # A certificate that the truth contradicts is a mistake of the attack, and must be seen.
        errors = _mse(pair.raw, pair.truth)[flags.numpy()]
        worst = float(errors.max()) if len(errors) else None
        certified = ImageValues(n=n, values=flags.double().numpy(), detail={"largest_mse_certified": worst})
    return {"coverage": coverage, "certified": certified}


_FAILED = "the attack failed: it reached no finite objective, so its inputs are only the random start"
