"""Cocktail Party Attack: the inputs of a batch as the independent components of a linear layer's gradient.

Kariyappa et al., "Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning using Independent
Component Analysis", ICML 2023 (arXiv:2209.05578), Section 4. The gradient of the first linear layer is G = D X^T, one
column of D and one input an example: rows of G are mixtures of the inputs, as microphones at a party record mixtures of
voices. A mixture of images is closer to a Gaussian than an image is, so the search is for the b least Gaussian
directions of the row space (FastICA: Hyvärinen & Oja 2000, contrast log cosh). Any activation may follow the layer.

Deviation: independence is required of differences of neighbouring pixels. Brightness of two photos is alike at many
pixels by chance, edges are at few; and the difference of a mixture is the mixture of differences. log cosh of
differences is, except for small values, their total variation, which the paper has as a term of its own.

Deviation: sign and scale, which independence leaves open, are decided by the bias gradient h = D 1. [G | h] is D [X |
1]^T, so each direction found is scaled to the multiple of an input whose last entry is 1. The factors by which a
defense shortens examples are in D and cancel. Only without a bias are rows stretched to the box of valid inputs.

Deviation: inputs imply their D by the network itself, and D implies the inputs by the gradient. The two are iterated to
a fixed point from the independent components, with Anderson's acceleration ("Iterative procedures for nonlinear
integral equations", J. ACM 1965), in b * b unknowns. If it converges, inputs are exact, up to rounding or noise. On
photos it converges for smooth activations in batches of up to 8 or 16; for a ReLU often not: then the independent
components are kept.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.decomposition import FastICA
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from .core import Access, Knows, NotApplicable, Observation, RankDeficient, Reconstruction, attack, granted
from .core.closed_form.input_layer import InputLayer, first_linear_layer, images_of, undone
from .core.closed_form.least_squares import least_squares
from .core.closed_form.low_rank import completed, rounding_floor

PLAIN = ("input", "flatten", "identity")
"""Operations after which a layer's inputs are still pixels."""

HOPELESS = 0.5
"""Distance between the unit columns of D by the network and by the gradient, above which an input is unmatched."""

MEMORY = 8
"""Number of earlier steps that the acceleration combines."""

CONVERGED = 0.2
"""Fraction of the starting distance that the fixed-point iteration must get below; otherwise the independent components
are kept.
"""

RELABELLED = (0, 4, 12)
"""Steps at which the likeliest label of each input is chosen anew."""


@dataclass(frozen=True, kw_only=True)
class _Mixture:
    """Gradient of the layer as left @ right.

    Attributes:
        left: float64 [rows, b].
        right: float64 [b, n], followed by the column of the bias if that was released.
        in_rows: bool [m], rows of the weight that `left` contains.
        scaled: whether `right` has the column of the bias.
    """

    left: Tensor
    right: Tensor
    in_rows: Tensor
    scaled: bool


