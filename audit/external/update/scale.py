"""Sign and scale of an update, from properties of every cross-entropy gradient at the layer that gives the logits.

The layer's gradient is G = sum_i q_i (x_i, 1)^T / N, with q_i = softmax(W x_i + b) - e_{y_i}, whatever the network
before it is. An update a G + d (W, b) has an unknown factor a and, under weight decay, an unknown d:

- Every q_i adds up to 0 over classes, so the sums of columns are d times those of (W, b).
- Each x_i lies in the row space of G, and each q_i in its column space; neither depends on a. If classes are more than
  twice the examples this determines them, and then a / N = 1 / ((x_i, 1) G^+ q_i), from each example by itself.
- N u = sum_i p_i - n for the gradient u of the bias, and counts n of labels are whole numbers that add up to N.
- Public examples give the range of the length of G, and the sign of its product with their own gradient.

Only the size of the batch is assumed known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import least_squares
from scipy.special import softmax
from torch import Tensor, nn

from leakbench.attacks.core import Examples
from leakbench.defenses.core import keyed

_PUBLIC = 512
"""Most public examples used."""

_STARTS = 6
"""Starts of the search for an example with a given label."""

_DRAWS = 400
"""Batches drawn from public examples."""

EXACT = 0.02
"""Least relative difference of distinct factors."""


@dataclass(frozen=True, kw_only=True)
class LogitLayer:
    """Linear layer that gives the logits, and its inputs for public examples.

    Attributes:
        weight: name of its weight.
        bias: name of its bias; None without a bias.
        values: [classes, features + 1] of (W, b); without a bias [classes, features].
        inputs: [n, features] of public examples; n may be 0.
        labels: [n].
    """

    weight: str
    bias: str | None
    values: Float[ndarray, "classes columns"]
    inputs: Float[ndarray, "n features"]
    labels: ndarray

    def extended(self, inputs: ndarray) -> ndarray:
        """Appends to the layer's inputs the 1 that multiplies its bias."""
        return inputs if self.bias is None else np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)

    def errors(self) -> tuple[ndarray, ndarray]:
        """Returns probabilities p, and q = p - e_y, of public examples, [n, classes] each."""
        shares = softmax(self.extended(self.inputs) @ self.values.T, axis=1)
        return shares, shares - np.eye(len(self.values))[self.labels]


@dataclass(frozen=True, kw_only=True)
class ScaleFit:
    """Factor that explains an update.

    Attributes:
        factor: ratio of the update to the mean gradient of the batch.
        error: relative error of the factor.
        by: evidence that determines it.
    """

    factor: float
    error: float
    by: Literal["examples", "labels", "noise"]

    def fits(self, factor: float) -> bool:
        """Returns whether a factor equals this one, up to its error."""
        return abs(self.factor / factor - 1) <= max(EXACT, 3 * self.error)


def logit_layer(model: nn.Module, probe: Tensor, public: Examples | None) -> LogitLayer | None:
    """Finds the layer that gives the logits; None if it is not linear.

    Args:
        model: in the mode, training or evaluation, of the batch.
        probe: some inputs of the model's shape.
        public: public examples; None for none.
    """
    entered: dict[str, tuple[Tensor, Tensor]] = {}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}

    def entering(name: str):
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], answer: Tensor) -> None:
            entered[name] = (arguments[0].detach(), answer.detach())

        return hook

    handles = [module.register_forward_hook(entering(name)) for name, module in linear.items()]
    try:
        with torch.no_grad():
            answers = model(probe)
            given_logits = [
                name
                for name, (_, answer) in entered.items()
                # A log-softmax after the layer changes no cross-entropy.
                if answer.shape == answers.shape
                and torch.allclose(answer.log_softmax(1), answers.log_softmax(1), atol=1e-5)
            ]
            if not given_logits:
                return None
            name, last = given_logits[-1], linear[given_logits[-1]]
            if public is not None:
                model(public.inputs[:_PUBLIC])
    finally:
        for handle in handles:
            handle.remove()
    inputs = entered[name][0] if public is not None else last.weight.new_zeros(0, last.in_features)
    values = last.weight if last.bias is None else torch.cat([last.weight, last.bias[:, None]], dim=1)
    return LogitLayer(
        weight=f"{name}.weight",
        bias=None if last.bias is None else f"{name}.bias",
        values=_array(values),
        inputs=_array(inputs),
        labels=np.zeros(0, dtype=int) if public is None else public.labels[:_PUBLIC].cpu().numpy(),
    )


