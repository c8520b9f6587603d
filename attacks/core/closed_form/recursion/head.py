"""Last layer: its input, the derivatives with respect to the logits, label and clip factor, from its gradient.

One example's gradient of the last weight is c k x^T, of rank 1, with k = dL/dlogits and c the clip factor. With a
single logit f and label y = +-1, <W, dL/dW> = -mu / (1 + e^mu) for the margin mu = y f (R-GAP, section 3.1): a negative
value has two roots mu, a positive value one root, and both labels are possible. With three classes or more the
logarithms of k's entries, except the label's, are affine in the logits, so that a regression gives the scale of x
whatever c is; then c follows.

Deviation: roots are found by bisection and labels from the gradient; the authors search the scalar by 30,000 steps of
Adam, and for several classes use known labels.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...threat_model.attack_errors import InconsistentObservation, NotApplicable

TURN = 1.2784645427610738
"""Margin at which -mu / (1 + e^mu) is smallest: 1 + e^-mu = mu."""

LEAST = -0.27846454276107380
"""Its value there."""

RANK_ONE = 1e-2
"""Relative misfit above which a gradient is not that of a single example; rounding in float32 stays below 1e-4."""

LOST = 4.0
"""Assumed error of an entry of softmax - one-hot, in machine epsilons, for logits of size 1."""

POLISHED = 1e-3
"""Largest distance from 1 of a clip factor that is set to 1, if the equations then agree."""


@dataclass(frozen=True, kw_only=True)
class HeadCandidate:
    """Input and label of an example that explains the last layer's gradient.

    Attributes:
        x: the layer's input, [n].
        slopes: derivatives of the loss with respect to the logits, [logits].
        label: class number.
        factor: clip factor of the gradient.
        root: index of the root of the scalar equation, from 0; inputs of different roots have the same gradient
            (R-GAP's twin data).
        slope_error: relative error of `slopes` by rounding of softmax - one-hot.
    """

    x: Tensor
    slopes: Tensor
    label: int
    factor: float = 1.0
    root: int = 0
    slope_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HeadGradient:
    """Parameters and gradient of the last layer.

    Attributes:
        weight: [logits, n].
        bias: [logits], 0 without a bias.
        gradient: gradient of the weight, [logits, n], without missing entries.
        bias_gradient: [logits]; None without a bias, or if its gradient was not released.
    """

    weight: Tensor
    bias: Tensor
    gradient: Tensor
    bias_gradient: Tensor | None


def margins(h: float, offset: float = 0.0, rounding: float = 0.0) -> list[float]:
    """Returns roots mu of -mu / (1 + e^(mu + offset)) = h, the root of smallest absolute value first.

    Args:
        h: <W, dL/dW> of an example.
        offset: y b for a layer with bias b; mu is the margin less the offset.
        rounding: absolute error of h.

    Raises:
        InconsistentObservation: there is no root.
    """
    turn = _turn(offset)
    least = _scalar(turn, offset)
    if h < least - max(1e-9, rounding) or not math.isfinite(h):
        raise InconsistentObservation(
            f"<W, dL/dW> of the last layer must be at least {least:.6f} for one example, got {h:.6g}: "
            "the update is of several examples, or not at the rate, mask or parameters that it is said to be"
        )
    if h == 0:
        return [0.0]
    if h > 0:
        # The lower end: at the root mu < 0, so that -mu / (1 + e^offset) <= h.
        return [_root(h, -h * (1 + math.exp(offset)) - 1, 0.0, offset)]
    if h <= least:
        return [turn]
    return [_root(h, 0.0, turn, offset), _root(h, turn, turn + 745.0 + abs(offset), offset)]


def _turn(offset: float) -> float:
    """Returns the mu that minimises the scalar, the solution of mu = 1 + e^-(mu + offset), by bisection."""
    if offset == 0:
        return TURN
    low, high = 1.0, 1.0 + math.exp(min(700.0, max(0.0, -offset)))
    while low < (middle := low + (high - low) / 2) < high:
        low, high = (middle, high) if middle < 1 + math.exp(min(700.0, -middle - offset)) else (low, middle)
    return low


def _root(h: float, low: float, high: float, offset: float) -> float:
    """Solves scalar = h by bisection down to neighbouring floats; the scalar is monotone between the two ends."""
    falling = _scalar(low, offset) > h
    while low < (middle := low + (high - low) / 2) < high:
        low, high = (middle, high) if (_scalar(middle, offset) > h) == falling else (low, middle)
    return low if abs(_scalar(low, offset) - h) < abs(_scalar(high, offset) - h) else high


def _scalar(mu: float, offset: float = 0.0) -> float:
    return -mu * _sigmoid(-mu - offset)


def candidates(
    head: HeadGradient, *, loss: str, clipped: bool | None, check: bool = True, rounding: float = 0.0
) -> list[HeadCandidate]:
    """Returns explanations of the last layer's gradient by a single example.

    Args:
        head: the layer.
        loss: `logistic` or `cross_entropy`.
        clipped: whether the gradient was clipped by an unknown factor; None if not known.
        check: whether a gradient that is not of a single example is refused.
        rounding: machine epsilon of the gradient, which softmax - one-hot loses digits to; 0 for exact derivatives.

    Raises:
        InconsistentObservation: no single example explains the gradient.
        NotApplicable: the loss is not supported, the clip factor is not identifiable, or the model is so certain of the
            label that the gradient is 0 or rounding.
    """
    if not bool(head.gradient.any()):
        raise NotApplicable(
            "the gradient of the last layer must not vanish, and it is 0 everywhere: the model is certain of the label"
        )
    logits = len(head.weight)
    if rounding and logits > 1 and _opposed_to_nothing(head):
        raise NotApplicable(
            "the gradient of the label's logit must be above rounding, and it is 0: the model is certain of the label"
        )
    if loss == "logistic" and logits == 1:
        explanations = _binary(head, clipped, rounding)
    elif loss == "cross_entropy" and logits == 2:
        # Cross-entropy of two logits is the logistic loss of their difference.
        difference = torch.tensor([[-1.0, 1.0]], dtype=head.weight.dtype, device=head.weight.device)
        both = HeadGradient(
            weight=difference @ head.weight,
            bias=difference @ head.bias,
            gradient=head.gradient[1:],
            bias_gradient=None if head.bias_gradient is None else head.bias_gradient[1:],
        )
        apart = _misfit(head.gradient.sum(dim=0), head.gradient) if check else 0.0
        if apart > RANK_ONE and not rounding:
            raise _several("the gradients of the two classes do not cancel")
        explanations = [
            replace(candidate, slopes=torch.cat([-candidate.slopes, candidate.slopes]))
            for candidate in _binary(both, clipped, rounding)
        ]
        if apart > max(RANK_ONE, *(candidate.slope_error for candidate in explanations)):
            raise _several("the gradients of the two classes do not cancel")
    elif loss == "cross_entropy" and logits >= 3:
        explanations = [
            _without(head, check, rounding)
            if (shared := head.bias_gradient) is None
            else _with_bias(head, shared, check, rounding)
        ]
    else:
        raise NotApplicable(f"the loss must be cross-entropy or that of one logit, got {loss} of {logits} logits")
    if not check:
        return explanations
    for candidate in explanations:
        if candidate.factor > 1 + POLISHED or (clipped is False and abs(candidate.factor - 1) > POLISHED):
            raise InconsistentObservation(
                "the last layer's gradient must be that of one example"
                f"{'' if clipped is False else ', or shorter'}, and it is {candidate.factor:.4g} times as long: "
                "its divisor, its learning rate or the clipping are not what they are said to be"
            )
    return explanations


def _binary(head: HeadGradient, clipped: bool | None, rounding: float) -> list[HeadCandidate]:
    """Explains a single logit by the bias's gradient; without it, by both labels and up to two roots for each."""
    gradient = head.gradient[0]
    if head.bias_gradient is not None and float(head.bias_gradient[0]) != 0:
        shared = float(head.bias_gradient[0])
        x, sign = gradient / shared, -math.copysign(1.0, shared)
        margin = sign * float(head.weight[0] @ x + head.bias[0])
        slopes = gradient.new_tensor([-sign * _sigmoid(-margin)])
        lost = _lost(gradient.new_tensor([margin]), slopes, rounding)
        factor = _factor(shared / float(slopes[0]), lost)
        return [HeadCandidate(x=x, slopes=slopes, label=int(sign > 0), factor=factor, slope_error=lost)]
    if clipped:
        raise NotApplicable(
            "the clip factor must be known for one logit whose bias shows nothing: it is not identifiable, because "
            "data of another scale give the same update"
        )
    explanations, refused = [], None
    for sign in (1.0, -1.0):
        offset = sign * float(head.bias[0])
        try:
            h = float(head.weight[0] @ gradient)
            roots = margins(h, offset, LOST * rounding * float(head.weight[0].norm() * gradient.norm()))
        except InconsistentObservation as error:
            refused = error  # a bias may rule out one label alone
            continue
        for root, margin in enumerate(roots):
            slope = -sign * _sigmoid(-margin - offset)
            slopes = gradient.new_tensor([slope])
            # Without a shared factor the slope follows from the rounded gradient, and only its scale is inexact.
            lost = _lost(gradient.new_tensor([margin + offset]), slopes, rounding)
            explanations.append(
                HeadCandidate(x=gradient / slope, slopes=slopes, label=int(sign > 0), root=root, slope_error=lost)
            )
    if refused is not None and not explanations:
        raise refused
    # The first roots of both labels come before the second roots.
    return sorted(explanations, key=lambda candidate: candidate.root)


def _with_bias(head: HeadGradient, shared: Tensor, check: bool, rounding: float) -> HeadCandidate:
    """Explains three classes or more by the bias's gradient c k."""
    if not bool(shared.any()):
        raise _several("the gradient of its bias vanishes, and that of its weight does not")
    x = head.gradient.T @ shared / shared.square().sum()
    label = int(shared.argmin())
    logits = head.weight @ x + head.bias
    slopes = _slopes(logits, label)
    lost = _lost(logits, slopes, rounding)
    factor = float(shared @ slopes / slopes.square().sum())
    misfits = (
        _misfit(head.gradient - shared[:, None] * x, head.gradient),
        _misfit(shared - factor * slopes, shared),
    )
    if check and (misfits[0] > RANK_ONE or misfits[1] > max(RANK_ONE, lost) or factor <= 0):
        raise _several(f"relative misfit {max(misfits):.3g}")
    factor = _factor(factor, lost)
    # Gradients of other layers were computed from the rounded derivatives.
    return HeadCandidate(x=x, slopes=shared / factor if rounding else slopes, label=label, factor=factor)


def _without(head: HeadGradient, check: bool, rounding: float) -> HeadCandidate:
    """Explains three classes or more without the bias: from u s v^T, x = t v, with t from the ratios of u's entries."""
    u, s, v = torch.linalg.svd(head.gradient, full_matrices=False)
    rank_one = float(s[1:].norm() / s[0]) if len(s) > 1 else 0.0
    u, length, v = u[:, 0], float(s[0]), v[0]
    # k has one negative entry, the label's, and sums to 0.
    if float(u[u.abs().argmax()]) > 0:
        u, v = -u, -v
    label = int(u.argmin())
    others = u > 0
    others[label] = False
    wrong_sign = u.clamp(max=0)
    wrong_sign[label] = 0.0
    unbalanced, misfit = abs(float(u.sum())), max(rank_one, float(wrong_sign.norm()))
    misfit = misfit if rounding else max(misfit, unbalanced)
    if check and (int(others.sum()) < 2 or misfit > RANK_ONE):
        raise _several(f"relative misfit {misfit:.3g}")
    slope = head.weight @ v
    if int(others.sum()) < 2:  # noise hides the ratios: take the smallest possible scale
        return HeadCandidate(x=length * v, slopes=_slopes(slope * length + head.bias, label), label=label)
    # log k_j = t <W_j, v> + b_j + a constant; weights u_j^2, because an absolute error of u_j becomes one of size 1 /
    # u_j in its logarithm.
    weights = u[others].square() / u[others].square().sum()
    rise, logs = slope[others], u[others].log() - head.bias[others]
    rise, logs = rise - weights @ rise, logs - weights @ logs
    t = float(weights @ (rise * logs) / (weights @ rise.square()))
    if not (t > 0 and math.isfinite(t)):
        if check:
            raise _several("no scale of the layer's input explains the classes' shares")
        t = length
    factor = length / (t * float(_slopes(slope * t + head.bias, label).norm()))
    if abs(factor - 1) < POLISHED:
        # Deviations of the gradient from rank 1, and of u from a sum of 0, measure its numerical accuracy.
        rounding = 1e-12 + 100 * max(rank_one, abs(float(u.sum())))
        exact = _polished(t, slope, head.bias, label, u * length, rounding)
        if exact is not None:
            t, factor = exact, 1.0
    logits = slope * t + head.bias
    slopes = _slopes(logits, label)
    lost = _lost(logits, slopes, rounding)
    misfit = max(_misfit(slopes / slopes.norm() - u, u), unbalanced if rounding else 0.0)
    if check and misfit > max(RANK_ONE, lost):
        raise _several(f"relative misfit {misfit:.3g}")
    factor = _factor(factor, lost)
    slopes = u * length / (t * factor) if rounding else slopes
    return HeadCandidate(x=t * v, slopes=slopes, label=label, factor=factor)


def _polished(t: float, slope: Tensor, bias: Tensor, label: int, shared: Tensor, rounding: float) -> float | None:
    """Solves t k(t) = u s by Gauss-Newton over all classes, for a clip factor of 1; None if that does not fit."""
    for _ in range(20):
        p = (slope * t + bias).softmax(dim=0)
        k = _slopes(slope * t + bias, label)
        residual = t * k - shared
        derivative = k + t * p * (slope - p @ slope)
        t -= float(residual @ derivative / derivative.square().sum())
    residual = t * _slopes(slope * t + bias, label) - shared
    return t if t > 0 and _misfit(residual, shared) < rounding else None


def _slopes(logits: Tensor, label: int) -> Tensor:
    """Returns softmax - one-hot, without cancellation at the label."""
    p = logits.softmax(dim=0)
    k = p.clone()
    k[label] = 0.0
    k[label] = -k.sum()
    return k


def _opposed_to_nothing(head: HeadGradient) -> bool:
    """Returns whether the gradient of a class is 0 and those of all others have one sign, as if of no label."""
    shared = head.gradient @ head.gradient[int(head.gradient.square().sum(dim=1).argmax())]
    return bool((shared >= 0).all() and (shared == 0).any())


def _lost(logits: Tensor, slopes: Tensor, rounding: float) -> float:
    """Returns the relative error of softmax - one-hot by rounding, which the label's entry loses digits to.

    Raises:
        NotApplicable: no digit is left.
    """
    lost = LOST * rounding * (1 + float(logits.abs().max())) / max(float(slopes.norm()), 1e-300)
    if lost >= 1:
        raise NotApplicable(
            "the gradient of the last layer must be above rounding, and the model is so certain of the label that "
            f"derivatives of the loss of {float(slopes.norm()):.2g} have no digits"
        )
    return lost


def _factor(factor: float, lost: float) -> float:
    """Returns a clip factor, 1 if rounding accounts for the difference."""
    return 1.0 if abs(factor - 1) <= lost else factor


def _misfit(residual: Tensor, whole: Tensor) -> float:
    return float(residual.norm() / whole.norm())


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def _several(detail: str) -> InconsistentObservation:
    return InconsistentObservation(
        f"the gradient of the last layer must be that of one example, and it is not ({detail}): the update is of "
        "several examples, noisy, or not what it is said to be"
    )
