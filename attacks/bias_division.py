"""Bias division: the gradient of a first linear layer, divided by that of its bias, is the input.

Phong, Aono, Hayashi, Wang & Moriai, "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", IEEE TIFS
2018, Section 3; for batches, Fowl, Geiping, Czaja, Goldblum & Goldstein, "Robbing the Fed", ICLR 2022, whose pure rows
are found here in a network that nobody has tampered with. For z = W x + b and one example, [dL/dW | dL/db] is the
matrix k (x, 1)^T of rank one, in which clipping, learning rate and divisor change k alone.

One example: least squares over the rows, and under noise of a known scale total least squares, because the bias's
gradient is as noisy as the rest. A mask leaves out entries, and what the rest determines is found by rank-one
completion. A basis that the layer has for itself gives a bilinear problem in (k, x). Of a batch whose layer is followed
by a ReLU, rows that a single example activates show that example alone: they come several at a time, and their ratios
are equal.

Deviation: ratios are not averaged over rows, as much public code does: where a bias's gradient is small the noise of
its ratio is large. What a batch's rows say is checked: without noise, a group of rows whose ratio no label explains
belongs to more than one example (of two classes, the mixtures of two rows are equal, too), and is dropped.
Caveat: labels are found by trying every class, which takes one example's gradient each.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .core import (
    Access,
    InconsistentObservation,
    Knows,
    Network,
    NotApplicable,
    Observation,
    Operation,
    Reconstruction,
    Structure,
    attack,
    granted,
)
from .core.rank_one import bilinear, completed, repeated, total_least_squares

ESTIMATORS = ("auto", "least_squares", "total_least_squares")
ROUNDING = 1e3
"""Relative differences of so many epsilons of the update's dtype are rounding."""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """What an update shows of [dL/dW | dL/db] of one layer.

    Attributes:
        values: [rows, inputs + 1].
        seen: which of them were released, and bounded together with the bias's.
        std: of their noise.
        places: int64, their coordinates in the released vector; -1 where they were not released.
    """

    values: Tensor
    seen: Tensor
    std: Tensor
    places: Tensor


@attack(access=Access.UPDATE, knows=Knows.BATCH_SIZE | Knows.DEFENSE)
def bias_division(
    target: Observation, coins: torch.Generator, *, estimator: str = "auto", restarts: int = 8
) -> Reconstruction:
    """Divides the gradient of the first linear layer by that of its bias.

    Args:
        target: one shared update and the model it was taken at, whose first layer is linear on the flattened input.
        coins: source of the random starts in a basis.
        estimator: `least_squares`; `total_least_squares`, for noise of a known scale; `auto`: the latter where there is
            noise. In a basis both are the same.
        restarts: of the alternation in a basis, at most.

    Returns:
        Inputs with what of them is determined; the rest is the middle of the box. The objective is the share of the
        release, of its norm, that they leave unexplained. Of a batch: as many as have rows of their own, the best
        explained first; none is a result, too. Certified is what explains its rows, or all of the release, to rounding.

    Raises:
        NotApplicable: the layer is another, has no bias, or has no upstream gradient; the release does not show it.
        RankDeficient: a basis has fewer coefficients than the layer has inputs and outputs.
        InconsistentObservation: without noise, no single input gives this update.
        ValueError: a setting out of range.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if restarts < 1:
        raise ValueError(f"restarts must be at least 1, got {restarts}")
    if target.structure is None:
        raise NotApplicable("the structure of the update must be known to read a layer's gradient from it")
    structure, batch_size = granted(target.structure)(), granted(target.batch_size)
    network = structure.known_network()
    first, names = input_layer(network, structure.names)
    if any(part.kind == "directions" and part.of_gradient for part in structure.parts):
        if batch_size > 1:
            raise NotApplicable(f"the batch must be of one example behind a basis, got {batch_size}")
        return _one(target, *_from_basis(target, structure, names, coins, restarts), restarts=restarts)
    layer = _shown(target, structure, names)
    if batch_size > 1:
        return _batch(target, layer, network, first, batch_size)
    return _one(target, *_from_entries(layer, estimator, target.released.dtype))


def input_layer(network: Network, trained: tuple[str, ...]) -> tuple[Operation, tuple[str, str]]:
    """The linear layer on the flattened input, and the names of its weight and bias.

    Args:
        network: any; only what stands before the layer matters, because each path to the loss goes through its rows.
        trained: names of the parameters that have a gradient.

    Raises:
        NotApplicable: there is none, with the reason.
    """
    reached = {one.name: one for one in network.operations if one.kind == "input"}
    for one in network.operations:
        if one.inputs and one.inputs[0] in reached:
            if one.kind in ("flatten", "identity"):
                reached[one.name] = one
            # On an input that is not flat, a linear layer has as many input vectors as there are positions.
            elif one.kind == "linear" and len(reached[one.inputs[0]].shape) == 1:
                return one, _parameters_of(one, network, trained)
    first = next((one for one in network.operations if one.name not in reached), None)
    got = "nothing behind it" if first is None else first.words or first.kind
    raise NotApplicable(f"the first layer must be linear on the flattened input, got {got}")


