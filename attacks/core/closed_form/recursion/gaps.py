"""Completion of the last layer's masked gradient, from its rank, its logits, and the layer before.

One example's gradient of the last layer, [dL/dW | dL/db] = c k (x, 1)^T, is of rank 1, so an entry follows from
released entries that are connected to its row and column. Rows of classes without a connected entry, and features that
are masked in every class, do not follow. Two further sources remain. First, the logarithms of k's entries, except the
label's, are affine in the logits, so that C classes give C - 1 equations in the missing features, a constant, and the
scale of x if no bias shows it. Second, the layer before often determines its own input without the missing features,
from its known outputs and from the gradients of those rows or filters for which every derivative is known; a forward
pass then gives the features. If neither that layer nor its activation has an offset, x need only be known up to scale
and sign: the scale carries over to every layer before, and only one sign fits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...targets.network import Network, Operation
from ...threat_model.attack_errors import InconsistentObservation
from ..least_squares import least_squares
from .completion import RankOne, spread
from .forward import doubled
from .head import RANK_ONE
from .layer_equations import gradient_of
from .linear_systems import LARGEST_GRAM, Equations, solve
from .observed_gradients import LayerGradient
from .operations import ACTIVATIONS, HOMOGENEOUS, LAYERS, affine, invert, result_of

DECIDED = 1e-6
"""Smallest singular value, relative to the largest, at which the logits' equations count as determined."""

MAGNIFIED = 1e4
"""The same threshold as a multiple of the relative error of the gradient's entries; the larger threshold applies."""

COARSE = 1e-12
"""Relative error of the gradient's entries above which they count as less precise than float64."""

FITS = 1e-3
"""Largest relative misfit of an accepted completion; rounding in float32 stays below 1e-4."""


@dataclass(frozen=True, kw_only=True)
class FilledHead:
    """Last layer's gradient, completed.

    Attributes:
        gradient: gradient of the weight, [classes, features]; 0 in undetermined columns.
        bias: gradient of the bias, complete; None if it is not determined.
        open: bool [features], features that stay undetermined.
    """

    gradient: Tensor
    bias: Tensor | None
    open: Tensor


def filled(network: Network, head: Operation, gradients: Mapping[str, LayerGradient], *, exact: bool) -> FilledHead:
    """Returns the last layer's gradient with its gaps filled.

    Args:
        network: the head is its last operation.
        head: a linear layer.
        gradients: observed gradient of each layer.
        exact: whether there is no noise; logits and the layer before are used only then, because they take logarithms
            and inverses of released numbers.
    """
    own, values = gradients[head.name], doubled(network)
    weight = values[str(head.weight)].to(own.weight)
    shift = weight.new_zeros(len(weight)) if head.bias is None else values[head.bias].to(own.weight)
    observed = torch.ones_like(own.weight, dtype=torch.bool) if own.observed is None else own.observed
    bias = weight.new_zeros(len(weight)) if own.bias is None else own.bias
    bias_observed = (
        torch.full_like(observed[:, 0], own.bias is not None) if own.bias_observed is None else own.bias_observed
    )
    if bool(observed.all()) and (own.bias is None or bool(bias_observed.all())):
        return FilledHead(gradient=own.weight, bias=own.bias, open=~observed.any(dim=0))
    matrix = torch.cat([own.weight * observed, (bias * bias_observed)[:, None]], dim=1)
    whole = torch.cat([observed, bias_observed[:, None]], dim=1)
    strength = matrix[:, -1].abs() if bool(matrix[:, -1].any()) else matrix.norm(dim=1)
    if not bool(strength.any()):
        return FilledHead(gradient=own.weight, bias=None, open=~observed.any(dim=0))
    factors = spread(matrix, whole, int(strength.argmax()))
    error = _misfit(matrix, whole, factors)
    if exact and error > RANK_ONE:
        raise InconsistentObservation(
            "the gradient of the last layer must be that of one example, and what is shown of it is of no rank of one "
            f"(relative misfit {error:.3g}): the update is of several examples, or not what it is said to be"
        )
    factors = _with_last_row(factors)

    def gaps(component: RankOne) -> bool:
        return not bool(component.rows.all() and component.columns[:-1].all())

    # The layer before is better conditioned, and the logits are cheaper: imprecise gradients try the layer first,
    # precise ones the logits.
    coarse = error > COARSE
    if exact and coarse and gaps(factors):
        factors = _from_below(network, head, gradients, factors, weight)
    if exact and gaps(factors) and network.loss == "cross_entropy" and len(weight) >= 3:
        by_logits = _by_logits(factors, weight, shift, max(DECIDED, MAGNIFIED * error))
        size = (own.weight * observed).norm()
        if by_logits is not None and float(((by_logits.gradient - own.weight) * observed).norm()) < FITS * float(size):
            return by_logits
    if exact and not coarse and gaps(factors):
        factors = _from_below(network, head, gradients, factors, weight)
    columns = factors.columns[:-1]
    if not bool(factors.rows.all()):
        # Undetermined rows leave derivatives undetermined, and with them every feature.
        columns = torch.zeros_like(columns)
    return FilledHead(
        gradient=factors.left[:, None] * torch.where(columns, factors.right[:-1], 0.0),
        bias=factors.left * factors.right[-1] if bool(factors.columns[-1]) else None,
        open=~columns,
    )


