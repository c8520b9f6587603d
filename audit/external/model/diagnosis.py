"""Diagnosis of a model that fails on its own examples: class order, scale of inputs, answers that vary.

Nothing is corrected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy import ndarray
from scipy import optimize, stats
from torch import Tensor, nn

from ...targets.observe import logits_of
from ..examples.groups import Preprocess

LEVEL = 1e-4
"""Error rate of a diagnosis on a sound model."""

TRIED = 400
"""Number of examples on which other scales are tried."""

_MOST_CLASSES = 4000

ASKED_AGAIN = 64
"""Number of examples that are queried more than once."""

_SAME = 0.01
"""Share of the answers' spread up to which two answers count as equal: rounding is far smaller."""


@dataclass(frozen=True)
class Knowledge:
    """Agreement of a model's predictions with labels.

    Attributes:
        right: number of right predictions.
        n: number of predictions.
        chance: accuracy of always predicting the most frequent class, or 1 / classes if that is larger.
        agreement: Cohen's kappa: 0 for predictions independent of labels, whatever the class frequencies; 1 if all are
            right.
        known: whether predictions are more accurate than `chance`, or agree with labels under imbalanced classes.
        undecided: whether there are so few predictions that a good model might have made them.
    """

    right: int
    n: int
    chance: float
    agreement: float
    known: bool
    undecided: bool


@dataclass(frozen=True)
class AnotherOrder:
    """Another order of classes, under which a model is right.

    Attributes:
        places: maps a label to the model's number for it, for classes that moved and gained accuracy.
        share: accuracy on all examples in this order.
    """

    places: dict[int, int]
    share: float


@dataclass(frozen=True)
class Unsteady:
    """Answers that do not depend on their example alone.

    Attributes:
        moved: number of examples whose answer changed.
        compared: number of examples that were queried again.
        condition: how the model was queried, and the likely cause.
    """

    moved: int
    compared: int
    condition: str


def unsteady(model: nn.Module, inputs: Tensor) -> Unsteady | None:
    """Returns how answers change when a model is queried again; None if they do not.

    Repeated queries average noise in the answers away, whereas an audit queries once.

    Args:
        model: in evaluation mode, as far as its owner has set it.
        inputs: preprocessed as for the model.
    """
    queried = inputs[:ASKED_AGAIN]
    half = max(1, len(queried) // 2)
    first, again = logits_of(model, queried), logits_of(model, queried)
    alone = torch.cat([logits_of(model, part) for part in (queried[:half], queried[half:]) if len(part)])
    spread = _SAME * float(first.std()) if len(first) > 1 else 0.0
    if not spread > 0:  # constant and undefined answers have remarks of their own
        return None
    for repeated, cause in (
        (again, "asked again: its dropout or another noise is on, which whoever asks often averages away"),
        (alone, "asked about fewer at a time: its answers depend on the batch, as by statistics of that alone"),
    ):
        if moved := int(((first - repeated).abs().amax(1) > spread).sum()):
            return Unsteady(moved, len(queried), cause)
    return None


def knowledge(guesses: Tensor, labels: Tensor, classes: int) -> Knowledge:
    """Compares predictions with labels, by a binomial test against the most frequent class and a permutation test."""
    predictions, true = guesses.cpu().numpy(), labels.cpu().numpy()
    n, right = len(true), int((predictions == true).sum())
    shares = np.bincount(true, minlength=classes) / n
    chance = max(float(shares.max()), 1 / classes)
    expected = float(shares @ (np.bincount(predictions, minlength=classes) / n))
    agreement = (right / n - expected) / (1 - expected) if expected < 1 else 0.0
    better = float(stats.binom.sf(right - 1, n, chance)) < 1e-3
    # If one class dominates, a good model may be right less often than always answering that class.
    known = better or (agreement >= 0.15 and _associated(predictions, true))
    ends = stats.binomtest(right, n).proportion_ci(0.95, method="exact")
    undecided = not known and float(ends.high) > (1 + chance) / 2
    return Knowledge(right, n, chance, agreement, known, undecided)


def another_order(guesses: Tensor, labels: Tensor, classes: int) -> AnotherOrder | None:
    """Returns the order of classes that makes a model right, if its own does not; else None.

    The assignment of classes is fitted on one half of the examples and judged on the other: fitted to all, it would
    find an order in noise. It must beat the model's own order in a sign test among the labels that it moves, make the
    model more than twice as right on them, and right on half: classes that a model confuses, or that random weights
    happen to separate, are no other order.
    """
    if classes > _MOST_CLASSES:
        return None
    predictions, true = guesses.cpu().numpy(), labels.cpu().numpy()
    fitted = np.random.default_rng(len(true)).permutation(len(true)) < len(true) // 2
    places = _assigned(predictions[fitted], true[fitted], classes)
    moved = ~fitted & (places[true] != true)
    then, now = places[true[moved]] == predictions[moved], true[moved] == predictions[moved]
    wins, losses = int((then & ~now).sum()), int((now & ~then).sum())
    if not wins or float(stats.binom.sf(wins - 1, wins + losses, 0.5)) >= LEVEL:
        return None
    if then.mean() < max(0.5, 2 * now.mean() + 0.1) or not _associated(predictions[~fitted], places[true[~fitted]]):
        return None
    whole = _assigned(predictions, true, classes)
    table = _table(predictions, true, classes)
    numbers = np.arange(classes)
    gained = (whole != numbers) & (table[numbers, whole] > table[numbers, numbers])
    return AnotherOrder({int(i): int(whole[i]) for i in numbers[gained]}, float((whole[true] == predictions).mean()))


def other_inputs(
    model: nn.Module, inputs: Tensor, labels: Tensor, own_preprocess: Preprocess
) -> tuple[Preprocess, float, float] | None:
    """Returns the preprocessing that makes a model right far more often, with accuracy before and after; else None.

    Args:
        model: in evaluation mode.
        inputs: preprocessed as for the model.
        labels: of these inputs.
        own_preprocess: preprocessing that was applied already; the result replaces it.
    """
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:TRIED].to(labels.device)
    sample, true = inputs[chosen].to(torch.float32), labels[chosen]
    now = logits_of(model, sample).argmax(1) == true
    best: tuple[Preprocess, Tensor] | None = None
    # Indices into an embedding have no scale, and on a GPU an index outside the table makes the device unusable for
    # this process.
    tables = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in model.modules())
    tries = [] if tables else _scales(inputs)
    for preprocess in tries:
        guesses = _guesses(model, preprocess(sample))
        if guesses is not None and (best is None or int((guesses == true).sum()) > int(best[1].sum())):
            best = preprocess, guesses == true
    if best is None:
        return None
    scale, then = best
    wins, losses = int((then & ~now).sum()), int((now & ~then).sum())
    chance = float(true.bincount().max()) / len(true)
    share = float(then.double().mean())
    surprise = float(stats.binom.sf(int(then.sum()) - 1, len(true), chance)) * len(tries)
    if not wins or float(stats.binom.sf(wins - 1, wins + losses, 0.5)) * len(tries) >= LEVEL or surprise >= LEVEL:
        return None
    # A gain of 0.1 suffices: a model that is right on 90 % as it is fed may reach 100 % with the training's
    # preprocessing.
    if share < min(1.5 * float(now.double().mean()), float(now.double().mean()) + 0.1):
        return None
    return own_preprocess.then(scale), float(now.double().mean()), share