def _parameters_of(one: Operation, network: Network, trained: tuple[str, ...]) -> tuple[str, str]:
    words = one.words or one.name
    if one.weight is None or one.bias is None:
        raise NotApplicable(f"the first layer must have a bias, whose gradient divides, and {words} has none")
    if frozen := [name for name in (one.weight, one.bias) if name not in trained]:
        raise NotApplicable(f"the first layer must be trained, and {' and '.join(frozen)} is not")
    users = [other for other in network.operations if one.weight in (other.weight, other.bias)]
    users += [other for other in network.operations if one.bias in (other.weight, other.bias)]
    if any(other is not one for other in users):
        raise NotApplicable(f"the first layer's parameters must be its own, and {words} shares them")
    return one.weight, one.bias


def _shown(target: Observation, structure: Structure, names: tuple[str, str]) -> _Layer:
    """The matrix of the layer, as far as it was bounded together with the bias."""
    released = target.released.double()
    about = []
    # Positions from 1, because 0 stands where nothing was released, and a number that was scaled is not its position.
    plain = replace(structure, parts=tuple(replace(p, factors=None) for p in structure.parts))
    numbers = torch.arange(1, len(released) + 1, device=released.device, dtype=released.dtype)
    std = granted(target.noise_std).double() / target.expected_batch
    for of, values in ((structure, released), (structure, std), (plain, numbers)):
        gradients = of.gradients(values)
        weight, bias = (gradients[name] for name in names)
        about.append(torch.cat([weight.values, bias.values[:, None]], dim=1))
    gradients = structure.gradients(released)
    group = torch.cat([gradients[names[0]].group, gradients[names[1]].group[:, None]], dim=1)
    # Each part has a factor of its own, by which clipping shortened it: only within a part are ratios those of inputs.
    bias_groups = group[:, -1].unique()
    own = [int(number) for number in bias_groups if number >= 0]
    if not own:
        raise NotApplicable("the gradient of the first layer's bias must be released, and none of it is")
    counts = [int(((group == number) & (group[:, -1:] >= 0)).sum()) for number in own]
    number = own[counts.index(max(counts))]
    seen = group == number
    if not seen[:, :-1].any():
        raise NotApplicable("the first layer's weights must be bounded together with its bias, and none of them is")
    values = torch.where(seen, about[0], 0.0)
    if not (values[:, -1] != 0).any():
        raise NotApplicable(
            "zero upstream gradient: the first layer is dead, or nothing of its bias's gradient is left"
        )
    places = torch.where(seen, about[2].long() - 1, -1)
    return _Layer(values=values, seen=seen, std=about[1].abs(), places=places)


def _from_entries(layer: _Layer, estimator: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, bool]:
    """The input of one example from entries of its layer, what of it is determined, and whether anything shows."""
    right, known = completed(layer.values, layer.seen)
    noisy = bool((layer.std[layer.seen] > 0).any())
    if estimator == "least_squares" or not noisy:
        if not noisy:
            _refuse_other_rank(layer, right, known, dtype)
        return right[:-1], known[:-1], True
    # What has no noise beside what has: as if it had a millionth of it.
    std = layer.std.clamp(min=1e-6 * float(layer.std.max()))
    right, strength = total_least_squares(layer.values, layer.seen & known, std, right)
    scale = torch.where(right[-1] == 0, torch.finfo(right.dtype).tiny, right[-1])
    return right[:-1] / scale, known[:-1], strength > 1


def _refuse_other_rank(layer: _Layer, right: Tensor, known: Tensor, dtype: torch.dtype) -> None:
    """Refuses an update whose rows are no multiples of one input."""
    entries = (layer.seen & known).to(right)
    left = (layer.values * entries) @ right / (entries @ right.square()).clamp(min=torch.finfo(right.dtype).tiny)
    missing = (layer.values - torch.outer(left, right)) * entries
    apart = float(missing.norm() / (layer.values * entries).norm())
    if apart > (most := ROUNDING * torch.finfo(dtype).eps):
        raise InconsistentObservation(
            "rows of the first layer's gradient must be multiples of one input for a batch of one without noise, and "
            f"they are off by {apart:.2g} of their norm, where rounding is {most:.2g}: is the batch larger?"
        )


