"""Per-image metrics, before they are aggregated over one or several targets.

Images of the same update share that update's noise, so with several targets the unit is the target: means of targets
are averaged, and intervals are over targets. For a single target they are over its images, conditional on its noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy import ndarray
from scipy import stats

from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.details import Detail, GainDetail
from leakbench.leaderboard.records.record import Metric

from .utility import mean_metric

ONE_IMAGE = "one image"
"""Reason of an absent interval, which would be over images."""

MSE_RESOLUTION = 1e-12
"""Smaller MSEs give a PSNR of 120 dB, reported as ">=120": they are below the resolution of float32 pixels."""

RESAMPLES = 9999
"""Bootstrap resamples; odd, so that both ends are order statistics."""

LEAST_FOR_BOOTSTRAP = 6
"""Smallest n for the bootstrap. With n positive gains every resample mean is positive; by chance all are positive with
probability 2^-n, which exceeds the 2.5 % of one side for n < 6."""

POWER = 0.8
"""Power: probability of finding a gain as large as `detectable`."""


@dataclass(frozen=True, kw_only=True)
class ImageValues:
    """A metric on the images of a target, or the reason why it has no values.

    Attributes:
        n: number of images, whether or not they were measured.
        values: one per image, or one for the whole target; None if not measured.
        reason: reason why there are no values, or no interval.
        detail: additional values.
    """

    n: int
    values: ndarray | None = None
    reason: str = ""
    detail: dict[str, float | int | str | None] = field(default_factory=dict)


def absent(n: int, reason: str) -> ImageValues:
    """Returns a metric that was not measured."""
    return ImageValues(n=n, reason=reason)


def summed_up(targets: Sequence[dict[str, ImageValues]]) -> dict[str, Metric]:
    """Returns every metric aggregated over targets, and the verdict whether they leak.

    Args:
        targets: metric -> its values, for each target; all with the same metrics, at least one target.
    """
    metrics = {name: _summary(name, [target[name] for target in targets]) for name in targets[0]}
    if {"gain_over_mean", "gain_over_match"} <= metrics.keys():
        metrics["leak"] = leak_verdict(metrics["gain_over_mean"], metrics["gain_over_match"])
    return metrics


def leak_verdict(over_mean: Metric, over_match: Metric) -> Metric:
    """Returns 1 if both floors are exceeded significantly, 0 if not, n/a if undecidable.

    A large gain on too few images for significance is undecidable, too. Both floors must be exceeded, each at its own
    95 %, which needs no correction for two tests (intersection-union).

    Args:
        over_mean: PSNR gained over the mean public image.
        over_match: PSNR gained over the best public match.
    """
    for gain in (over_mean, over_match):
        if gain.value is None or gain.low is None:
            reason = gain.reason or "no interval"
            if gain.value is not None:
                reason = f"{reason}: a paired test needs two or more"
            return Metric(value=None, n=gain.n, better="lower", reason=reason)
    lows = [gain.low for gain in (over_mean, over_match) if gain.low is not None]
    least, margin = min(gain.value or 0.0 for gain in (over_mean, over_match)), METRICS["psnr"].floor
    if min(lows) <= 0 and margin is not None and least > margin.margin:
        # A gain so large that "no leak" would only reflect too few images.
        reason = f"undecided: {least:.1f} dB are gained, and {over_mean.n} images are too few to tell them from chance"
        return Metric(value=None, n=over_mean.n, better="lower", reason=reason)
    return Metric(
        value=float(min(lows) > 0),
        n=over_mean.n,
        better="lower",
        reason="a verdict",
        detail=Detail({"gain_over_mean": over_mean.value, "gain_over_match": over_match.value}),
    )


def gain_metric(values: ndarray) -> Metric:
    """Returns the mean of paired differences, with a 95 % interval and the smallest detectable mean.

    With `LEAST_FOR_BOOTSTRAP` images or more, the interval is a percentile bootstrap over images, at levels that
    correct for its narrowness in small samples (Hesterberg 2015, "expanded percentile"); with fewer, it is Student's t.

    Args:
        values: a difference per image, in dB; at least one, finite.
    """
    n, value = len(values), float(np.mean(values))
    if n == 1:
        return Metric(value=value, n=1, better="lower", reason=ONE_IMAGE)
    error = float(np.std(values, ddof=1) / np.sqrt(n))
    quantile = float(stats.t.ppf(0.975, n - 1))
    # Two-sided at 95 %, with power POWER: both quantiles refer to the same standard error.
    detail = {
        "detectable": (quantile + float(stats.t.ppf(POWER, n - 1))) * error,
        "power": POWER,
        "min": float(np.min(values)),
        "median": float(np.median(values)),
        "max": float(np.max(values)),
    }
    if n < LEAST_FOR_BOOTSTRAP:
        ends, method = (value - quantile * error, value + quantile * error), "t interval"
    else:
        # A fixed seed: the same images give the same verdict, also when a record is verified.
        chosen = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
        level = float(stats.norm.cdf(-np.sqrt(n / (n - 1)) * quantile))
        ends = np.quantile(values[chosen].mean(axis=1), [level, 1 - level])
        method = f"paired bootstrap, {RESAMPLES} resamples"
    low, high = min(float(ends[0]), value), max(float(ends[1]), value)
    return Metric(value=value, low=low, high=high, n=n, better="lower", detail=GainDetail(detail | {"method": method}))


def share_metric(parts: Sequence[ndarray]) -> Metric:
    """Returns a proportion of images with its Clopper-Pearson interval.

    Args:
        parts: for each target, 1 for an image that counts, else 0.
    """
    hits, images = float(sum(part.sum() for part in parts)), sum(len(part) for part in parts)
    value = hits / images
    # Images of the same update share its noise: with several targets each counts once, for any number of images.
    n = images if len(parts) == 1 else len(parts)
    low = 0.0 if value == 0 else float(stats.beta.ppf(0.025, value * n, (1 - value) * n + 1))
    high = 1.0 if value == 1 else float(stats.beta.ppf(0.975, value * n + 1, (1 - value) * n))
    detail = Detail({"count": round(hits), "of": images, "method": "Clopper-Pearson"})
    return Metric(value=value, low=low, high=high, n=n, better="lower", detail=detail)


def _summary(name: str, parts: Sequence[ImageValues]) -> Metric:
    known = METRICS[name]
    # A mean over the successful targets would be a mean over the easy ones.
    if missing := next((part for part in parts if part.values is None), None):
        return Metric(value=None, n=sum(part.n for part in parts), better=known.better, reason=missing.reason)
    values = [part.values for part in parts if part.values is not None]
    means = np.array([part.mean() for part in values])
    several = len(parts) > 1
    if name in _OF_TARGET and not several:
        only = parts[0]
        detail = Detail(only.detail)
        return Metric(value=float(means[0]), n=only.n, better=known.better, reason=only.reason, detail=detail)
    if name in _SHARES:
        metric = share_metric(values)
    elif name in _GAINS:
        metric = gain_metric(means if several else values[0])
    else:
        counted = means if several else values[0]
        most = -10 * np.log10(MSE_RESOLUTION) if known.unit == "dB" else known.most
        metric = mean_metric(counted, better=known.better, single=ONE_IMAGE, least=known.least, most=float(most))
    images, added = np.concatenate(values), {}
    if several and name not in _SHARES:
        # Over single images, also if a target has several.
        added = {"min": float(images.min()), "median": float(np.median(images)), "max": float(images.max())}
    return replace(metric, detail=metric.detail | added | _joined([part.detail for part in parts]))


def _joined(details: Sequence[dict[str, float | int | str | None]]) -> dict[str, float | int | str | None]:
    """Merges details of all targets: counts are added; for other keys the largest, or worst, value is kept."""
    merged: dict[str, float | int | str | None] = {}
    for key in dict.fromkeys(key for detail in details for key in detail):
        values = [value for detail in details if (value := detail.get(key)) is not None]
        numbers = [value for value in values if not isinstance(value, str)]
        # Strings: the worse of several statuses, otherwise the common value.
        words = [value for value in values if isinstance(value, str)]
        merged[key] = (
            next((word for word in words if word != "ok"), words[0])
            if words
            else (sum(numbers) if key in _ADDED else max(numbers))
            if numbers
            else None
        )
    return merged


_ADDED = ("matched", ">=120", "reconstructions")
_SHARES, _GAINS = ("iip", "certified", "prior_success"), ("gain_over_mean", "gain_over_match")
_OF_TARGET = ("label_accuracy", "objective")