def decay(layer: LogitLayer, shown: ndarray, rounding: float) -> tuple[float, float]:
    """Estimates the multiple of the weights in an update, and its column sums without it.

    Args:
        layer: before the step.
        shown: [classes, columns] of the update.
        rounding: rounding error of an entry.

    Returns:
        The multiple, 0 if the column sums are not a multiple of the weights'; and the root mean square of the remaining
        sums, in units of that of sums of rounding errors.
    """
    sums, weights = shown.sum(axis=0), layer.values.sum(axis=0)
    of_weights = slice(0, layer.inputs.shape[1])  # a bias may be exempt from the decay
    multiple = float(sums[of_weights] @ weights[of_weights] / max(weights[of_weights] @ weights[of_weights], 1e-300))
    unit = math.sqrt(len(shown)) * rounding
    without = _root_mean_square(sums) / unit
    residual = _root_mean_square((sums - multiple * weights)[of_weights]) / unit
    if without > 3 and residual < 0.1 * without:
        return multiple, residual
    return 0.0, without


def by_examples(
    layer: LogitLayer, shown: ndarray, batch: int, rounding: float, *, clipped: bool = False
) -> list[ScaleFit]:
    """Estimates factors from the examples in the row and column spaces of the layer's gradient.

    Args:
        layer: before the step.
        shown: [classes, columns] of the update, without weight decay.
        batch: number of examples.
        rounding: rounding error of an entry of `shown`.
        clipped: whether each example has its own factor; these then need only agree in sign.

    Returns:
        Empty if the equations are too few; several factors if each explains the update.
    """
    classes, columns = shown.shape
    left, sizes, right = np.linalg.svd(shown, full_matrices=False)
    noise = rounding * math.sqrt(max(classes, columns))
    rank = int((sizes > 10 * noise).sum())
    alone = batch == 1 and layer.bias is not None
    if rank != batch or not (alone or 2 * batch + 1 <= classes):
        return []
    left, sizes, right = left[:, :rank], sizes[:rank], right[:rank]
    tolerance = min(1e-2, max(1e-4, 30 * noise / sizes[-1]))
    labels = np.argsort(-np.linalg.norm(left, axis=1), kind="stable")[: max(4 * rank, 2)]
    # For each example: its coordinates, its error under G^+, and a / N.
    examples: list[tuple[ndarray, ndarray, float]] = []
    for label in map(int, labels):
        for start in _starts(layer, right)[: 1 if alone else None]:
            coordinates, error, off = _example(layer, left, right, label, start)
            inverse = (left.T @ error) / sizes
            own = float(coordinates @ inverse)
            if off > tolerance or own == 0 or not np.isfinite(own):
                continue
            # Within a batch, an example's input and another's error are orthogonal under G^+.
            apart = all(max(abs(c @ inverse), abs(coordinates @ i)) < 0.1 * abs(own) for c, i, _ in examples)
            if apart or alone:
                examples.append((coordinates, inverse, 1 / own))
        if len(examples) == batch and not alone:
            break
    factors = batch * np.array([own for *_, own in examples])
    if alone:
        return [ScaleFit(factor=float(factor), error=tolerance, by="examples") for factor in factors]
    if len(factors) < min(2, batch):
        return []
    middle = float(np.median(factors))
    spread = float(np.abs(factors / middle - 1).max())
    agree = bool((factors * middle > 0).all()) if clipped else spread < EXACT
    return [ScaleFit(factor=middle, error=spread, by="examples")] if agree else []


def _starts(layer: LogitLayer, right: ndarray) -> ndarray:
    """Returns coordinates of start inputs in the row space: public examples', or random."""
    if len(layer.inputs):
        chosen = layer.inputs[np.linspace(0, len(layer.inputs) - 1, _STARTS).astype(int)]
        return layer.extended(chosen) @ right.T
    starts = torch.randn(_STARTS, len(right), generator=keyed(0), dtype=torch.float64)
    return starts.numpy() * math.sqrt(right.shape[1] / len(right))


def _example(
    layer: LogitLayer, left: ndarray, right: ndarray, label: int, start: ndarray
) -> tuple[ndarray, ndarray, float]:
    """Fits an input whose error lies in the column space: its coordinates, its error, and the error's share outside."""
    matrix, target = layer.values @ right.T, np.eye(len(layer.values))[label]
    if layer.bias is None:
        first, free = np.zeros(len(right)), np.eye(len(right))
    else:
        # The input's last entry is 1.
        ones = right[:, -1]
        first = ones / max(ones @ ones, 1e-300)
        free = np.linalg.svd(ones[None])[2][1:].T

    def outside(values: ndarray) -> ndarray:
        return values - left @ (left.T @ values)

    def error_at(z: ndarray) -> ndarray:
        return softmax(matrix @ (first + free @ z)) - target

    def slopes(z: ndarray) -> ndarray:
        share = error_at(z) + target
        step = matrix @ free
        return outside(share[:, None] * step - np.outer(share, share @ step))

    z = free.T @ start
    if free.shape[1]:
        jac: Any = slopes  # scipy's stubs accept only names
        z = least_squares(lambda z: outside(error_at(z)), z, jac=jac, method="lm", xtol=1e-14, ftol=1e-14).x
    error = error_at(z)
    size = max(float(np.linalg.norm(error)), 1e-300)  # 0 if the model is certain of the label
    return first + free @ z, error, float(np.linalg.norm(outside(error))) / size


