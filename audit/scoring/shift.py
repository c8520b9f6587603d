"""Whether members and non-members differ by themselves: a two-sample test of what is known without the model.

A membership attack is measured by telling members from non-members. Where these are not of one distribution, as where a
test set collected apart stands in for non-members, a score may tell the two sets apart and know nothing of membership.
Lopez-Paz & Oquab, "Revisiting Classifier Two-Sample Tests", ICLR 2017: a classifier learns to tell the two samples on
one half of them, and ranks the other half; Das et al., "Blind Baselines Beat Membership Inference Attacks for
Foundation Models", 2024, for what comes of not asking. Deviation: both halves take their turn.

Two things move every loss, and are a small part of what such a classifier looks at. So they are asked about by
themselves: labels alone, and how hard labels are to tell from inputs, by a classifier that is fitted to examples of
both samples, never told which is which, and asked about those that it was not fitted to. A tenth of wrong labels, or of
mirrored images, in one sample shows there.

Guarantee:
    Given a classifier, the ranks of the half that it has not seen are exchangeable under one distribution, so a
    permutation test of their AUC errs with its level whatever the classifier is (Phipson & Smyth, 2010). Labels, and
    what is said of them without regard to the samples, are exchangeable, too. The least of p-values, times their
    number, errs no more often (Bonferroni, here with
    weights).
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
"""A p-value below it is flagged: of a hundred splits without a shift, one is."""

LARGEST = 1000
"""Examples of each kind that the classifier of samples looks at, drawn by the seed."""

_LARGEST_OF_HARD = 2000
"""Examples of each kind of which it is asked how hard their labels are."""

LEAST = 40
"""Of each kind: with fewer a classifier learns nothing."""

_COMPONENTS = 32
_WIDE = 4096
"""Numbers of an input, above which it is projected at random before components are sought."""
_PROJECTED = 512
_ROWS = 64
"""Of wide inputs, whose statistics are computed together."""
_PERMUTATIONS = 4000
_DRAWN = 200
"""Permutations in memory at once."""
_FOLDS = 5
_KEPT = 64
_NEIGHBOURS = 10
_FEWEST = 10
"""Examples a class, on average: with fewer nothing is said of how hard labels are."""


@dataclass(frozen=True, kw_only=True)
class Shift:
    """What can be told of membership without the model.

    Attributes:
        p_value: of exchangeable members and non-members, by three tests together; None with fewer than `LEAST` of
            either.
        auc: of the classifier on examples that it was not fitted to, mean of both halves; None with too few.
        members: looked at.
        non_members: looked at.
        detectable: AUC that would be flagged in four cases of five, so that silence can be read; None with too few.
        by: which test says so: the least p-value.
    """

    p_value: float | None
    auc: float | None
    members: int
    non_members: int
    detectable: float | None
    by: Literal["classifier", "labels", "hard labels"] = "classifier"

    @property
    def words(self) -> str:
        """What tells the two apart."""
        if self.by == "labels":
            return f"their labels alone have other shares, p {self.p_value:.2g}"
        if self.by == "hard labels":
            return f"labels of one are harder to tell from its inputs, p {self.p_value:.2g}"
        return f"a classifier that never saw it has an AUC of {self.auc:.2f}, p {self.p_value:.2g}"

    @property
    def found(self) -> bool:
        """Whether members and non-members differ."""
        return self.p_value is not None and self.p_value < LEVEL

    def to_detail(self) -> dict[str, float | int | str | None]:
        """As a metric's detail has it."""
        return {
            "shift_p_value": self.p_value,
            "shift_auc": self.auc,
            "shift_detectable_auc": self.detectable,
            "shift_by": None if self.p_value is None else self.by,
            "shift_examples": self.members + self.non_members,
        }


