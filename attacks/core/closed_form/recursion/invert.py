"""Inversion of a whole network: each explanation of the last layer (head) is walked back to the network's input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...targets.network import Network, Operation
from ...threat_model.attack_errors import InconsistentObservation, NotApplicable, RankDeficient
from .forward import doubled, drawn_inputs, results
from .gaps import filled
from .head import HeadCandidate, HeadGradient, candidates
from .linear_systems import Solution
from .observed_gradients import LayerGradient
from .operations import HOMOGENEOUS, LAYERS
from .order import without_identities
from .walk import Belief, Solver, Walk

TOLERANCE = 0.03
"""Relative residual of a layer above which no example explains a noise-free update; rounding in float32 stays below
1e-3.
"""

DRAWN = 64
"""Number of random inputs for the prior of `map`."""


@dataclass(frozen=True, kw_only=True)
class InvertedInput:
    """Input that explains an update.

    Attributes:
        x: the unclamped input, [*shape], float64; it may leave the range of inputs.
        label: class number.
        factor: clip factor of its gradient.
        residual: largest relative residual of a layer.
        solutions: by layer, in the order in which they were found.
        degraded: reasons why the input is not exact; empty if it is.
        determined: bool [*shape], entries that the equations determine; None for all.
    """

    x: Tensor
    label: int
    factor: float
    residual: float
    solutions: tuple[tuple[int, Solution], ...] = ()
    degraded: tuple[str, ...] = ()
    determined: Tensor | None = None

    def is_within(self, low: float, high: float) -> bool:
        """Returns whether it lies in the box of valid inputs, up to rounding."""
        slack = 1e-6 * (high - low)
        return bool(((self.x >= low - slack) & (self.x <= high + slack)).all())


def layers_of(network: Network) -> tuple[Operation, ...]:
    """Returns the linear and convolutional layers, from the input on; the last is the head.

    Raises:
        NotApplicable: the last operation is not a linear layer.
    """
    layers = tuple(operation for operation in network.operations if operation.kind in LAYERS)
    last = without_identities(network).operations[-1]
    if last.kind != "linear":
        raise NotApplicable(f"the last operation must be a linear layer, got {last.words or last.kind}")
    return layers


def inverted_inputs(
    network: Network,
    gradients: Mapping[str, LayerGradient],
    *,
    solver: Solver = "ls",
    clipped: bool | None = None,
    combination: bool = False,
    allow_min_norm: bool = False,
    box: tuple[float, float] = (0.0, 1.0),
    tolerance: float = TOLERANCE,
    rounding: float = 0.0,
) -> list[InvertedInput]:
    """Returns inputs that explain a gradient, best first.

    Args:
        network: the network that the gradient was computed at.
        gradients: observed gradient of each layer, by name of the operation; sums over the batch.
        solver: see `Walk`.
        clipped: whether the gradient was clipped by an unknown factor; None if not known.
        combination: whether the gradient is of several examples, which get a common input; nothing is refused as
            inconsistent then.
        allow_min_norm: see `Walk`.
        box: (low, high) of inputs; explanations are ordered by how well they fit it.
        tolerance: relative residual of a layer above which no example explains a noise-free update.
        rounding: machine epsilon of the update. Equations that it hides are left out of a noise-free update: arguments
            of saturated units, and derivatives of the loss of a class that the model is certain of. 0 uses them all.

    Raises:
        NotApplicable: the network or the release is outside of the method's scope, or rounding hides an inconsistency.
        RankDeficient: the equations of a layer do not determine its input.
        InconsistentObservation: no example explains the gradient.
    """
    network = without_identities(network)
    head = layers_of(network)[-1]
    noisy = any(float(gradient.std.max()) > 0 for gradient in gradients.values())
    if solver != "ls" and not noisy:
        # Exact equations need no weights, and a prior would only bias the solution.
        solver = "ls"
    strict = not (noisy or combination or allow_min_norm)
    rounding = rounding if strict else 0.0
    shown, uncertain = _head_gradient(
        network,
        head,
        gradients,
        exact=not (noisy or combination),
        allow_min_norm=allow_min_norm,
        number=len(layers_of(network)),
    )
    explained = candidates(shown, loss=network.loss, clipped=clipped, check=strict, rounding=rounding)
    homogeneous = _homogeneous(network)
    if bool(uncertain.any()) and shown.bias_gradient is None:
        uncertain = torch.ones_like(uncertain)  # without the bias's gradient, the scale follows only from all features
    priors = _beliefs(network, box, shown.weight) if solver == "map" else {}
    walks: list[tuple[HeadCandidate, Walk]] = []
    for candidate in _distinct(explained, network, head, homogeneous):
        scaled = {name: g.scaled(_factor(name, g, gradients[head.name], candidate)) for name, g in gradients.items()}
        walk = Walk(
            network=network,
            gradients=scaled,
            solver=solver,
            allow_min_norm=allow_min_norm,
            priors=priors,
            box=box,
            rounding=rounding,
            slope_error=candidate.slope_error,
        )
        if bool(uncertain.any()):
            walk.degraded.append(
                f"the last layer: {int(uncertain.sum())} of {len(uncertain)} entries of its input are open"
            )
        variance = None
        if solver != "ls":
            variance = float(scaled[head.name].std.square().mean() / candidate.slopes.square().sum())
        walk.begin(candidate.x, shown.weight.T @ candidate.slopes, variance, uncertain)
        walks.append((candidate, walk))
    remaining = _walked([walk for _, walk in walks], tolerance=tolerance if strict else float("inf"))
    reconstructions: list[InvertedInput] = []
    for walk in remaining:
        own = next(candidate for candidate, candidate_walk in walks if candidate_walk is walk)
        reconstructions += _results(walk, own, explained if homogeneous else (), combination)
    return sorted(reconstructions, key=lambda reconstruction: _oddness(reconstruction.x, box))


def _distinct(
    explained: Sequence[HeadCandidate], network: Network, head: Operation, homogeneous: bool
) -> Sequence[HeadCandidate]:
    """Returns the explanations of the head that need a walk of their own."""
    # In a homogeneous network inputs of different roots are multiples of each other, so that a single walk serves both.
    first = [candidate for candidate in explained if candidate.root == 0 or not homogeneous]
    kinds = {operation.name: operation.kind for operation in network.operations}
    if len(first) > 1 and kinds[head.inputs[0]] in ("sigmoid", "relu"):
        # Sigmoid and ReLU have no negative results, which decides the sign.
        first = [candidate for candidate in first if float(candidate.x.sum()) > 0] or first
    return first


def _results(walk: Walk, own: HeadCandidate, twins: Sequence[HeadCandidate], combination: bool) -> list[InvertedInput]:
    """Returns the input that a walk ends at, and its multiples that explain the update by another root.

    Args:
        walk: a walk to the input.
        own: the explanation of the head at which it began.
        twins: explanations of the head of a homogeneous network.
        combination: whether the gradient is of several examples.
    """
    result = InvertedInput(
        x=walk.input(),
        label=own.label,
        factor=own.factor,
        residual=walk.largest_residual,
        solutions=tuple(walk.solutions),
        degraded=tuple(_complaints(walk, combination)),
        determined=walk.determined,
    )
    others = [twin for twin in twins if twin.root != own.root and twin.label == own.label]
    scales = [float(own.slopes.norm() / twin.slopes.norm()) for twin in others]
    return [result, *(replace(result, x=result.x * scale, solutions=()) for scale in scales)]


def _walked(walks: list[Walk], *, tolerance: float) -> list[Walk]:
    """Advances all walks to the input side by side, and drops a walk as soon as another fits a layer far better.

    Args:
        walks: walks of the same network, each begun.
        tolerance: largest relative residual of the best walk; above it the update is of no single example.
            Independently of it, a walk is dropped if its residual exceeds 1e-9 and 100 times the smallest.

    Returns:
        The remaining walks, best first.

    Raises:
        InconsistentObservation: no walk fits a layer.
        RankDeficient: a layer's input is not determined.
        NotApplicable: no walk fits a layer better than rounding of saturated units allows.
    """
    for operation in walks[0].steps():
        remaining: list[Walk] = []
        for walk in walks:
            try:
                walk.step(operation)
                remaining.append(walk)
            except RankDeficient:
                # A wrong explanation may be rank deficient, so the error counts only if no other walk is left.
                if walk is walks[-1] and not remaining:
                    raise
        walks = remaining
        best = min(walk.largest_residual for walk in walks)
        if best > tolerance:
            if best <= max(walk.slope_error for walk in walks):
                raise NotApplicable(
                    f"the derivatives before {operation.words or operation.name} must be above rounding, and nearly "
                    f"all units are saturated: its equations fit to {best:.3g} only"
                )
            raise InconsistentObservation(
                "the update must be that of one example, and no input of the layer at "
                f"{operation.words or operation.name} explains it better than to {best:.3g} of its length: another "
                "batch size, mask, rate or noise, or a clip factor of this layer's own"
            )
        walks = [walk for walk in walks if walk.largest_residual <= max(100 * best, 1e-9)]
    return sorted(walks, key=lambda walk: walk.largest_residual)


def _head_gradient(
    network: Network,
    head: Operation,
    gradients: Mapping[str, LayerGradient],
    *,
    exact: bool,
    allow_min_norm: bool,
    number: int,
) -> tuple[HeadGradient, Tensor]:
    """Returns the last layer's gradient, completed under a mask, and a mask of its input's undetermined entries."""
    own = gradients[head.name]
    if own.directions:
        raise NotApplicable(
            "the last layer's gradient must be released in entries, and it is in coefficients of a basis"
        )
    filled_head = filled(network, head, gradients, exact=exact)
    lost = int(filled_head.open.sum())
    if lost and not allow_min_norm:
        raise RankDeficient(
            f"the gradient of the last layer, layer {number}, must show its input, and the mask hides {lost} of its "
            f"{len(filled_head.open)} entries in every class, where neither the logits nor the layer before tell them; "
            "allow_min_norm takes 0 for them",
            layer=number,
            deficit=lost,
        )
    values = doubled(network)
    weight = values[str(head.weight)].to(own.weight)
    bias = weight.new_zeros(len(weight)) if head.bias is None else values[head.bias].to(own.weight)
    head_gradient = HeadGradient(
        weight=weight, bias=bias, gradient=filled_head.gradient, bias_gradient=filled_head.bias
    )
    return head_gradient, filled_head.open


def _factor(name: str, own: LayerGradient, head: LayerGradient, explained: HeadCandidate) -> float:
    """Returns the clip factor of a layer's gradient: that of the head, if they were bounded together."""
    if own.group in (-1, head.group) or abs(explained.factor - 1) < 1e-9:
        return explained.factor
    raise NotApplicable(
        f"all layers must be bounded together where the gradient is clipped, and layer {name} is bounded by itself: "
        "its clip factor is another unknown"
    )


