"""Label recovery: the classes in a batch and their counts, from the gradient of the last layer.

Zhao, Mopuri & Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020 (arXiv:2001.02610), for one example; for
batches Geng et al., "Towards General Deep Leakage in Federated Learning", 2021 (arXiv:2110.09074), who put the model's
mean probability in place of the batch's. The equations are in `core/closed_form/label_counts.py`.

One example without noise: exact, and under a mask a set of possible labels. A batch: n_c = B pbar_c - u_c / fbar, with
u_c the last bias's gradient, pbar the mean probabilities and fbar the mean clip factor, both of public examples;
rounded by largest remainders. Under noise a class is named only if its count is above 0 by a test at a level that all
classes share, so that an update of noise names none. A release that is not coordinates of the gradient is compared with
the releases of public examples under each label: non-negative least squares over these prototypes.

Deviation: counts come with an interval, from the clip factors of public examples, three standard deviations of the
batch's mean probability, and the noise. Without noise a count is at least -u_c for certain, whatever the public
examples, because no clip factor is above 1 and no probability below 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from .core import (
    Access,
    InconsistentObservation,
    Knows,
    LabelEstimate,
    NotApplicable,
    Observation,
    RankDeficient,
    Structure,
    attack,
    granted,
)
from .core.closed_form.label_counts import (
    LastLayer,
    class_sums,
    largest_remainder,
    last_layer,
    normal_quantile,
    possible_labels,
)

_ROWS = 2**26
"""Entries of public examples' contributions that are computed at a time, 256 MiB in float32."""


@dataclass(frozen=True, kw_only=True)
class _Public:
    """Statistics of public examples that estimate those of a batch.

    Attributes:
        mean: mean probabilities [classes].
        spread: their standard deviations over examples.
        share: share of each class among the labels, none 0.
        factors: their clip factors [n].
        features: mean of the last layer's inputs, times the clip factors.
    """

    mean: Tensor
    spread: Tensor
    share: Tensor
    factors: Tensor
    features: Tensor


