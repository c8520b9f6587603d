"""Trials at labels: each record of a finished training is shown with its own label or with a proxy's, by a fair coin.

Kalemaj et al., "Observational Auditing of Label Privacy", arXiv:2511.14084: no canary, and no second training. A proxy
says how labels are distributed given the inputs, from other data. Were it exact, the training label and the one that it
draws were two draws of one distribution, and which of them is shown a fair coin, independent of all others: to turn it
round is to replace one label.

Deviation: a proxy is never exact, and its error is counted (own derivation) where the reference reports none. Let tau
be the distance in total variation between proxy and truth, the mean over records. Both labels of a record come from
what the two distributions have in common with chance (1 - tau)^2; the coins of these records are fair. The others are
given to the attacker: as many correct guesses are taken away as there are such records, up to an error rate that is
part of the level. Their number is binomial or, where tau differs between records, below it (Hoeffding 1956, Theorem 4).
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray
from scipy import stats


def shown_labels(labels: ndarray, proxy: ndarray, *, seed: int) -> tuple[ndarray, ndarray]:
    """Labels that the attacker is shown, and the coins.

    Args:
        labels: that were trained on, integers [m].
        proxy: probability of each class for each record [m, classes], of a model that saw none of these labels.
        seed: of coins and labels, which nobody who scores may know.

    Returns:
        The labels shown, int64 [m]; whether each is the one that was trained on, bool [m].

    Raises:
        ValueError: shapes, classes or probabilities that are none.
    """
    labels, proxy = _checked(labels, proxy, "proxy")
    draws = np.random.default_rng(seed)
    included = draws.random(len(labels)) < 0.5
    # Of the last class at most, where probabilities add up to a little less than 1.
    other = np.minimum((proxy.cumsum(axis=1) <= draws.random((len(labels), 1))).sum(axis=1), _last_possible(proxy))
    return np.where(included, labels, other), included


def label_scores(target: ndarray, proxy: ndarray, shown: ndarray) -> ndarray:
    """Log probability of the label shown by the audited model, less that by the proxy; larger for a training label.

    Args:
        target: probability of each class for each record [m, classes], of the audited model.
        proxy: the same of the proxy.
        shown: labels [m].

    Raises:
        ValueError: shapes, classes or probabilities that are none.
    """
    shown, target = _checked(shown, target, "target")
    _, proxy = _checked(shown, proxy, "proxy")
    rows, least = np.arange(len(shown)), np.finfo(np.float64).tiny
    # Below the smallest float all are alike: a score has to be finite.
    return np.log(np.maximum(target[rows, shown], least)) - np.log(np.maximum(proxy[rows, shown], least))


def given_away(trials: int, proxy_error: float, level: float) -> int:
    """The most records whose coin a wrong proxy gives away, but for an error rate of 1 - level.

    Raises:
        ValueError: the error is no distance in total variation.
    """
    if not 0 <= proxy_error <= 1:
        raise ValueError(f"proxy_error must be a distance in total variation, in [0, 1], got {proxy_error}")
    share = 1 - (1 - proxy_error) ** 2
    return min(trials, max(int(stats.binom.ppf(level, trials, share)), math.ceil(trials * share)))


def _last_possible(proxy: ndarray) -> ndarray:
    return proxy.shape[1] - 1 - np.argmax(proxy[:, ::-1] > 0, axis=1)


def _checked(labels: ndarray, probabilities: ndarray, name: str) -> tuple[ndarray, ndarray]:
    labels, probabilities = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"{name} must be probabilities of classes, [m, classes], one row a label, got "
            f"{list(probabilities.shape)} for labels {list(labels.shape)}"
        )
    if not (probabilities >= 0).all() or not np.allclose(probabilities.sum(axis=1), 1, atol=1e-4):
        raise ValueError(f"{name} must be probabilities that add up to 1 in each row, got others or NaN")
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= probabilities.shape[1]:
        raise ValueError(f"labels must be integers in [0, {probabilities.shape[1] - 1}], got others")
    return labels.astype(np.int64), probabilities