def shift_between(members: Examples, non_members: Examples, *, seed: int = 0) -> Shift:
    """Tests whether two samples are of one distribution, by inputs and labels.

    Args:
        members: of the private pool.
        non_members: that stand beside them.
        seed: of the choice of examples, halves and permutations.
    """
    draw = np.random.default_rng([seed, 0])
    inside, outside = (features_of(_some(part, draw)) for part in (members, non_members))
    p, q = len(inside), len(outside)
    if min(p, q) < LEAST:
        return Shift(p_value=None, auc=None, members=p, non_members=q, detectable=None)
    labelled = [_some(part, np.random.default_rng([seed, 2]), _LARGEST_OF_HARD) for part in (members, non_members)]
    features, truth = np.concatenate([inside, outside]), np.arange(p + q) < p
    halves = _halves(truth, draw)
    # Here because it takes a second, and who asks about no members does without.
    from threadpoolctl import threadpool_limits

    # One thread: jobs have a core each, and sums of several are rounded in an order of their own.
    with threadpool_limits(limits=1):
        found = [_judged(features, truth, fit_on=halves == half, seed=seed) for half in (False, True)]
        hard = _of_hard_labels(labelled[0], labelled[1], seed)
    areas, values = zip(*found, strict=True)
    labels = of_labels(*(_numbers(part) for part in (members, non_members)))
    # Half of the level is for labels, which the weakest attack follows, and a quarter for each of the others.
    tests = {"labels": 2 * labels, "classifier": 4 * 2 * min(values), "hard labels": 4 * hard}
    by: Any = min(tests, key=lambda name: tests[name])
    # Of a half, at a quarter of the level that both halves share; 0.8 is four cases of five.
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
    """What anybody sees of examples: inputs, a few of their statistics, labels; one row each.

    Of wide inputs there are random projections instead (Johnson & Lindenstrauss), the same for all examples and drawn
    without them: components of these are nearly those of the inputs, at a tenth of the time and the memory.
    """
    inputs = examples.inputs.detach().cpu().flatten(1)
    labels = examples.labels.detach().cpu().double().reshape(len(inputs), -1)
    if inputs.shape[1] <= _WIDE:
        whole = inputs.double().nan_to_num()
        return torch.cat([labels, _statistics(whole), whole], dim=1).numpy()
    told = torch.cat([_statistics(part.double().nan_to_num()) for part in inputs.split(_ROWS)])
    projected, coins = torch.zeros(len(inputs), _PROJECTED), torch.Generator().manual_seed(0)
    for part in inputs.split(_WIDE, dim=1):
        # Axes of some columns at a time: all of them would outweigh the inputs.
        projected += part.float().nan_to_num() @ torch.randn(part.shape[1], _PROJECTED, generator=coins)
    return torch.cat([labels, told, projected.double() / math.sqrt(_PROJECTED)], dim=1).numpy()


def _statistics(inputs: Tensor) -> Tensor:
    """Mean, deviation, ends, zeros, roughness and distance from bytes of each row, [n, 7]."""
    # Rounding, compression and cropping show in these sooner than in any one pixel.
    found = [
        inputs.mean(1), inputs.std(1, unbiased=False), inputs.amin(1), inputs.amax(1), (inputs == 0).double().mean(1),
        inputs.diff(dim=1).abs().mean(1) if inputs.shape[1] > 1 else inputs[:, 0],
        (inputs * 255).sub((inputs * 255).round()).abs().mean(1),
    ]  # fmt: skip
    return torch.stack(found, dim=1)


_OWN = 8
"""Leading columns that are no inputs, where a label is one number."""


def of_labels(some: ndarray, others: ndarray) -> float:
    """P-value of labels of one distribution: chi-square among permutations, which needs no large counts.

    Args:
        some: labels of one sample.
        others: labels of the other.
    """
    whole = np.concatenate([some, others])
    _, places, counts = np.unique(whole, return_inverse=True, return_counts=True)
    if len(counts) == 1:
        return 1.0
    draw, table = np.random.default_rng(0), np.zeros((1 + _PERMUTATIONS, len(counts)))
    table[0] = np.bincount(places[: len(some)], minlength=len(counts))
    # Of a random part of all labels the counts are those of balls drawn without replacement.
    table[1:] = draw.multivariate_hypergeometric(counts, len(some), size=_PERMUTATIONS)
    expected = counts * len(some) / len(whole)
    distances = (((table - expected) ** 2) / counts).sum(1)
    return float((distances >= distances[0] - 1e-12).sum() / (1 + _PERMUTATIONS))


def _of_hard_labels(members: Examples, non_members: Examples, seed: int) -> float:
    """P-value of labels that are equally hard to tell from inputs, by classifiers that know no membership.

    The mean of 1 - p over a sample, for the probability p that an example's own label is given by a classifier fitted
    to other examples of both samples. The lesser of two p-values, doubled: neighbours see the few that lie apart, and a
    linear classifier what many have a little of.
    """
    kinds, labels = np.unique(np.concatenate([_numbers(members), _numbers(non_members)]), return_inverse=True)
    if len(kinds) == 1 or len(kinds) > len(labels) / _FEWEST:
        return 1.0
    features = np.concatenate([features_of(part)[:, 1:] for part in (members, non_members)])
    told, inputs = features[:, : _OWN - 1], _components(features[:, _OWN - 1 :], seed)
    linear = _missed(np.hstack([told, inputs]), labels, seed)
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
    """Inputs, or principal components of all of them where they are many numbers, which no membership decides."""
    from sklearn.decomposition import PCA

    if inputs.shape[1] <= _KEPT or np.ptp(inputs, axis=0).max() == 0:
        return inputs
    most = min(_KEPT, len(inputs) - 1)
    return PCA(most, svd_solver="randomized", random_state=seed).fit_transform(inputs)