@attack(access=Access.UPDATE, knows=Knows.BATCH_SIZE)
def cocktail(
    target: Observation, generator: torch.Generator, *, iterations: int = 1000, steps: int = 30
) -> Reconstruction:
    """Separates the inputs of a batch, mixed in the gradient of the first linear layer, by independence.

    Args:
        target: a shared update and the model it was taken at.
        generator: source of the first directions, and of the entries that a completion is tested on.
        iterations: largest number of iterations of the search for independent directions.
        steps: largest number of steps of the fixed-point iteration that follows; 0 for independence alone. Each step
            computes the contributions of a batch, and three steps those under every label.

    Returns:
        As many inputs as the batch has, the labels that explain their columns of D best, and as the objective the mean
        distance of unit columns of D that the inputs and the gradient imply. Nothing is certified. If some input is not
        matched the status is `degraded`, even if the others are, and `determined` marks the matched inputs.

    Raises:
        ValueError: a setting out of range.
        NotApplicable: no linear layer comes first, or too small a part of its gradient is shown.
        InconsistentObservation: the update is not finite, or has another length than its plan's.
        RankDeficient: the gradient has fewer directions than the batch has examples.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    layer = first_linear_layer(granted(target.structure)(), target.released, target.expected_batch)
    mixture = _mixture(layer, granted(target.batch_size), torch.finfo(target.released.dtype).eps, generator)
    start = _unit(mixture, _independent(layer, mixture, iterations, generator), target)
    unmixing, labels, distances = _matched(target, layer, mixture, start, steps)
    inputs, matched = _inputs(target, layer, mixture, unmixing), distances < HOPELESS
    return Reconstruction(
        inputs=inputs,
        labels=labels,
        objective=float(distances.mean()),
        status="ok" if bool(matched.all()) else "degraded",
        determined=matched.view(-1, *[1] * (inputs.ndim - 1)).expand_as(inputs).clone(),
    )


def _mixture(layer: InputLayer, batch_size: int, eps: float, generator: torch.Generator) -> _Mixture:
    """Returns the b strongest directions of the layer's gradient, with masked entries completed."""
    scaled = int(layer.bias_observed.sum()) >= batch_size
    gradient, observed = layer.gradient, layer.observed
    if scaled:
        gradient = torch.cat([gradient, layer.bias_gradient[:, None]], dim=1)
        observed = torch.cat([observed, layer.bias_observed[:, None]], dim=1)
    in_rows = observed.sum(dim=1) >= batch_size
    if batch_size > min(int(in_rows.sum()), layer.observed.shape[1]):
        raise NotApplicable(
            f"a batch of {batch_size} must not be larger than {layer.name}: its gradient is shown for "
            f"{int(in_rows.sum())} neurons and {layer.observed.shape[1]} inputs"
        )
    gradient, observed = gradient[in_rows], observed[in_rows]
    short = int((observed.sum(dim=0) < batch_size).sum())
    if short:
        raise NotApplicable(
            f"the update must show {batch_size} entries of every column of {layer.name}, and it shows fewer of {short}"
        )
    if not bool(observed.all()):
        gradient = completed(gradient, observed, eps, generator, most=batch_size).matrix
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    rank = int((values > rounding_floor(gradient.shape, eps) * values[0]).sum())
    if rank < batch_size:
        raise RankDeficient(
            f"the gradient of {layer.name} must have {batch_size} directions, one for each example, and it has {rank}: "
            "an input is in the batch twice, or an example gave no gradient",
            deficit=batch_size - rank,
        )
    return _Mixture(
        left=left[:, :batch_size] * values[:batch_size], right=right[:batch_size], in_rows=in_rows, scaled=scaled
    )


def _independent(layer: InputLayer, mixture: _Mixture, iterations: int, generator: torch.Generator) -> Tensor:
    """Returns the unmixing [b, b] whose components are farthest from Gaussian."""
    batch_size = len(mixture.right)
    if batch_size == 1:
        return mixture.right.new_ones(1, 1)
    pixels = mixture.right[:, : layer.gradient.shape[1]]
    shape = layer.before[0].shape
    if len(shape) >= 2 and all(operation.kind in PLAIN for operation in layer.before):
        images = pixels.reshape(batch_size, *shape)
        pixels = torch.cat([images.diff(dim=axis).flatten(1) for axis in (-1, -2)], dim=1)
    if pixels.shape[1] < batch_size:
        raise NotApplicable(f"independence needs at least {batch_size} numbers an input, got {pixels.shape[1]}")
    seed = int(torch.randint(2**31 - 1, (1,), generator=generator))
    search = FastICA(
        batch_size, fun="logcosh", whiten="unit-variance", max_iter=iterations, tol=1e-6, random_state=seed
    )
    with warnings.catch_warnings():
        # Convergence shows in the objective, against the network itself.
        warnings.simplefilter("ignore", ConvergenceWarning)
        search.fit(pixels.T.cpu().numpy())
    return torch.from_numpy(search.components_).to(pixels)


def _unit(mixture: _Mixture, unmixing: Tensor, target: Observation) -> Tensor:
    """Fixes sign and scale of an unmixing's rows, so that [X | 1] = unmixing @ right."""
    rows = unmixing @ mixture.right
    if mixture.scaled:
        return unmixing / _away_from_zero(rows[:, -1:])
    # The gradient decides neither: the sign is that of the middle of the box, and the scale the largest that fits into
    # it.
    centre = (target.input_low + target.input_high) / 2
    sign = torch.where(rows.sum(dim=1, keepdim=True) * centre < 0, -1.0, 1.0)
    highest = (sign * rows).amax(dim=1, keepdim=True)
    return unmixing * sign * target.input_high / _away_from_zero(highest)


def _away_from_zero(values: Tensor) -> Tensor:
    """Returns the values, none so small that a division by it is not finite."""
    return torch.where(values.abs() < 1e-200, 1e-200, values)


