"""Rank analysis: whether the equations of a recursive inversion determine the input of every layer, without data.

A layer's equations are those of its weight's gradient, K x = g, and of its output, W x = z - b. Counting them is not
enough, because they are linearly dependent: at least one row for every pair of filters is redundant. Ranks are
therefore computed from the matrices, with K from a forward and backward pass on a random input. A mask removes the rows
of dropped entries from K, but none from W, because weights are public.

Later layers restrict a layer's input further, if the layer has more outputs than its own input has dimensions: outputs
lie in the range of W. The recursion does not use these virtual constraints, which are linear in the output and not in
the input; a search for inputs does. R-GAP, section 4, calls deficits less virtual constraints RA-i. Caveat: no public
code computes that index; its sign and its sums here are this project's reading.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...targets.network import Network, Operation
from ...threat_model.attack_errors import NotApplicable
from .convolution import WeightGradient
from .forward import derivatives, doubled, results
from .gaps import open_features
from .invert import layers_of
from .joint import OpenSum, joint_equations
from .layer_equations import gradient_of
from .linear_systems import Equations, condition, factored, leading_rank, normal_matrix, rank_of
from .maps import Factors, IdentityMap, LinearMap, OuterProduct, Reshaped, Then
from .operations import ACTIVATIONS, LAYERS, affine, invert, of_norm
from .order import without_identities


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Rank of the equations of one layer's input.

    Attributes:
        layer: number of the layer, from 1 at the input.
        words: description by the model's own names.
        unknowns: dimensions of its input.
        outputs: number of equations of its output. If another layer's output is added to it and its own gradient is not
            sufficient: the number of dimensions by which the sum and the other layer's gradient raise the rank.
        rank_outputs: their rank.
        gradients: number of released equations of its weight's gradient.
        rank_gradients: their rank.
        rank: rank of both together.
        condition: condition number of both, each scaled to a mean square of 1; None if not computed, as if the rank is
            not full.
        deficit: unknowns less rank.
        virtual: `outputs` less `rank_outputs`, the virtual constraints on inputs of later layers.
        index: deficit less the virtual constraints of all layers before (RA-i); if positive, no attack on these
            equations can succeed.
    """

    layer: int
    words: str
    unknowns: int
    outputs: int
    rank_outputs: int
    gradients: int
    rank_gradients: int
    rank: int
    condition: float | None
    deficit: int
    virtual: int
    index: int

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary for JSON."""
        return asdict(self)


def random_mask(network: Network, sparsity: float, seed: int = 0) -> dict[str, Tensor]:
    """Draws a uniformly random mask of fixed size over the layers' coordinates, by parameter; True is released.

    Args:
        network: a network whose layers are all trained.
        sparsity: fraction dropped.
        seed: seed of the draw.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1), got {sparsity}")
    names = [name for layer in layers_of(network) for name in (layer.weight, layer.bias) if name is not None]
    sizes = [network.parameters[name].numel() for name in names]
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    kept = torch.zeros(sum(sizes), dtype=torch.bool)
    kept[order[int(sparsity * sum(sizes)) :]] = True
    pieces = zip(names, kept.split(sizes), strict=True)
    return {name: piece.view(network.parameters[name].shape) for name, piece in pieces}