def _from_basis(
    target: Observation, structure: Structure, names: tuple[str, str], coins: torch.Generator, restarts: int
) -> tuple[Tensor, Tensor, bool]:
    """The input of one example from the coefficients of a basis that the layer has for itself."""
    sizes = dict(zip(structure.names, structure.shapes, strict=True))
    starts, at = {}, 0
    for name, shape in sizes.items():
        starts[name], at = at, at + torch.Size(shape).numel()
    (rows, columns), weight, bias = sizes[names[0]], starts[names[0]], starts[names[1]]
    spans = ((weight, weight + rows * columns), (bias, bias + rows))
    found, weights, biases = [], [], []
    like = target.released.double()
    for part in structure.parts:
        if part.kind != "directions" or not part.of_gradient:
            continue
        position = part.start
        for (first, last), basis in zip(part.spans, part.bases, strict=True):
            here, position = position, position + basis.shape[1]
            inside = [max(0, min(last, stop) - max(first, start)) for start, stop in spans]
            if not any(inside):
                continue
            if sum(inside) < last - first:
                raise NotApplicable(
                    "a basis must be of the first layer alone to be inverted, and the update's mixes it with other "
                    "parameters; inverting_gradients attacks any update"
                )
            if found and found[0][0] is not part:
                raise NotApplicable(
                    "the first layer's coefficients must be bounded together, and they are in two parts"
                )
            found.append((part, here))
            whole = like.new_zeros(2, rows * columns, basis.shape[1])
            for number, (start, stop) in enumerate(spans):
                a, b = max(first, start), min(last, stop)
                if a < b:
                    whole[number, a - start : b - start] = basis[a - first : b - first].to(like)
            weights.append((whole[0].view(rows, columns, -1), like[here:position]))
            biases.append(whole[1, :rows])
    if not found:
        raise NotApplicable("the update must release something of the first layer's gradient, and it releases nothing")
    coefficients = torch.cat([shown for _, shown in weights])
    if not coefficients.any():
        raise NotApplicable("zero upstream gradient: the first layer is dead")
    weight_basis = torch.cat([basis for basis, _ in weights], dim=2)
    # The back-projection is the matrix itself where the basis is whole, and else its top singular pair is a start.
    spectral = torch.linalg.svd(torch.einsum("oik,k->oi", weight_basis, coefficients), full_matrices=False)[2][0]
    low, high = target.input_low, target.input_high
    grey = torch.full_like(spectral, (low + high) / 2)
    drawn = low + (high - low) * torch.rand((restarts, columns), generator=coins, dtype=torch.float64).to(like)
    aligned = spectral * (grey.norm() / spectral.norm()) * spectral.sum().sign()
    tried = [aligned, grey, *drawn][:restarts] if restarts > 1 else [aligned]
    std = granted(target.noise_std).double() / target.expected_batch
    std = torch.cat([std[here : here + basis.shape[2]] for (_, here), (basis, _) in zip(found, weights, strict=True)])
    # What noise alone leaves of a fit, and a tenth more.
    enough = max(1e-9, 1.1 * float(std.norm() / coefficients.norm()))
    right, error = bilinear(coefficients, weight_basis, torch.cat(biases, dim=1), tried, enough)
    everything = torch.ones_like(right, dtype=torch.bool)
    if not std.any():
        return right, everything, error < 1e-6
    # Of k squares of noise alone: mean k, variance 2 k.
    energy, count = float((coefficients / std.clamp(min=1e-30)).square().sum()), len(coefficients)
    return right, everything, energy > count + 5 * (2 * count) ** 0.5


def _one(target: Observation, right: Tensor, known: Tensor, shows: bool, *, restarts: int = 1) -> Reconstruction:
    """The result of a batch of one."""
    inputs = _inputs(target, right[None], known[None])
    everything = torch.ones_like(target.released, dtype=torch.bool)[None]
    labels, unexplained = _labels(target, inputs, everything)
    objective = float(unexplained[0])
    exact = not bool(granted(target.noise_std).any()) and bool(known.all()) and objective < _rounding(target)
    return Reconstruction(
        inputs=inputs,
        labels=labels,
        objective=objective,
        restarts=restarts,
        status="ok" if shows else "degraded",
        certified=torch.tensor([exact], device=inputs.device),
        determined=known.view(1, *target.input_shape),
    )