def _homogeneous(network: Network) -> bool:
    """Returns whether the network is homogeneous: a positive multiple of the input multiplies every result."""
    return all(operation.kind in HOMOGENEOUS and operation.bias is None for operation in network.operations)


def _beliefs(network: Network, box: tuple[float, float], like: Tensor) -> dict[str, Belief]:
    """Returns Gaussian priors of the operations' results: mean and standard deviation on random inputs."""
    (first,) = (operation for operation in network.operations if operation.kind == "input")
    drawn = drawn_inputs(first.shape, DRAWN, *box, like)
    return {
        name: Belief(centre=values.mean(dim=0), spread=max(float(values.std()), 1e-12))
        for name, values in results(network, drawn).items()
    }


def _complaints(walk: Walk, combination: bool) -> list[str]:
    complaints = list(walk.degraded)
    if walk.clamped > 0.01 * max(1, walk.units):
        complaints.append(f"{walk.clamped} of {walk.units} activations lie outside of their range")
    if combination:
        complaints.append("one input for several examples")
    if walk.largest_residual > TOLERANCE:
        complaints.append(f"the equations fit to {walk.largest_residual:.3g} only")
    return complaints


def _oddness(x: Tensor, box: tuple[float, float]) -> tuple[float, float]:
    """Returns a sort key: fraction of entries out of the box, then distance of the largest entry from its upper end."""
    low, high = box
    slack = 1e-6 * (high - low)
    outside = float(((x < low - slack) | (x > high + slack)).double().mean())
    return outside, abs(float(x.max()) - high) if bool(torch.isfinite(x).all()) else float("inf")