def rank_analysis(
    network: Network,
    observed: Mapping[str, Tensor] | None = None,
    *,
    seed: int = 0,
    like: Sequence[RankReport] = (),
) -> list[RankReport]:
    """Returns a report for every layer, from the input to the last.

    Args:
        network: a network with exactly one input.
        observed: name of a parameter -> bool in its shape, the released entries of its gradient; None for all.
        seed: seed of the standard normal input from which K is computed.
        like: reports of the same network and seed under another mask; their ranks of outputs are reused.

    Raises:
        NotApplicable: an operation is of unknown kind, or the last is not a linear layer.
    """
    network = without_identities(network)
    layers = layers_of(network)
    by_name = {operation.name: operation for operation in network.operations}
    (first,) = (operation for operation in network.operations if operation.kind == "input")
    values = doubled(network)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(1, *first.shape, generator=generator, dtype=torch.float64).to(values[str(layers[-1].weight)])
    outputs, slopes = results(network, inputs), derivatives(network, inputs, label=0)
    reports, virtual = [], 0
    shows = {
        layer.name: None if observed is None else observed[str(layer.weight)].to(inputs.device) for layer in layers
    }
    maps = {}
    for layer in layers:
        linear, _ = affine(layer, by_name[layer.inputs[0]].shape, values, inputs)
        maps[layer.name] = gradient_of(linear, slopes[layer.name])(shows[layer.name]), linear
    for number, layer in enumerate(layers, start=1):
        shown, (gradient, output) = shows[layer.name], maps[layer.name]
        if layer is layers[-1]:
            report = _head(
                layer,
                number,
                gradient,
                values,
                shown,
                None if observed is None else observed.get(layer.bias or ""),
                virtual,
            )
        else:
            behind, weights = _continued(network, layer, output, outputs)
            known = like[number - 1].rank_outputs if like else None
            report = _report(number, layer, gradient, behind, weights, virtual, known)
            if report.deficit and (equations := _with_branch(network, layer, maps, values, outputs)):
                report = _sum_report(report, equations)
        virtual += report.virtual
        reports.append(report)
    return reports


def _continued(
    network: Network, operation: Operation, output: LinearMap, inversions: Mapping[str, Tensor]
) -> tuple[LinearMap | None, Tensor | None]:
    """Extends the map of a layer's output to the next recovered result; returns map and mask, None at a branch."""
    while True:
        takers = [each for each in network.operations if operation.name in each.inputs]
        if len(takers) != 1 or takers[0].kind == "add":
            return None, None
        (taker,) = takers
        if taker.kind in ACTIVATIONS:
            known = invert(taker, inversions[taker.name][0]).known
            return output, None if known is None else known.to(output.like).view(output.shape_out)
        if taker.kind in ("avg_pool2d", "flatten"):
            output = Then(output, affine(taker, operation.shape, {}, output.like)[0])
        elif taker.kind in LAYERS:
            return output, None  # its input is solved for
        elif taker.kind != "batch_norm":
            raise NotApplicable(f"every layer must be one that can be inverted, and {taker.words or taker.name} is not")
        operation = taker


def _with_branch(
    network: Network,
    operation: Operation,
    maps: Mapping[str, tuple[WeightGradient | OuterProduct, LinearMap]],
    values: Mapping[str, Tensor],
    inversions: Mapping[str, Tensor],
) -> list[Equations] | None:
    """Returns joint equations of the inputs of two added layers, this layer's first; None without such a sum."""
    by_name = {each.name: each for each in network.operations}

    def added(name: str) -> tuple[Operation, LinearMap] | None:
        """Returns the layer behind a summand, and the map from the layer's input to the summand."""
        last, norms = by_name[name], []
        while last.kind == "batch_norm":
            below = by_name[last.inputs[0]].shape
            norms.append(Factors(of_norm(last, below, values)[0], below))
            last = by_name[last.inputs[0]]
        if last.name not in maps:
            return None
        whole = maps[last.name][1]
        for norm in reversed(norms):
            whole = Then(whole, norm)
        return last, whole

    for whole in network.operations:
        summands = [added(name) for name in whole.inputs] if whole.kind == "add" else []
        both = [each for each in summands if each is not None]
        if len(both) < 2 or operation.name not in (each.name for each, _ in both):
            continue
        behind, weights = _continued(network, whole, IdentityMap(whole.shape, both[0][1].like), inversions)
        if behind is None:
            continue
        nothing = behind.like.new_zeros(())
        posed = Equations(map=behind, target=nothing, weights=weights)
        layers = tuple((layer.inputs[0], Then(linear, behind)) for layer, linear in both)

        def own(name: str, of: list[tuple[Operation, LinearMap]] = both) -> list[Equations]:
            gradients = [maps[layer.name][0] for layer, _ in of if layer.inputs[0] == name]
            return [Equations(map=_in_shape(m, by_name[name].shape), target=m.like.new_zeros(())) for m in gradients]

        return joint_equations(operation.inputs[0], [OpenSum(summands=layers, equations=posed)], own)
    return None


