"""Two-sample test for a shift between members and non-members, based on data alone, without the model.

A membership attack is evaluated by how well it separates members from non-members. If these differ in distribution, as
with a separately collected test set used as non-members, a score may separate the two sets without using membership.
Lopez-Paz & Oquab, "Revisiting Classifier Two-Sample Tests", ICLR 2017: a classifier is trained to separate half of the
two samples, and ranks the other half; Das et al., "Blind Baselines Beat Membership Inference Attacks for Foundation
Models", 2024, on the consequences of omitting such a test. Deviation: the two halves swap roles.

Two properties change every loss, yet hardly change the ranking of such a classifier. Each has a test of its own: the
shares of labels, and how hard labels are to predict from inputs. The latter is measured by a classifier fitted to
examples of both samples, without being told which sample they are from, and evaluated on examples that it was not
fitted to. It detects a sample of which a tenth of the labels is wrong, or of the images mirrored.

Guarantee:
    Given a classifier, the ranks of the held-out half are exchangeable under equal distributions, so a permutation test
    of their AUC has its level for any classifier (Phipson & Smyth, 2010). Labels, and statistics of them computed
    without regard to the samples, are exchangeable, too. The smallest p-value, times the number of tests, has the same
    level (Bonferroni, here with weights).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy import ndarray
from scipy import stats
from torch import Tensor

from leakbench.attacks.core import Examples

LEVEL = 0.01
"""Significance level: without a shift, one split in a hundred is flagged."""

LARGEST = 1000
"""Largest number of examples per sample for the two-sample classifier, drawn by the seed."""

_LARGEST_OF_HARD = 2000
"""Largest number of examples per sample for the test of hard labels."""

LEAST = 40
"""Smallest number of examples per sample: with fewer a classifier learns nothing."""

_COMPONENTS = 32
_WIDE = 4096
"""Dimension of an input above which it is projected at random before principal components are computed."""
_PROJECTED = 512
_ROWS = 64
"""Wide inputs per chunk in the computation of their statistics."""
_PERMUTATIONS = 4000
_DRAWN = 200
"""Permutations in memory at a time."""
_FOLDS = 5
_KEPT = 64
_NEIGHBOURS = 10
_FEWEST = 10
"""Smallest average number of examples per class for the test of hard labels."""


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Evidence of a shift between members and non-members, without the model.

    Attributes:
        p_value: of the hypothesis that members and non-members are exchangeable, by three tests jointly; None with
            fewer than `LEAST` of either.
        auc: of the classifier on held-out examples, mean of both halves; None with too few.
        members: number of members tested.
        non_members: number of non-members tested.
        detectable: AUC that would be flagged in four cases of five, so that a negative result can be read; None with
            too few.
        by: the test with the least p-value.
    """

    p_value: float | None
    auc: float | None
    members: int
    non_members: int
    detectable: float | None
    by: Literal["classifier", "labels", "hard labels"] = "classifier"

    @property
    def words(self) -> str:
        """The difference between the two samples, in words."""
        if self.by == "labels":
            return f"their labels alone have other shares, p {self.p_value:.2g}"
        if self.by == "hard labels":
            return f"labels of one are harder to tell from its inputs, p {self.p_value:.2g}"
        return f"a classifier that never saw it has an AUC of {self.auc:.2f}, p {self.p_value:.2g}"

    @property
    def found(self) -> bool:
        """True if members and non-members differ significantly."""
        return self.p_value is not None and self.p_value < LEVEL

    def to_detail(self) -> dict[str, float | int | str | None]:
        """Returns the fields in the form of a metric's detail."""
        return {
            "shift_p_value": self.p_value,
            "shift_auc": self.auc,
            "shift_detectable_auc": self.detectable,
            "shift_by": None if self.p_value is None else self.by,
            "shift_examples": self.members + self.non_members,
        }


def shift_between(members: Examples, non_members: Examples, *, seed: int = 0) -> Shift:
    """Tests whether two samples have the same distribution, by inputs and labels.

    Args:
        members: sample from the private pool.
        non_members: the comparison sample.
        seed: for the choice of examples, halves and permutations.
    """
    draw = np.random.default_rng([seed, 0])
    inside, outside = (features_of(_subsample(part, draw)) for part in (members, non_members))
    p, q = len(inside), len(outside)
    if min(p, q) < LEAST:
        return Shift(p_value=None, auc=None, members=p, non_members=q, detectable=None)
    labelled = [_subsample(part, np.random.default_rng([seed, 2]), _LARGEST_OF_HARD) for part in (members, non_members)]
    features, truth = np.concatenate([inside, outside]), np.arange(p + q) < p
    halves = _halves(truth, draw)
    # Imported here because it takes a second, which tests without members can save.
    from threadpoolctl import threadpool_limits

    # Single-threaded: each job has one core, and multi-threaded sums round in a varying order.
    with threadpool_limits(limits=1):
        judged = [_judged(features, truth, fit_on=halves == half, seed=seed) for half in (False, True)]
        hard = _of_hard_labels(labelled[0], labelled[1], seed)
    areas, values = zip(*judged, strict=True)
    labels = of_labels(*(_numbers(part) for part in (members, non_members)))
    # Half of the level is for labels, which the weakest attack uses, and a quarter for each of the others.
    tests = {"labels": 2 * labels, "classifier": 4 * 2 * min(values), "hard labels": 4 * hard}
    by: Any = min(tests, key=lambda name: tests[name])
    # For a half, at a quarter of the level shared by both halves; 0.8 is four cases of five.
    deviation = math.sqrt((p + q) / 2 / (12 * (p / 2) * (q / 2)))
    needed = (stats.norm.isf(LEVEL / 8) + stats.norm.isf(0.2)) * deviation
    return Shift(
        p_value=min(1.0, tests[by]),
        by=by,
        auc=float(np.mean(areas)),
        members=p,
        non_members=q,
        detectable=min(1.0, 0.5 + float(needed)),
    )