def open_features(observed: Tensor, bias_observed: Tensor) -> int:
    """Returns the number of features that a last layer's gradient leaves undetermined, for entries in general position.

    Args:
        observed: bool [classes, features], of the weight's gradient.
        bias_observed: bool [classes], of the bias's.
    """
    whole = torch.cat([observed, bias_observed[:, None]], dim=1)
    rows = bias_observed if bool(bias_observed.any()) else observed.any(dim=1)
    if not bool(rows.any()):
        return observed.shape[1]
    weight = whole.sum(dim=1) * rows
    factors = _with_last_row(spread(torch.ones_like(whole, dtype=torch.float64), whole, int(weight.argmax())))
    lost = int((~factors.columns[:-1]).sum())
    equations = int(factors.rows.sum()) - 1 - 1 - (0 if bool(factors.columns[-1]) else 1)
    if len(observed) >= 3 and lost <= equations:
        return 0
    return lost if bool(factors.rows.all()) else observed.shape[1]


def _misfit(matrix: Tensor, observed: Tensor, factors: RankOne) -> float:
    """Returns the residual of the factors on the entries that they cover, relative to these."""
    about = observed & factors.rows[:, None] & factors.columns
    size = float((matrix * about).norm())
    residual = (matrix - torch.outer(factors.left, factors.right)) * about
    return float(residual.norm()) / size if size > 0 else 0.0


def _with_last_row(factors: RankOne) -> RankOne:
    """Completes a single missing row: derivatives with respect to the logits add up to 0."""
    if len(factors.rows) < 2 or int((~factors.rows).sum()) != 1:
        return factors
    left = torch.where(factors.rows, factors.left, -factors.left[factors.rows].sum())
    return RankOne(left=left, rows=torch.ones_like(factors.rows), right=factors.right, columns=factors.columns)


def _by_logits(factors: RankOne, weight: Tensor, shift: Tensor, decided: float) -> FilledHead | None:
    """Completes the gradient from the equations of the logits; None if they do not determine the missing features."""
    label = _label_among(factors)
    if label is None:
        return None
    others = factors.rows & (factors.left != 0)
    others[label] = False
    left, columns = factors.left, factors.columns[:-1]
    if int(others.sum()) < 2:
        return None
    sign = float(left[others].sum().sign())
    # c k_j = left_j * scale; others of k are positive.
    known = weight[:, columns] @ factors.right[:-1][columns] * sign
    unknowns = [weight[:, ~columns], torch.ones_like(weight[:, :1])]
    logs = (left[others].abs()).log() - shift[others]
    if bool(factors.columns[-1]):
        # x = right / right of the bias's column.
        known = weight[:, columns] @ (factors.right[:-1][columns] / factors.right[-1])
        logs = logs - known[others]
    else:
        unknowns.append(known[:, None])
    system = torch.cat(unknowns, dim=1)[others]
    # Weighted by size: rounding errors are relative to an entry, and larger for small entries, which result from more
    # operations.
    weights = left[others].abs() / left[others].abs().max()
    system, logs = system * weights[:, None], logs * weights
    sizes = system.norm(dim=0).clamp(min=torch.finfo(system.dtype).tiny)
    if system.shape[0] < system.shape[1]:
        return None
    singular = torch.linalg.svdvals(system / sizes)
    if not float(singular[-1]) > decided * float(singular[0]):
        return None
    solution = least_squares(system / sizes, logs[:, None])[:, 0] / sizes
    x = weight.new_zeros(weight.shape[1])
    x[~columns] = solution[: int((~columns).sum())]
    if bool(factors.columns[-1]):
        x[columns] = factors.right[:-1][columns] / factors.right[-1]
    else:
        if not float(solution[-1]) > 0:
            return None
        x[columns] = solution[-1] * sign * factors.right[:-1][columns]
    slopes = (weight @ x + shift).softmax(dim=0)
    slopes[label] = 0.0
    slopes[label] = -slopes.sum()
    # Scale of the component, and clip factor.
    known_left = torch.where(factors.rows, left, 0.0)
    over = float(known_left @ slopes / (known_left @ known_left))
    across = factors.right[:-1][columns]
    factor = float(across @ x[columns] / x[columns].square().sum()) / over if bool(columns.any()) else 0.0
    if not factor > 0:
        return None
    bias = factor * slopes if bool(factors.columns[-1]) else None
    return FilledHead(gradient=factor * slopes[:, None] * x, bias=bias, open=torch.zeros_like(columns))