def _in_shape(inner: LinearMap, shape: tuple[int, ...]) -> LinearMap:
    return inner if inner.shape_in == tuple(shape) else Reshaped(inner, shape)


def _sum_report(alone: RankReport, equations: Sequence[Equations]) -> RankReport:
    """Returns the report of a layer that is solved for together with the other layer of its sum."""
    gram, _ = normal_matrix(equations)
    rank = leading_rank(gram, alone.unknowns)
    gained, deficit = rank - alone.rank, alone.unknowns - rank
    factorisation = factored(gram)
    return replace(
        alone,
        outputs=gained,
        rank_outputs=gained,
        rank=rank,
        deficit=deficit,
        index=alone.index - alone.deficit + deficit,
        condition=None if factorisation.factor is None else condition(gram, factorisation.factor),
    )


def _report(
    number: int,
    operation: Operation,
    gradient: WeightGradient | OuterProduct,
    behind: LinearMap | None,
    weights: Tensor | None,
    virtual: int,
    rank_outputs: int | None,
) -> RankReport:
    nothing = gradient.like.new_zeros(())
    sets = [Equations(map=gradient, target=nothing)]
    if behind is not None:
        sets.append(Equations(map=behind, target=nothing, weights=weights))
    if rank_outputs is None:
        rank_outputs = 0 if behind is None else _rank(behind, weights)
    size = gradient.unknowns
    gram, _ = normal_matrix(sets)
    factorisation = factored(gram)
    count = 0 if behind is None else int(torch.Size(behind.shape_out).numel() if weights is None else weights.sum())
    deficit = size - factorisation.rank
    return RankReport(
        layer=number,
        words=operation.words or operation.name,
        unknowns=size,
        outputs=count,
        rank_outputs=rank_outputs,
        gradients=_rows(gradient),
        rank_gradients=_rank_of_gradient(gradient),
        rank=factorisation.rank,
        condition=None if factorisation.factor is None else condition(gram, factorisation.factor),
        deficit=deficit,
        virtual=count - rank_outputs,
        index=deficit - virtual,
    )


def _head(
    operation: Operation,
    number: int,
    gradient: WeightGradient | OuterProduct,
    values: Mapping[str, Tensor],
    observed: Tensor | None,
    bias_observed: Tensor | None,
    virtual: int,
) -> RankReport:
    """Reports the last layer: k is unknown, and the input follows from the gradient's rank of 1 and from the logits."""
    weight = values[str(operation.weight)]
    follows = weight.shape[1]
    if observed is not None:
        shown = torch.zeros_like(observed[:, 0]) if bias_observed is None else bias_observed.to(observed.device)
        follows -= open_features(observed, shown)
    return RankReport(
        layer=number,
        words=operation.words or operation.name,
        unknowns=weight.shape[1],
        outputs=len(weight),
        rank_outputs=rank_of(weight @ weight.T),
        gradients=_rows(gradient),
        rank_gradients=follows,
        rank=follows,
        condition=None,
        deficit=weight.shape[1] - follows,
        virtual=0,
        index=weight.shape[1] - follows - virtual,
    )


def _rows(gradient: WeightGradient | OuterProduct) -> int:
    return int(torch.Size(gradient.shape_out).numel() if gradient.observed is None else gradient.observed.sum())


def _rank_of_gradient(gradient: WeightGradient | OuterProduct) -> int:
    if isinstance(gradient, OuterProduct):
        return int((gradient.squares() > 0).sum())
    grams = gradient.channel_grams()
    # Without a mask all channels of a group have the same equations.
    return sum(rank_of(gram) for gram in grams) * (gradient.shape_in[0] // len(grams))


def _rank(output: LinearMap, weights: Tensor | None) -> int:
    """Returns the rank of a map, by the smaller of its two normal matrices."""
    rows = torch.Size(output.shape_out).numel()
    if rows >= output.unknowns:
        return factored(output.gram(weights)).rank
    units = torch.eye(rows, dtype=output.like.dtype, device=output.like.device)
    units = units if weights is None else units * weights.flatten()
    images = output.adjoint(units.view(rows, *output.shape_out)).flatten(1)
    return factored(images @ images.T).rank
