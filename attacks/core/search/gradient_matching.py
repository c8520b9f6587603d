"""Gradient matching: distances between the update of guessed data and the released update.

An attack minimises a function of guessed inputs and labels. Both objectives here compare in the released space,
whitened by the noise, so they apply to dense, masked, projected and two-part updates alike; the defense bounds each
simulated example separately, as it bounded each real example. `squared_distance` is that of Zhu, Liu & Han, "Deep
Leakage from Gradients", NeurIPS 2019; `direction_mismatch` that of Geiping et al., "Inverting Gradients", NeurIPS 2020.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..targets.observation import Observation
from ..threat_model.attack_errors import NotApplicable

LayerWeights = Literal["equal", "linear", "exp"]
"""Weights of layers in a comparison, from the input on: equal, or decreasing."""


def squared_distance(target: Observation) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function (inputs, labels) -> |simulated - released|^2, whitened; differentiable in both.

    Args:
        target: a shared update; `residual` and `simulate` are read.

    Returns:
        A function of inputs [b, *input_shape] and labels, int64 [b] or class probabilities [b, classes]. Its value is
        in units of the noise's variance; without noise, in squared units of the update.
    """
    # Summed in float64: under much noise the data change only digits that float32 does not have.
    return lambda inputs, labels: target.residual(target.simulate(inputs, labels)).double().square().sum()


def expected_distance(target: Observation, noise_std: Float[Tensor, " m"]) -> float:
    """Returns the mean of `squared_distance` at the private data: the number of noisy dimensions an update can reach.

    Args:
        target: a shared update; `residual` is read.
        noise_std: standard deviation of the noise on its undivided sums.

    Returns:
        The mean, 0 without noise. The residual leaves out directions that no update can reach. The rest are counted by
        a probe with random signs: exactly for coordinates, and with a standard error of up to sqrt(2 k) for k
        directions.
    """
    signs = torch.randint(2, noise_std.shape, generator=torch.Generator().manual_seed(0)).to(noise_std) * 2 - 1
    noise = signs * noise_std / target.expected_batch
    # The residual is affine and whitens, so the difference is the probe alone, with entries of 1 and -1.
    return float((target.residual(torch.zeros_like(noise)) - target.residual(noise)).square().sum())