def by_labels(layer: LogitLayer, shown: ndarray, batch: int, rounding: float) -> list[ScaleFit]:
    """Estimates factors that make label counts whole, if public examples have similar probabilities.

    Args:
        layer: before the step, with public examples.
        shown: [classes, columns] of the update, without weight decay.
        batch: number of examples.
        rounding: relative rounding error of an entry.

    Returns:
        Empty if probabilities vary too much to recognise whole numbers.
    """
    if len(layer.inputs) < 2:
        return []
    shares, _ = layer.errors()
    if layer.bias is not None:
        sums, spread = batch * shown[:, -1], 0.0
    else:
        mean = layer.inputs.mean(axis=0)
        size = float(mean @ mean)
        if size == 0:
            return []
        sums, spread = batch * shown @ mean / size, float((layer.inputs @ mean / size).std())
    expected = batch * shares.mean(axis=0)
    biggest = int(np.abs(sums).argmax())
    if sums[biggest] == 0:
        return []
    fits: list[ScaleFit] = []
    for count in range(batch + 1):
        scale = (expected[biggest] - count) / sums[biggest]
        counts = np.rint(expected - scale * sums)
        if counts.min() < 0 or counts.sum() != batch:
            continue
        error = np.sqrt(batch * shares.var(axis=0) + spread**2 * counts + (rounding * (expected - counts)) ** 2) + 2e-3
        # Probability that arbitrary numbers pass as whole in all classes.
        if np.log(np.minimum(7 * error, 1)).sum() + math.log(batch + 1) > math.log(1e-3):
            continue
        scale = float(sums @ (expected - counts) / (sums @ sums))
        residual = np.abs(expected - scale * sums - counts)
        moved = float(np.linalg.norm(scale * sums))
        if bool((residual <= 3.5 * error).all()) and moved > 5 * float(error.max()):
            off = float(error.max()) / moved
            if not any(abs(fit.factor * scale - 1) < off for fit in fits):
                fits.append(ScaleFit(factor=1 / scale, error=off, by="labels"))
    return fits


def by_noise(layer: LogitLayer, shown: ndarray, noise: float) -> list[ScaleFit]:
    """Estimates the size of the factor from the column sums, which are pure noise; its sign stays open.

    Args:
        layer: before the step.
        shown: [classes, columns] of the update.
        noise: standard deviation of an entry of the mean gradient.
    """
    count = shown.shape[1]
    size = _root_mean_square(shown.sum(axis=0)) / math.sqrt(len(shown)) / noise
    return (
        [ScaleFit(factor=sign * size, error=1 / math.sqrt(2 * count), by="noise") for sign in (1, -1)] if size else []
    )


@dataclass(frozen=True, kw_only=True)
class ScaleRange:
    """Possible sizes of a factor, from batches of public examples.

    Attributes:
        low: smallest.
        high: largest.
        sign: 1 or -1; 0 if batches leave it open.
    """

    low: float
    high: float
    sign: int

    def allow(self, factor: float) -> bool:
        """Returns whether a factor is within the range."""
        return self.low <= abs(factor) <= self.high and factor * self.sign >= 0


def by_size(layer: LogitLayer, shown: ndarray, batch: int) -> ScaleRange:
    """Bounds the size of the factor from random batches of public examples, of all classes and of single classes."""
    if len(layer.inputs) < 2:
        return ScaleRange(low=0.0, high=math.inf, sign=0)
    _, errors = layer.errors()
    inputs = layer.extended(layer.inputs)
    mean = errors.T @ inputs / len(inputs)
    along = np.einsum("nc,cf,nf->n", errors, mean, inputs)
    generator = keyed(0)
    products, lengths = [], []
    kinds = [np.flatnonzero(layer.labels == kind) for kind in np.unique(layer.labels)]
    for draw in range(_DRAWS):
        pool = np.arange(len(inputs)) if draw % 2 else kinds[draw // 2 % len(kinds)]
        sample = pool[torch.randint(len(pool), (batch,), generator=generator).numpy()]
        products.append(float(along[sample].mean()))
        lengths.append(float(np.linalg.norm(errors[sample].T @ inputs[sample]) / batch))
    size = float(np.linalg.norm(shown))
    low, high = size / max(lengths), size / max(min(lengths), 1e-300)
    product = float((shown * mean).sum())
    same = np.quantile(products, 0.005) > 0
    return ScaleRange(low=low / 1.5, high=1.5 * high, sign=int(np.sign(product)) if same else 0)


def _array(values: Tensor) -> ndarray:
    return values.detach().double().cpu().numpy()


def _root_mean_square(values: ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))