def features_of(examples: Examples) -> ndarray:
    """Returns features of examples, one row each: labels, a few statistics of the inputs, and the inputs.

    Wide inputs are replaced by random projections (Johnson & Lindenstrauss), the same for all examples and drawn
    independently of them: their principal components are nearly those of the inputs, at a tenth of the time and memory.
    """
    inputs = examples.inputs.detach().cpu().flatten(1)
    labels = examples.labels.detach().cpu().double().reshape(len(inputs), -1)
    if inputs.shape[1] <= _WIDE:
        whole = inputs.double().nan_to_num()
        return torch.cat([labels, _statistics(whole), whole], dim=1).numpy()
    statistics = torch.cat([_statistics(part.double().nan_to_num()) for part in inputs.split(_ROWS)])
    projected, generator = torch.zeros(len(inputs), _PROJECTED), torch.Generator().manual_seed(0)
    for part in inputs.split(_WIDE, dim=1):
        # Projection axes of some columns at a time: all of them would exceed the size of the inputs.
        projected += part.float().nan_to_num() @ torch.randn(part.shape[1], _PROJECTED, generator=generator)
    return torch.cat([labels, statistics, projected.double() / math.sqrt(_PROJECTED)], dim=1).numpy()


def _statistics(inputs: Tensor) -> Tensor:
    """Returns mean, deviation, ends, zeros, roughness and distance from bytes of each row, [n, 7]."""
    # Rounding, compression and cropping are more visible in these than in any single pixel.
    columns = [
        inputs.mean(1), inputs.std(1, unbiased=False), inputs.amin(1), inputs.amax(1), (inputs == 0).double().mean(1),
        inputs.diff(dim=1).abs().mean(1) if inputs.shape[1] > 1 else inputs[:, 0],
        (inputs * 255).sub((inputs * 255).round()).abs().mean(1),
    ]  # fmt: skip
    return torch.stack(columns, dim=1)


_OWN = 8
"""Number of leading columns that are not inputs, if a label is a single number: the label and seven statistics."""


def of_labels(values: ndarray, others: ndarray) -> float:
    """Returns the p-value of a permutation test for equal label distributions; valid for small counts.

    The statistic is that of the chi-square test.

    Args:
        values: labels of one sample.
        others: labels of the other.
    """
    whole = np.concatenate([values, others])
    _, places, counts = np.unique(whole, return_inverse=True, return_counts=True)
    if len(counts) == 1:
        return 1.0
    draw, table = np.random.default_rng(0), np.zeros((1 + _PERMUTATIONS, len(counts)))
    table[0] = np.bincount(places[: len(values)], minlength=len(counts))
    # Counts in a random part of all labels are hypergeometric.
    table[1:] = draw.multivariate_hypergeometric(counts, len(values), size=_PERMUTATIONS)
    expected = counts * len(values) / len(whole)
    distances = (((table - expected) ** 2) / counts).sum(1)
    return float((distances >= distances[0] - 1e-12).sum() / (1 + _PERMUTATIONS))


def _of_hard_labels(members: Examples, non_members: Examples, seed: int) -> float:
    """Returns the p-value of a test that labels of both samples are equally hard to predict from inputs.

    The statistic is the mean of 1 - p over a sample, p the probability of an example's own label under a classifier
    fitted to other examples of both samples. The result is twice the smaller of two p-values: nearest neighbours detect
    few outliers, and a linear classifier a small shift of many examples.
    """
    kinds, labels = np.unique(np.concatenate([_numbers(members), _numbers(non_members)]), return_inverse=True)
    if len(kinds) == 1 or len(kinds) > len(labels) / _FEWEST:
        return 1.0
    features = np.concatenate([features_of(part)[:, 1:] for part in (members, non_members)])
    statistics, inputs = features[:, : _OWN - 1], _components(features[:, _OWN - 1 :], seed)
    linear = _missed(np.hstack([statistics, inputs]), labels, seed)
    missed = np.stack([_missed_by_neighbours(inputs, labels), linear])
    expected = missed.mean(axis=1) * len(members)
    reached = np.abs(missed[:, : len(members)].sum(axis=1) - expected)
    draw, as_far = np.random.default_rng([seed, 4]), np.zeros(len(missed))
    inside = (np.arange(len(labels)) < len(members)).astype(float)
    for _ in range(0, _PERMUTATIONS, _DRAWN):
        chosen = draw.permuted(np.broadcast_to(inside, (_DRAWN, len(inside))), axis=1)
        as_far += (np.abs(chosen @ missed.T - expected) >= reached - 1e-9).sum(axis=0)
    return min(1.0, len(missed) * float(1 + as_far.min()) / (1 + _PERMUTATIONS))