def _guesses(model: nn.Module, inputs: Tensor) -> Tensor | None:
    """Returns predicted classes; None if the model does not take such inputs."""
    try:
        return logits_of(model, inputs).argmax(1)
    except Exception:  # whatever a user's model raises
        return None


def _scales(inputs: Tensor) -> list[Preprocess]:
    axes = [0, *range(2, inputs.ndim)] if inputs.ndim > 2 else [0, 1]
    mean, std = inputs.mean(axes).reshape(-1), inputs.std(axes).reshape(-1)
    moments = [(0.0, 255.0), (0.0, 1 / 255), (0.5, 0.5), (127.5, 127.5), (-1.0, 2.0)]
    scales = [Preprocess((m,), (s,)) for m, s in moments]
    if bool((std > 0).all()) and bool(mean.isfinite().all()):
        scales.append(Preprocess(tuple(mean.tolist()), tuple(std.tolist())))
    if inputs.ndim == 4 and inputs.shape[1] == 3:
        usual = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        scales.append(Preprocess(*usual))
        scales.append(Preprocess(*(tuple(255 * value for value in part) for part in usual)))
    return scales


def _assigned(predictions: ndarray, true: ndarray, classes: int) -> ndarray:
    """Returns a distinct guess for each label, by the most matching examples; ties leave a label as it is."""
    table = _table(predictions, true, classes).astype(np.float64)
    table[np.arange(classes), np.arange(classes)] += 0.5
    return optimize.linear_sum_assignment(table, maximize=True)[1]


def _table(guessed: ndarray, true: ndarray, classes: int) -> ndarray:
    return np.bincount(true * classes + guessed, minlength=classes * classes).reshape(classes, classes)


def _associated(guessed: ndarray, true: ndarray) -> bool:
    """Returns whether guesses agree with labels more often than permuted guesses: a permutation test at 1 %."""
    if len(true) < 2:
        return False
    generator = np.random.default_rng(0)
    chosen = generator.permutation(len(true))[:5000]
    guessed, true = guessed[chosen], true[chosen]
    reached = int((guessed == true).sum())
    as_many = sum(int((generator.permutation(guessed) == true).sum() >= reached) for _ in range(500))
    return (1 + as_many) / 501 < 0.01