@attack(access=Access.UPDATE, knows=Knows.BATCH_SIZE | Knows.POPULATION | Knows.DEFENSE)
def label_recovery(
    target: Observation, generator: torch.Generator, *, level: float = 0.05, public: int = 256
) -> LabelEstimate:
    """Counts the classes of a batch by the gradient of the last layer.

    Args:
        target: a shared update and the model it was taken at.
        generator: not used.
        level: probability that noise names a class that is not there, over all classes.
        public: largest number of public examples that are used.

    Returns:
        Counts that add up to the batch size; under noise and masks to less, if some labels remain unknown.

    Raises:
        NotApplicable: nothing in the update separates classes.
        InconsistentObservation: without noise, no batch of this size gives this update.
        ValueError: a setting out of range.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    if public < 1:
        raise ValueError(f"public must be at least 1, got {public}")
    batch = granted(target.batch_size)
    sums, std = target.released.double() * target.expected_batch, granted(target.noise_std).double()
    z = normal_quantile(level / target.classes)
    structure = None if target.structure is None else target.structure()
    try:
        if structure is None:
            raise NotApplicable("the structure of the update must be known")
        layer = last_layer(structure, sums)
    except NotApplicable:
        return _by_prototypes(target, sums, std, batch, z, public)
    noise = last_layer(structure, std)
    noise = replace(noise, weight=noise.weight.abs(), bias=noise.bias.abs())
    noisy = bool(noise.weight.any() or noise.bias.any())
    if batch == 1 and not noisy:
        return _single(possible_labels(layer), layer, target)
    return _by_sums(layer, noise, _of_public(target, structure, public), batch, z, noisy=noisy)


def _single(possible: Tensor, layer: LastLayer, target: Observation) -> LabelEstimate:
    """Returns the label of a batch of size 1, or its possible labels."""
    if bool(possible.all()):
        raise NotApplicable(
            f"what was released of the last layer must leave fewer than all {len(possible)} labels, and it leaves all"
        )
    named = int(possible.sum()) == 1
    counts = (possible & named).long()
    share = _shares(granted(target.population).labels, len(possible)).to(layer.bias) * possible
    return LabelEstimate(
        counts=counts,
        lower=counts,
        upper=possible.long(),
        observed=layer.observed | ~possible,
        posterior=share / share.sum(),
        status="ok" if named else "degraded",
    )


def _shares(labels: Tensor, classes: int) -> Tensor:
    """Returns the share of each class among public labels, none 0."""
    known = torch.bincount(labels, minlength=classes).double() + 1
    return known / known.sum()


def _by_sums(
    layer: LastLayer, noise: LastLayer, public: _Public, batch: int, z: float, *, noisy: bool
) -> LabelEstimate:
    """Counts labels by the sums over the batch of p_c - 1[c = y]."""
    sums, std, known = class_sums(layer, noise, public.features)
    low, high, factor = public.factors.amin(), public.factors.amax(), public.factors.mean()
    expected = torch.where(known, batch * public.mean - sums / factor, 0.0)
    error = ((std / factor).square() + batch * public.spread.square()).sqrt()
    least = torch.zeros_like(expected)
    # Slack for rounding, so that -u = 3.0000001 is no fourth example.
    rounding = 1e-4 * (1 + sums.abs())
    if not noisy:
        sure = layer.bias_observed & (sums < -1e-6 * sums.abs().max())
        # If the bound may also lengthen a gradient, as normalisation does, only the sign is certain.
        certain = (-sums - rounding).ceil().clamp(min=1) if float(high) <= 1 + 1e-6 else torch.ones_like(sums)
        least = torch.where(sure, certain, least)
        if int(least.sum()) > batch:
            raise InconsistentObservation(
                f"the batch must have as many examples as it is said to have, {batch}, and {int(least.sum())} show"
            )
        total = batch if bool(known.all()) else min(batch, max(int(least.sum()), round(float(expected.sum()))))
        counts = least.long() + largest_remainder_of(expected - least, total - int(least.sum()), known)
    else:
        named = known & (expected > z * error)
        requested = torch.where(named, expected.round().clamp(min=1), 0.0)
        # The strongest first, if more are named than the batch has.
        order = torch.where(named, expected / error, -torch.inf).argsort(descending=True, stable=True)
        before = requested[order].cumsum(0) - requested[order]
        counts = torch.zeros_like(sums).scatter(
            0, order, torch.minimum(requested[order], (batch - before).clamp(min=0))
        )
        counts = counts.long()
    slack = (3.0 if not noisy else z) * error + rounding
    lower = ((batch * public.mean * low - sums) / high - slack).ceil()
    upper = ((batch * public.mean * high - sums) / low + slack).floor()
    most = batch - (least.sum() - least)
    lower, upper = torch.where(known, lower, 0.0), torch.where(known, upper, float(batch))
    return LabelEstimate(
        counts=counts,
        lower=torch.minimum(torch.maximum(lower, least).clamp(0, batch).long(), counts),
        upper=torch.maximum(torch.minimum(upper, most).clamp(0, batch).long(), counts),
        observed=known,
        posterior=_present(expected, error, known, public.share, batch),
        status="ok" if int(counts.sum()) else "degraded",
    )


def largest_remainder_of(expected: Tensor, total: int, among: Tensor) -> Tensor:
    """Applies `largest_remainder` to some of the classes."""
    counts = torch.zeros_like(expected, dtype=torch.int64)
    if bool(among.any()):
        counts[among] = largest_remainder(expected[among], total)
    return counts


def _present(expected: Tensor, error: Tensor, known: Tensor, share: Tensor, batch: int) -> Tensor:
    """Returns the probability that a class is in the batch, for a binomial prior of its count and a normal error."""
    count = torch.arange(batch + 1, device=expected.device, dtype=expected.dtype)
    prior = torch.distributions.Binomial(batch, probs=share[:, None]).log_prob(count)
    log_likelihood = -((expected[:, None] - count) / error.clamp(min=1e-3)[:, None]).square() / 2
    return 1 - (prior + torch.where(known[:, None], log_likelihood, 0.0)).softmax(dim=1)[:, 0]


def _of_public(target: Observation, structure: Structure, most: int) -> _Public:
    """Computes the last-layer statistics of public examples."""
    population = granted(target.population)
    inputs, labels = population.inputs[:most].to(target.released), population.labels[:most]
    if len(inputs) == 0:
        raise NotApplicable("the population must have an example to estimate the batch's probabilities from, got none")
    logits = target.logits(inputs).detach().double()
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    probabilities = logits.softmax(dim=1)
    plain = replace(structure, parts=tuple(replace(part, factors=None) for part in structure.parts))
    # Indices start at 1, because 0 marks entries that were not released; a logistic loss negates the row of class 0.
    numbers = torch.arange(1, len(target.released) + 1, device=inputs.device, dtype=torch.float64)
    places, units = last_layer(plain, numbers), last_layer(structure, torch.ones_like(numbers))

    def at(rows: Tensor, where: Tensor, unit: Tensor) -> Tensor:
        return rows.gather(1, (where.abs().long() - 1).clamp(min=0)) * unit

    # Clip factors from the entry of the true label, which is p_y - 1 before clipping.
    every = labels[:, None]
    missing = probabilities.gather(1, every)[:, 0] - 1
    shown = torch.cat(
        [at(rows, places.bias[y, None], units.bias[y, None])[:, 0] for rows, y in _rows(target, inputs, labels)]
    )
    determined = units.bias_observed[labels] & (missing < -1e-6)
    factors = torch.where(determined, shown / torch.where(determined, missing, 1.0), 1.0)
    factors = factors.clamp(min=1e-12)
    # Features from the row of the least probable label, whose factor p_y - 1 is near -1.
    unlikely = probabilities.argmin(dim=1)
    away = probabilities.gather(1, unlikely[:, None]) - 1
    features = torch.cat([at(rows, places.weight[y], units.weight[y]) for rows, y in _rows(target, inputs, unlikely)])
    observed = units.weight_observed[unlikely].double()
    mean = (features / away * observed).sum(0) / observed.sum(0).clamp(min=1)
    return _Public(
        mean=probabilities.mean(0),
        spread=probabilities.std(0, correction=0),
        share=_shares(labels, target.classes),
        factors=factors,
        features=mean,
    )


def _rows(target: Observation, inputs: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields contributions of these examples with their labels, as many at a time as fit into memory."""
    size = max(1, _ROWS // len(target.released))
    for batch, batch_labels in zip(inputs.split(size), labels.split(size), strict=True):
        yield target.contributions(batch, batch_labels).double(), batch_labels


def _by_prototypes(target: Observation, sums: Tensor, std: Tensor, batch: int, z: float, public: int) -> LabelEstimate:
    """Counts labels by non-negative least squares over the releases of public examples under each label."""
    population, classes = granted(target.population), target.classes
    inputs, labels = population.inputs[:public].to(target.released), population.labels[:public]
    if len(inputs) == 0:
        raise NotApplicable("the population must have an example to make prototypes of, got none")
    noisy = bool(std.any())
    # Weights are in units of the noise; entries without noise next to noisy entries count as having a thousandth of the
    # largest.
    weight = 1 / std.clamp(min=1e-3 * float(std.max())) if noisy else torch.ones_like(std)
    prototypes = []
    for label in range(classes):
        whole = torch.full_like(labels, label)
        total = torch.stack([rows.sum(0) for rows, _ in _rows(target, inputs, whole)]).sum(0)
        prototypes.append(weight * total / len(inputs))
    # If all inputs have much the same probabilities p, prototypes weighted by p cancel: sum_y p_y (p - e_y) = 0. The
    # known batch size fixes the open dimension, as an equation with a weight above all others.
    table = torch.stack(prototypes, dim=1)
    heavy = 1e3 * table.norm().clamp(min=torch.finfo(table.dtype).tiny)
    table = torch.cat([table, heavy.expand(1, classes)])
    shown = torch.cat([weight * sums, (heavy * batch)[None]])
    rank = int(torch.linalg.matrix_rank(table, rtol=1e-9))
    if rank < classes:
        raise RankDeficient(
            f"what is released must tell the {classes} classes apart, and together with the size of the batch it has "
            f"{rank} dimensions that do",
            deficit=classes - rank,
        )
    # R of a QR decomposition: a row more than classes, at any length of the release.
    reduced = torch.linalg.qr(torch.cat([table, shown[:, None]], dim=1), mode="r")[1].cpu()
    solution, residual = nnls(np.asarray(reduced[:, :-1]), np.asarray(reduced[:, -1]))
    expected = torch.as_tensor(solution).to(sums)
    # The residual holds the noise and the differences of examples within a class.
    degrees = max(1, len(sums) - classes)
    unit = max(float(residual) ** 2 / degrees, 1.0 if noisy else 0.0)
    inverse = torch.linalg.inv(table.T @ table)
    error = (unit * inverse.diagonal().clamp(min=0)).sqrt()
    if noisy:
        named = expected > z * error
        rounded = torch.where(named, expected.round().clamp(min=1), 0.0).long()
        counts = rounded if int(rounded.sum()) <= batch else largest_remainder_of(expected, batch, named)
    else:
        counts = largest_remainder(expected, batch)
    share = _shares(labels, classes).to(sums)
    everything = torch.ones_like(counts, dtype=torch.bool)
    slack = (z if noisy else 3.0) * error
    return LabelEstimate(
        counts=counts,
        lower=torch.minimum((expected - slack).ceil().clamp(0, batch).long(), counts),
        upper=torch.maximum((expected + slack).floor().clamp(0, batch).long(), counts),
        observed=everything,
        posterior=_present(expected, error, everything, share, batch),
        status="ok" if int(counts.sum()) else "degraded",
    )