def _batch(target: Observation, layer: _Layer, network: Network, first: Operation, batch_size: int) -> Reconstruction:
    """The examples of a batch that have rows of their own."""
    users = [one for one in network.operations if first.name in one.inputs]
    if [one.kind for one in users] != ["relu"]:
        got = ", ".join(one.words or one.kind for one in users) or "nothing"
        raise NotApplicable(
            f"the first layer must be followed by a ReLU for rows of single examples in a batch, got {got}"
        )
    right, known, own = _pure(target, layer)
    noisy = bool(granted(target.noise_std).any())
    inputs = _inputs(target, right, known)
    labels, unexplained = _labels(target, inputs, own)
    whole = known.all(dim=1)
    if not noisy:
        # Rows of several examples can be equal, and no single example explains them.
        kept = ~whole | (unexplained < 1e-2)
        inputs, known, own = inputs[kept], known[kept], own[kept]
        labels, unexplained, whole = labels[kept], unexplained[kept], whole[kept]
    # What is determined in part is explained in part, and comes behind what is proved.
    order = torch.where(whole, unexplained, 2 + unexplained).argsort(stable=True)[:batch_size]
    inputs, labels, known = inputs[order], labels[order], known[order]
    certified = whole[order] & (unexplained[order] < _rounding(target)) & (not noisy)
    summed = target.simulate(inputs, labels).detach() if len(inputs) else torch.zeros_like(target.released)
    return Reconstruction(
        inputs=inputs,
        labels=labels,
        objective=float((target.released - summed).norm() / target.released.norm()),
        status="ok" if len(inputs) else "degraded",
        certified=certified,
        determined=known.view(len(known), *target.input_shape),
    )


def _pure(target: Observation, layer: _Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of rows with one ratio: their inputs [n, inputs], what is determined of them, and their places [n, m]."""
    bias = layer.values[:, -1]
    variance = layer.std[:, -1].square()
    width = target.input_high - target.input_low
    # Rows whose bias's gradient does not stand out from its noise have ratios of noise.
    usable = layer.seen[:, -1] & (bias != 0) & (bias.square() > 100 * variance)
    values, seen, std = layer.values[usable], layer.seen[usable], layer.std[usable]
    bias = values[:, -1:]
    ratios = torch.where(seen, values / bias, 0.0)[:, :-1]
    noise = (std[:, :-1].square() + ratios.square() * std[:, -1:].square()) / bias.square()
    # Ratios that are known to a tenth of the range of inputs tell examples apart.
    told = (torch.where(seen[:, :-1], noise, 0.0).sum(1) / seen[:, :-1].sum(1).clamp(min=1)).sqrt() < 0.1 * width
    rows = usable.nonzero()[:, 0][told]
    tolerance = max(1e-6, ROUNDING * torch.finfo(target.released.dtype).eps)
    group = repeated(ratios[told], seen[told][:, :-1], noise[told], tolerance)
    chosen = group[group >= 0].unique()
    mine = (group[None] == chosen[:, None]).to(ratios)  # [groups, rows]
    # Least squares over the rows of a group, pixel by pixel: those of other groups have weight 0.
    own_seen = seen[told].to(ratios)
    shown = torch.where(seen[told], values[told], 0.0)
    above = mine @ (shown * bias[told])
    below = mine @ (own_seen * bias[told].square())
    known = (below > 0)[:, :-1]
    right = torch.where(below > 0, above / torch.where(below > 0, below, 1.0), 0.0)[:, :-1]
    own = torch.zeros(len(chosen), len(target.released), dtype=torch.bool, device=ratios.device)
    for number, here in enumerate(mine > 0):  # groups, of which there are about as many as examples
        places = layer.places[rows[here]]
        own[number, places[places >= 0]] = True
    return right, known, own


def _inputs(target: Observation, right: Tensor, known: Tensor) -> Tensor:
    """Inputs in their shape and box; the middle of the box where nothing is known."""
    low, high = target.input_low, target.input_high
    filled = torch.where(known, right.clamp(low, high), (low + high) / 2)
    return filled.to(target.released.dtype).view(len(right), *target.input_shape).clamp(low, high)


def _labels(target: Observation, inputs: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """The class by which each input explains best what it alone is responsible for, and what is then unexplained.

    Args:
        target: whose contributions are bounded as the real ones were, so that a clip factor does not matter.
        inputs: [n, *shape].
        own: bool [n, m], where the release is that of this input alone.
    """
    sums, entries = target.released * target.expected_batch, own.to(target.released)
    best = torch.full_like(entries[:, 0], torch.inf)
    labels = torch.zeros_like(best, dtype=torch.int64)
    size = (sums * entries).norm(dim=1)
    for one in range(target.classes if len(inputs) else 0):
        classes = torch.full_like(labels, one)
        error = ((sums - target.contributions(inputs, classes)) * entries).norm(dim=1) / size
        labels = torch.where(error < best, classes, labels)
        best = torch.minimum(best, error)
    return labels, best


def _rounding(target: Observation) -> float:
    return ROUNDING * torch.finfo(target.released.dtype).eps