def _components(inputs: ndarray, seed: int) -> ndarray:
    """Returns inputs, or their principal components if high-dimensional; independent of membership."""
    from sklearn.decomposition import PCA

    if inputs.shape[1] <= _KEPT or np.ptp(inputs, axis=0).max() == 0:
        return inputs
    most = min(_KEPT, len(inputs) - 1)
    return PCA(most, svd_solver="randomized", random_state=seed).fit_transform(inputs)


def _missed_by_neighbours(inputs: ndarray, labels: ndarray) -> ndarray:
    """Returns the fraction of the nearest other examples with a different label, [n] in [0, 1]."""
    from sklearn.neighbors import NearestNeighbors

    # Without query points: an example is then not among its own neighbours.
    near = NearestNeighbors(n_neighbors=_NEIGHBOURS, algorithm="brute").fit(inputs).kneighbors(return_distance=False)
    return (labels[near] != labels[:, None]).mean(axis=1)


def _missed(features: ndarray, labels: ndarray, seed: int) -> ndarray:
    """Returns 1 - p of each example's own label under linear classifiers fitted to the other folds, in [0, 1]."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    parts, missed = np.random.default_rng([seed, 3]).permutation(len(labels)) % _FOLDS, np.ones(len(labels))
    for part in range(_FOLDS):
        fitted, held_out = parts != part, parts == part
        if len(np.unique(labels[fitted])) < 2:
            continue
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=100))
        with warnings.catch_warnings(action="ignore"):  # about convergence, which does not affect validity
            model.fit(features[fitted], labels[fitted])
        places = np.searchsorted(model.classes_, labels[held_out]).clip(max=len(model.classes_) - 1)
        known = model.classes_[places] == labels[held_out]
        missed[held_out] = 1 - model.predict_proba(features[held_out])[np.arange(len(places)), places] * known
    return missed


def _numbers(examples: Examples) -> ndarray:
    """Returns labels as class numbers [n]; for probabilities, the class of the largest."""
    labels = examples.labels.detach().cpu()
    return (labels if labels.ndim == 1 else labels.flatten(1).argmax(1)).numpy()


def _subsample(examples: Examples, draw: np.random.Generator, most: int = LARGEST) -> Examples:
    chosen = torch.from_numpy(draw.permutation(len(examples))[:most]).to(examples.ids.device)
    return Examples(ids=examples.ids[chosen], inputs=examples.inputs[chosen], labels=examples.labels[chosen])


def _halves(truth: ndarray, draw: np.random.Generator) -> ndarray:
    """Returns a random half of each sample, as a mask."""
    second = np.zeros(len(truth), dtype=bool)
    for kind in (True, False):
        places = draw.permutation(np.flatnonzero(truth == kind))
        second[places[: len(places) // 2]] = True
    return second


def _judged(features: ndarray, truth: ndarray, *, fit_on: ndarray, seed: int) -> tuple[float, float]:
    """Returns the AUC on one half of a classifier fitted to the other, and the p-value of a permutation test."""
    from sklearn.decomposition import PCA
    from sklearn.ensemble import HistGradientBoostingClassifier

    fitted, held_out = features[fit_on], features[~fit_on]
    columns = features.shape[1] - _OWN
    if np.ptp(fitted[:, _OWN:], axis=0).max() == 0:
        # Constant inputs have no components: PCA would divide by their zero variance.
        fitted, held_out = fitted[:, :_OWN], held_out[:, :_OWN]
    elif columns > _COMPONENTS:
        components = PCA(min(_COMPONENTS, len(fitted) - 1), random_state=seed).fit(fitted[:, _OWN:])
        fitted, held_out = (
            np.hstack([part[:, :_OWN], components.transform(part[:, _OWN:])]) for part in (fitted, held_out)
        )
    # No validation set: scikit-learn makes one by default from 10,000 examples on.
    model = HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=8, random_state=seed)
    ranks = stats.rankdata(model.fit(fitted, truth[fit_on]).predict_proba(held_out)[:, 1])
    members = truth[~fit_on]
    p, q = int(members.sum()), int((~members).sum())
    reached = float(ranks[members].sum())
    draw, as_large = np.random.default_rng([seed, 1]), 0
    for _ in range(0, _PERMUTATIONS, _DRAWN):
        shuffled = draw.permuted(np.broadcast_to(ranks, (_DRAWN, len(ranks))), axis=1)
        as_large += int((shuffled[:, :p].sum(axis=1) >= reached - 1e-9).sum())
    return (reached - p * (p + 1) / 2) / (p * q), (1 + as_large) / (1 + _PERMUTATIONS)
