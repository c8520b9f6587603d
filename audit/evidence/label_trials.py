"""Trials at labels: each record of a finished training is shown with its own label or with a proxy's, by a fair coin.

Kalemaj et al., "Observational Auditing of Label Privacy", arXiv:2511.14084: no canary, and no second training. A proxy
models the distribution of labels given the inputs, from other data. If it were exact, the training label and the
proxy's draw would be two draws from the same distribution, and the choice of the shown label a fair coin, independent
of all others: flipping it replaces a label.

Deviation: a proxy is never exact, and its error is counted (own derivation), whereas the reference reports none. Let
tau be the total variation distance between proxy and truth, the mean over records. Both labels of a record come from
the common part of the two distributions with probability (1 - tau)^2; the coins of these records are fair. The other
records are given to the attacker: as many correct guesses are subtracted as there are such records, up to an error rate
that is part of the level. Their number is binomial or, if tau differs between records, below it (Hoeffding 1956,
Theorem 4).
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray
from scipy import stats


def shown_labels(labels: ndarray, proxy: ndarray, *, seed: int) -> tuple[ndarray, ndarray]:
    """Draws the labels shown to the attacker, and the coins.

    Args:
        labels: the training labels, integers [m].
        proxy: probability of each class for each record [m, classes], of a model that saw none of these labels.
        seed: of coins and labels; must be unknown to the scorer.

    Returns:
        The labels shown, int64 [m]; whether each is the training label, bool [m].

    Raises:
        ValueError: for invalid shapes, classes or probabilities.
    """
    labels, proxy = _checked(labels, proxy, "proxy")
    draws = np.random.default_rng(seed)
    included = draws.random(len(labels)) < 0.5
    # At most the last possible class, if probabilities add up to slightly less than 1.
    proxy_labels = np.minimum(
        (proxy.cumsum(axis=1) <= draws.random((len(labels), 1))).sum(axis=1), _last_possible(proxy)
    )
    return np.where(included, labels, proxy_labels), included


def label_scores(target: ndarray, proxy: ndarray, shown: ndarray) -> ndarray:
    """Returns log probability of the shown label by the audited model, minus the proxy's; larger for a training label.

    Args:
        target: probability of each class for each record [m, classes], of the audited model.
        proxy: probabilities of the proxy [m, classes].
        shown: labels [m].

    Raises:
        ValueError: for invalid shapes, classes or probabilities.
    """
    shown, target = _checked(shown, target, "target")
    _, proxy = _checked(shown, proxy, "proxy")
    rows, least = np.arange(len(shown)), np.finfo(np.float64).tiny
    # Probabilities below the smallest float are treated alike: a score has to be finite.
    return np.log(np.maximum(target[rows, shown], least)) - np.log(np.maximum(proxy[rows, shown], least))


def revealed_coins(trials: int, proxy_error: float, level: float) -> int:
    """Returns an upper bound on the number of records whose coin a wrong proxy reveals; it errs at a rate of 1 - level.

    Raises:
        ValueError: if the error is no total variation distance.
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