def direction_mismatch(target: Observation) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function (inputs, labels) -> 1 - cos(simulated, released), both whitened; differentiable in both.

    Args:
        target: a shared update; `residual`, `released` and `simulate` are read.

    Returns:
        A function of inputs and labels as `squared_distance` returns, with values in [0, 2]; the length of the update,
        which depends on clipping and on the expected batch, has no influence.
    """
    between = _directions(target, None)
    return lambda inputs, labels: between(target.simulate(inputs, labels))


def relative_distances(target: Observation) -> Callable[[Tensor, Tensor], Float[Tensor, " r"]]:
    """Returns a function (inputs [r, b, ...], labels) -> |simulated - released| / |released| [r], whitened.

    Args:
        target: a shared update; `residual` and `simulate_many` are read, or `simulate`.
    """
    length = _norm(target.residual(torch.zeros_like(target.released)))
    return lambda inputs, labels: (_norm(target.residual(simulated_many(target, inputs, labels))) / length)[:, 0]


def direction_mismatches(
    target: Observation, weights: Tensor | None = None
) -> Callable[[Tensor, Tensor], Float[Tensor, " r"]]:
    """Returns `direction_mismatch` for several guesses at once: (inputs [r, b, *input_shape], labels) -> [r].

    Args:
        target: a shared update; its functions for several guesses are used if present.
        weights: [m], weights of squares and products of released numbers; None for equal weights.
    """
    compare, between = target.compare_many, _directions(target, weights)
    if compare is None or weights is not None:
        return lambda inputs, labels: between(simulated_many(target, inputs, labels))
    length = _norm(target.residual(torch.zeros_like(target.released)))

    def mismatches(inputs: Tensor, labels: Tensor) -> Tensor:
        inner, squares = compare(inputs, labels)
        # 1 - cos cancels: mismatches below the rounding of its terms cannot be compared.
        return 1 - inner / (squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt() * length[0])

    return mismatches


def squared_distances(target: Observation) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns a function of several guesses -> |simulated - released|^2 / (2 |released|^2) and 1 - cos, whitened.

    The first is the negative log likelihood of the guess under Gaussian noise, divided by |released|^2, up to a
    constant. Close to a match the two agree up to differences in length, which the second ignores.

    Args:
        target: a shared update; its functions for several guesses are used if present.

    Returns:
        A function of inputs [r, b, *input_shape] and labels. Distances are float64: under much noise the data change
        only digits that float32 does not have.
    """
    compare, between = target.compare_many, _directions(target, None)
    tiny = torch.finfo(torch.float64).tiny
    total = target.residual(torch.zeros_like(target.released)).double().square().sum().clamp(min=tiny)

    def distances(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if compare is None:
            simulated = simulated_many(target, inputs, labels)
            squares = target.residual(simulated).double().square().sum(dim=-1)
            return squares / (2 * total), between(simulated)
        inner, squares = (part.double() for part in compare(inputs, labels))
        # |a|^2 - 2 a b + |b|^2 cancels down to the rounding of its parts, as 1 - cos of the same two numbers does.
        return (squares - 2 * inner + total) / (2 * total), 1 - inner / (squares.clamp(min=tiny) * total).sqrt()

    return distances


def surrogate_mismatches(target: Observation) -> Callable[..., Float[Tensor, " r"]]:
    """Returns `direction_mismatches` for an update of several local steps, as if all were taken at a surrogate point.

    Args:
        target: a shared update with a `surrogate`.

    Returns:
        Function (inputs [r, b, *input_shape], labels, shares [r]) -> [r], with the surrogate of a guess at its share of
        the way from the first to the last weights; differentiable in inputs and shares.

    Raises:
        NotApplicable: the update is of a single step.
    """
    surrogate, between = target.surrogate, _directions(target, None)
    if surrogate is None:
        raise NotApplicable("a surrogate is for updates of several local steps, and this is one step")
    return lambda inputs, labels, shares: between(
        torch.stack([surrogate(x, labels, share) for x, share in zip(inputs, shares, strict=True)])
    )


def layer_weights(target: Observation, kind: LayerWeights) -> Float[Tensor, " m"] | None:
    """Returns the weight of each released number, by its parameter tensor; None for equal weights.

    Args:
        target: `structure` is read, unless weights are equal.
        kind: weight of the l-th of L parameter tensors, l from 0 at the input: 1, 1 - l / L or exp(-l).

    Raises:
        NotApplicable: the release is not coordinates of a gradient.
    """
    if kind == "equal":
        return None
    if target.structure is None:
        raise NotApplicable(f"weighting '{kind}' needs the structure of the update; set 'equal'")
    structure = target.structure()
    sizes = torch.tensor([torch.Size(shape).numel() for shape in structure.shapes])
    depth = torch.arange(len(sizes), dtype=torch.float64)
    by_tensor = 1 - depth / len(sizes) if kind == "linear" else torch.exp(-depth)
    by_coordinate = by_tensor.repeat_interleave(sizes).to(target.released)
    weights = []
    for part in structure.parts:
        if part.kind != "coordinates" or part.coordinates is None or not part.of_gradient:
            raise NotApplicable(
                f"weighting '{kind}' needs released coordinates of one gradient, got {part.words or part.kind}; "
                "set 'equal'"
            )
        weights.append(by_coordinate[part.coordinates.to(by_coordinate.device)])
    return torch.cat(weights)


def simulated_many(target: Observation, inputs: Tensor, labels: Tensor) -> Float[Tensor, "r m"]:
    """Returns the releases that several guesses would give, in a single pass if the target offers that."""
    if target.simulate_many is not None:
        return target.simulate_many(inputs, labels)
    own = labels.ndim == 3 or (labels.ndim == 2 and labels.dtype == torch.int64)
    each = labels if own else labels.expand(len(inputs), *labels.shape)
    return torch.stack([target.simulate(x, y) for x, y in zip(inputs, each, strict=True)])


def _directions(target: Observation, weights: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Returns a function simulated [..., m] -> 1 - cos between it and the release, both whitened and weighted [...]."""
    # residual(p) = W (released - p) with W the whitening, so W p = residual(0) - residual(p) for every kind of release.
    shared = target.residual(torch.zeros_like(target.released))
    root = None if weights is None else weights.sqrt()
    compared = shared if root is None else root * shared
    direction = compared / _norm(compared)

    def between(simulated: Tensor) -> Tensor:
        white = shared - target.residual(simulated)
        white = white if root is None else root * white
        # |a - b|^2 / 2 = 1 - cos(a, b) for unit vectors, without the cancellation near 0.
        apart = (white / _norm(white) - direction).square().sum(dim=-1) / 2
        # A vector of zeros has no direction: for each that is zero the squared distance lacks 1, so 1/2 is added, and 1
        # - cos is 1.
        return apart + _directionless(compared) / 2 + _directionless(white) / 2

    return between


def _directionless(vectors: Tensor) -> Tensor:
    """Returns 1 for each of the vectors [..., m] that has no direction, else 0."""
    return (vectors.detach() == 0).all(dim=-1).to(vectors)


def _norm(vectors: Tensor) -> Float[Tensor, "*r 1"]:
    """Returns norms of vectors [..., m], bounded below so that vectors of zeros can be divided by them."""
    # PyTorch's norm adds up in order: it was off by 7e-4 at 11 million float32 numbers, while sums by halves are exact
    # to 1e-7. clamp: 0 / tiny is 0 while 0 / 0 is NaN, and the root has no derivative at 0.
    return vectors.square().sum(dim=-1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny).sqrt()