def _inputs(target: Observation, layer: InputLayer, mixture: _Mixture, unmixing: Tensor) -> Tensor:
    """Returns inputs [b, *input_shape] of the network, in the box."""
    rows = (unmixing @ mixture.right)[:, : layer.gradient.shape[1]]
    inputs = undone(layer, images_of(layer, rows[:, None]))
    middle = (target.input_low + target.input_high) / 2
    return inputs.nan_to_num(nan=middle).clamp(target.input_low, target.input_high).to(target.released)


def _matched(
    target: Observation, layer: InputLayer, mixture: _Mixture, start: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the unmixing of the step with the best agreement, its labels, and each input's distance [b]."""
    batch_size = len(start)
    implied, left_factor = _columns(target, layer, mixture)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=start.device)
    best = (start, labels, start.new_full((batch_size,), float("inf")))
    points, moves, first = [], [], best
    now = start
    for step in range(steps + 1):
        inputs = _inputs(target, layer, mixture, now)
        mixing = torch.linalg.pinv(now)
        ours = _direction(left_factor @ mixing)
        if step in RELABELLED:
            # A loop over classes bounds memory: contributions are as long as the release.
            off = [
                (_direction(implied(inputs, torch.full_like(labels, label))) - ours).norm(dim=0)
                for label in range(target.classes)
            ]
            labels = torch.stack(off).nan_to_num(nan=2.0).argmin(dim=0)
        columns = implied(inputs, labels)
        distances = (_direction(columns) - ours).norm(dim=0).nan_to_num(nan=2.0)
        distance = float(distances.mean())
        if distance < float(best[2].mean()):
            best = (now, labels, distances)
        first = best if step == 0 else first
        settled = distance < torch.finfo(target.released.dtype).eps
        if step == steps or settled or not mixture.scaled or not bool(columns.isfinite().all()):
            break
        towards = _unit(mixture, torch.linalg.pinv(least_squares(left_factor, columns)), target)
        # The iteration is over the mixing matrix, in which D is linear; that of the scaled unmixing has no clip factor
        # in it.
        points, moves = [*points, mixing][-MEMORY:], [*moves, torch.linalg.pinv(towards) - mixing][-MEMORY:]
        now = _unit(mixture, torch.linalg.pinv(_accelerated(points, moves)), target)
    # In large batches a few inputs with weak gradients may mislead all others, so a slightly smaller distance is no
    # evidence.
    return best if float(best[2].mean()) < CONVERGED * float(first[2].mean()) else first


def _accelerated(points: list[Tensor], moves: list[Tensor]) -> Tensor:
    """Returns Anderson's next point: the end of the shortest combination of earlier moves."""
    if len(points) == 1:
        return points[0] + moves[0]
    # Column by column the scales differ by those of the gradients of examples.
    size = moves[-1].norm(dim=0).clamp(min=1e-300)
    last = (moves[-1] / size).flatten()
    past = torch.stack([((move - moves[-1]) / size).flatten() for move in moves[:-1]], dim=1)
    weights = torch.linalg.pinv(past, rtol=1e-10) @ -last
    ends = [point + move for point, move in zip(points, moves, strict=True)]
    total = ends[-1]
    for weight, end in zip(weights, ends[:-1], strict=True):
        total = total + weight * (end - ends[-1])
    return total


def _columns(
    target: Observation, layer: InputLayer, mixture: _Mixture
) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """Returns a function (inputs, labels) -> columns of D [rows, b] by the network, and their rows of `left`."""
    if mixture.scaled:
        shown = layer.bias_observed & mixture.in_rows
        of_bias = lambda inputs, labels: layer.shown_of_bias(target.contributions(inputs, labels))[:, shown].T  # noqa: E731
        return of_bias, mixture.left[shown[mixture.in_rows]]

    def of_weight(inputs: Tensor, labels: Tensor) -> Tensor:
        gradients = layer.shown(target.contributions(inputs, labels))[0][:, mixture.in_rows]
        # Each is a column times a row, of which only the direction is needed.
        strongest = torch.linalg.svd(gradients, full_matrices=False)
        return (strongest.U[..., 0] * torch.sign(strongest.Vh[:, 0].sum(dim=1, keepdim=True))).T

    return of_weight, mixture.left


def _direction(columns: Tensor) -> Tensor:
    """Normalises columns to length 1."""
    return columns / columns.norm(dim=0).clamp(min=1e-300)