def _label_among(factors: RankOne) -> int | None:
    """Returns the label, the row of the negative derivative, if it is among the determined rows."""
    negative, positive = (factors.left < 0) & factors.rows, (factors.left > 0) & factors.rows
    if bool(factors.columns[-1]):
        # The column of the bias has the factor 1, which fixes the sign.
        negative, positive = (negative, positive) if float(factors.right[-1]) > 0 else (positive, negative)
        return int(negative.nonzero()[0, 0]) if int(negative.sum()) == 1 else None
    if not bool(negative.any() & positive.any()):
        return None
    # The label's derivative is the largest in absolute value: the others add up to minus it.
    longest = int(factors.left.abs().argmax())
    alone = negative if bool(negative[longest]) else positive
    return longest if int(alone.sum()) == 1 else None


def _from_below(
    network: Network, head: Operation, gradients: Mapping[str, LayerGradient], factors: RankOne, weight: Tensor
) -> RankOne:
    """Completes undetermined columns from the layer before, if that determines its own input."""
    chain = _chain_below(network, head)
    if chain is None or not bool(factors.rows.all()):
        return factors
    columns, right = factors.columns[:-1], factors.right[:-1]
    if bool(factors.columns[-1]):
        signs, scale = [1.0], float(factors.right[-1])
    elif all(operation.bias is None and operation.kind in HOMOGENEOUS for operation in chain):
        signs, scale = [1.0, -1.0], 1.0
    else:
        return factors
    best: tuple[float, Tensor] | None = None
    for sign in signs:
        x, slopes = sign * right / scale, sign * scale * (weight.T @ factors.left)
        solution = _through(network, chain, gradients, x, columns, slopes)
        if solution is not None and (best is None or solution[0] < best[0]):
            best = solution[0], sign * scale * solution[1]
    if best is None or best[0] > FITS:
        return factors
    new = torch.where(columns, right, best[1])
    return RankOne(
        left=factors.left,
        rows=factors.rows,
        right=torch.cat([new, factors.right[-1:]]),
        columns=torch.cat([torch.ones_like(columns), factors.columns[-1:]]),
    )


def _chain_below(network: Network, head: Operation) -> list[Operation] | None:
    """Returns operations from the head's input back to the nearest layer with weights; None if the network branches."""
    by_name, chain = {operation.name: operation for operation in network.operations}, []
    name = head.inputs[0]
    while True:
        operation = by_name[name]
        takers = [each for each in network.operations if name in each.inputs]
        if len(takers) != 1 or operation.kind not in (*LAYERS, *ACTIVATIONS, "flatten"):
            return None
        chain.append(operation)
        if operation.kind in LAYERS:
            return chain
        name = operation.inputs[0]


def _through(
    network: Network,
    chain: list[Operation],
    gradients: Mapping[str, LayerGradient],
    x: Tensor,
    known: Tensor,
    slopes: Tensor,
) -> tuple[float, Tensor] | None:
    """Returns misfit and the head's whole input, by the layer before; None if its input is undetermined."""
    by_name, values = {operation.name: operation for operation in network.operations}, doubled(network)
    value, dark = torch.where(known, x, 0.0), torch.zeros_like(known)
    for operation in chain[:-1]:
        if operation.kind == "flatten":
            shape = by_name[operation.inputs[0]].shape
            value, known, dark, slopes = (each.view(shape) for each in (value, known, dark, slopes))
            continue
        # If the result of an activation is unknown, so is its derivative.
        dark = dark | ~known
        inverse = invert(operation, value)
        value, slopes = inverse.before, slopes * inverse.slope
        known = known if inverse.known is None else known & inverse.known
    layer = chain[-1]
    weight, below = values[str(layer.weight)], by_name[layer.inputs[0]].shape
    own = gradients[layer.name]
    rows = ~dark if layer.kind == "linear" else ~dark.flatten(1).any(dim=1)
    observed = rows.view(-1, *[1] * (weight.ndim - 1)).expand(weight.shape)
    observed = observed if own.observed is None else observed & own.observed
    output, shift = affine(layer, below, values, weight)
    gradient = gradient_of(output, torch.where(dark, 0.0, slopes))(observed)
    weights = known.to(value)
    sets = [Equations(map=output, target=torch.where(known, value - shift, 0.0), weights=weights)]
    if bool(observed.any()):
        sets.append(Equations(map=gradient, target=own.weight * observed))
    if gradient.unknowns > LARGEST_GRAM:
        return None
    solution = solve(sets, shortest=False)
    if solution.deficit:
        return None
    passing = solution.x.view(below)[None]
    for operation in reversed(chain):
        passing = result_of(operation, [passing], values)
    return solution.residual, passing[0].flatten()