def _missed_by_neighbours(inputs: ndarray, labels: ndarray) -> ndarray:
    """Share of the nearest other examples that have another label, [n] in [0, 1]."""
    from sklearn.neighbors import NearestNeighbors

    # Of nobody in particular: an example is not among its own neighbours.
    near = NearestNeighbors(n_neighbors=_NEIGHBOURS, algorithm="brute").fit(inputs).kneighbors(return_distance=False)
    return (labels[near] != labels[:, None]).mean(axis=1)


def _missed(features: ndarray, labels: ndarray, seed: int) -> ndarray:
    """What linear classifiers fitted to the other parts lack of certainty in each example's own label, in [0, 1]."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    parts, missed = np.random.default_rng([seed, 3]).permutation(len(labels)) % _FOLDS, np.ones(len(labels))
    for part in range(_FOLDS):
        fitted, asked = parts != part, parts == part
        if len(np.unique(labels[fitted])) < 2:
            continue
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=100))
        with warnings.catch_warnings(action="ignore"):  # that it has not converged, which makes it no less valid
            model.fit(features[fitted], labels[fitted])
        places = np.searchsorted(model.classes_, labels[asked]).clip(max=len(model.classes_) - 1)
        known = model.classes_[places] == labels[asked]
        missed[asked] = 1 - model.predict_proba(features[asked])[np.arange(len(places)), places] * known
    return missed


def _numbers(examples: Examples) -> ndarray:
    """Labels as numbers of classes [n]; of probabilities the largest's."""
    labels = examples.labels.detach().cpu()
    return (labels if labels.ndim == 1 else labels.flatten(1).argmax(1)).numpy()


def _some(examples: Examples, draw: np.random.Generator, most: int = LARGEST) -> Examples:
    chosen = torch.from_numpy(draw.permutation(len(examples))[:most]).to(examples.ids.device)
    return Examples(ids=examples.ids[chosen], inputs=examples.inputs[chosen], labels=examples.labels[chosen])


def _halves(truth: ndarray, draw: np.random.Generator) -> ndarray:
    """Half of each kind, at random."""
    second = np.zeros(len(truth), dtype=bool)
    for kind in (True, False):
        places = draw.permutation(np.flatnonzero(truth == kind))
        second[places[: len(places) // 2]] = True
    return second


def _judged(features: ndarray, truth: ndarray, *, fit_on: ndarray, seed: int) -> tuple[float, float]:
    """AUC on one half of a classifier fitted to the other, and the p-value of a permutation test."""
    from sklearn.decomposition import PCA
    from sklearn.ensemble import HistGradientBoostingClassifier

    seen, asked = features[fit_on], features[~fit_on]
    columns = features.shape[1] - _OWN
    if np.ptp(seen[:, _OWN:], axis=0).max() == 0:
        # Constant inputs have no components: PCA would divide by their variance.
        seen, asked = seen[:, :_OWN], asked[:, :_OWN]
    elif columns > _COMPONENTS:
        components = PCA(min(_COMPONENTS, len(seen) - 1), random_state=seed).fit(seen[:, _OWN:])
        seen, asked = (np.hstack([part[:, :_OWN], components.transform(part[:, _OWN:])]) for part in (seen, asked))
    # Without a validation set by default: scikit-learn makes one from 10,000 examples on.
    model = HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=8, random_state=seed)
    ranks = stats.rankdata(model.fit(seen, truth[fit_on]).predict_proba(asked)[:, 1])
    members = truth[~fit_on]
    p, q = int(members.sum()), int((~members).sum())
    reached = float(ranks[members].sum())
    draw, as_large = np.random.default_rng([seed, 1]), 0
    for _ in range(0, _PERMUTATIONS, _DRAWN):
        shuffled = draw.permuted(np.broadcast_to(ranks, (_DRAWN, len(ranks))), axis=1)
        as_large += int((shuffled[:, :p].sum(axis=1) >= reached - 1e-9).sum())
    return (reached - p * (p + 1) / 2) / (p * q), (1 + as_large) / (1 + _PERMUTATIONS)
